"""Trains from a config or a checkpoint, and returns the result of the run.

torch is imported only if the recipe or torchrun needs it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from rlflame.config.module_trust import format_module_options
from rlflame.config.recipe import Recipe, RunConfig
from rlflame.config.resolve import format_config
from rlflame.config.runtime import RuntimeSettings
from rlflame.console.base import NullView, RunResult, RunStart, RunView
from rlflame.console.recipe_summary import RecipeSummary
from rlflame.console.run_progress import RECENT_EPISODES
from rlflame.errors import CheckpointError, ConfigError, format_command, format_shell
from rlflame.experiment import components, resume
from rlflame.experiment.episode_choice import choose_episode_start
from rlflame.experiment.gpu import find_device_hint
from rlflame.experiment.learners import launcher
from rlflame.experiment.learners.learner_group import LearnerGroup, open_learner_group
from rlflame.experiment.preflight import run_preflight
from rlflame.experiment.resume import Budget
from rlflame.fleet import factory
from rlflame.fleet.base import EventCounter, Fleet, TrafficCounter
from rlflame.learning.base import Algorithm
from rlflame.learning.factory import compute_environment_fingerprint, make_algorithm
from rlflame.rendering.clip_recorder import ClipRecorder
from rlflame.rollout.task import PolicyArrays
from rlflame.storage import checkpoint, safetensors_file
from rlflame.storage.checkpoint import Checkpoint
from rlflame.storage.metrics import read_last_returns
from rlflame.storage.run_folder import (
    RunFolder,
    format_resume_hint,
    has_checkpoint_files,
    load_newest_checkpoint,
    report_disk_errors,
)
from rlflame.storage.run_recorder import FileRecorder, MachineLog
from rlflame.storage.tracking import tensorboard
from rlflame.training.evaluation import make_evaluation_plan
from rlflame.training.stop_signal import NullStop
from rlflame.training.trainer import StopInterrupt, StopRequest, Trainer


@dataclass(frozen=True, kw_only=True)
class RunHost:
    """The display, the stop request and the fleet that a caller gives to a run."""

    view: RunView = field(default_factory=NullView)
    stop: StopRequest = field(default_factory=NullStop)
    #: A fleet that stays open after the run. If None, the run opens and closes its own fleet.
    fleet: Fleet | None = None
    #: Counts the events of `fleet`. If None, these events are not counted.
    counts: EventCounter | None = None
    #: Whether other runs train on this machine at the same time.
    is_shared: bool = False

    def show_warning(self, text: str) -> None:
        """Show a warning about the recipe, unless this is one of the seeds of a sweep."""
        if not self.is_shared:
            self.view.show_note(text)


def train_run(config: RunConfig, host: RunHost, preset: str, init_from: Path | None) -> RunResult:
    """Train a policy with this config in a new run folder."""
    runtime, recipe = config.runtime, config.recipe.copy_with_horizon()
    recipe, env, start = run_preflight(
        recipe, runtime, init_from=init_from, stop=host.stop, show_note=host.show_warning
    )
    if hint := find_device_hint(recipe.learning):
        host.show_warning(hint)
    source = components.make_initial_checkpoint(recipe, env, start)
    with _open_fleet(runtime, recipe, host) as rollouts:
        source = choose_episode_start(source, rollouts[0], host.stop, host.view.show_note)
        name = str(recipe.learning.seed)
        folder = components.create_folder(runtime, recipe.learning, name, host.view.show_note)
        try:
            run = Run(folder, source, runtime, host, rollouts, preset=preset, start=start)
            return run.train()
        finally:
            folder.release()


def resume_run(
    target: Path,
    runtime: RuntimeSettings,
    host: RunHost,
    *,
    budget: Budget | None,
    fresh_replay: bool = False,
) -> RunResult:
    """Continue a run from its latest checkpoint, or from a checkpoint file.

    If `fresh_replay` is True, the run keeps its weights but starts with an empty replay buffer. Its
    results and digests then differ from those of an uninterrupted run.
    """
    folder = _open_run_folder(target, host.view)
    try:
        source = resume.load_source(
            target, budget, fresh_replay=fresh_replay, show_note=host.view.show_note
        )
        if resume.is_finished(source) and resume.has_final_evaluation(folder.path, source):
            launcher.release_learners()
            if fresh_replay:
                raise ConfigError(
                    f"This run ended at step {source.progress.steps}; --fresh-replay needs "
                    "more steps to train.",
                    format_command(
                        "resume", target, "--fresh-replay", "--steps", 2 * source.progress.steps
                    ),
                )
            return _make_result(folder, runtime, source, complete=True, has_trained=False)
        resume.check_device(source, target)
        fingerprint = compute_environment_fingerprint(source.recipe.learning)
        if differences := resume.find_machine_differences(source, fingerprint):
            host.view.show_note(
                f"This machine differs from the previous one ({'; '.join(differences)}), so the "
                "result may not be bit-identical to that of an uninterrupted run."
            )
        source = replace(source, fingerprint=fingerprint)
        _, env, _ = run_preflight(
            source.recipe, runtime, is_resume=True, stop=host.stop, show_note=host.show_warning
        )
        resume.check_state(source, target)
        source = resume.check_environment(source, env)
        with _open_fleet(runtime, source.recipe, host) as rollouts:
            return Run(folder, source, runtime, host, rollouts, is_resume=True).train()
    finally:
        folder.release()


def _open_run_folder(target: Path, view: RunView) -> RunFolder:
    if not target.exists():
        raise CheckpointError(f"{target} does not exist.", "list the runs here: rlflame runs")
    path = resume.find_run(target)
    if not has_checkpoint_files(path):
        load_newest_checkpoint(target, view.show_note)  # raises before a lock file is created
    return RunFolder.open(path)


@contextmanager
def _open_fleet(
    runtime: RuntimeSettings, recipe: Recipe, host: RunHost
) -> Iterator[tuple[Fleet, EventCounter]]:
    """Yield the host's fleet, or a new one for this run, and its event counter."""
    if host.fleet is not None:
        yield host.fleet, host.counts or EventCounter(kinds=())
        return
    counts = host.counts or EventCounter(host.view.show_fleet_event)
    slots = recipe.learning.rollout.num_slots
    with factory.make_fleet(runtime, slots, counts, is_training=True) as fleet:
        yield fleet, counts


@dataclass(frozen=True)
class Run:
    """A run in a folder that this process has locked."""

    folder: RunFolder
    #: The checkpoint that training starts from.
    source: Checkpoint
    runtime: RuntimeSettings
    host: RunHost
    #: The fleet and its event counter.
    rollouts: tuple[Fleet, EventCounter]
    preset: str = ""
    #: The policy whose weights a new run starts with, if any.
    start: PolicyArrays | None = None
    is_resume: bool = False

    def train(self) -> RunResult:
        """Train until the budget is spent, then evaluate; end early if stopped."""
        (fleet, counts), host = self.rollouts, self.host
        traffic = TrafficCounter(fleet)
        complete = False
        with ExitStack() as stack:
            recorder = FileRecorder(
                self.folder,
                self.source,
                every_steps=self.runtime.checkpoint_every_steps,
                every_minutes=self.runtime.checkpoint_every_minutes,
                keep_count=self.runtime.keep_checkpoints,
                observer=host.view,
                take_counts=lambda: {**counts.take(), **traffic.take()},
            )
            stack.callback(recorder.close)
            clip_recorder = ClipRecorder(
                recorder,
                self.folder.path / "videos",
                self.source,
                self.runtime.video_every_steps or 0,
                host.view.show_note,
                check=self.folder.check_all,
            )
            stack.callback(clip_recorder.close, lambda: host.stop.is_requested or not complete)
            # Write the config only now, so that a rejected resume does not change the saved config.
            self._write_config()
            complete = self._train(fleet, recorder, clip_recorder)
        result = checkpoint.load(self.folder.latest)
        return _make_result(self.folder, self.runtime, result, complete=complete, has_trained=True)

    def _train(self, fleet: Fleet, recorder: FileRecorder, clip_recorder: ClipRecorder) -> bool:
        """Train and run the final evaluation; return whether both were completed."""
        source, runtime, host = self.source, self.runtime, self.host
        machine_log = MachineLog(self.folder, fleet, source.progress.steps)
        if runtime.tensorboard:
            recorder.add_sink(tensorboard.TensorBoard(self.folder.path, source.recipe))
            host.view.show_note(tensorboard.format_view_hint(self.folder.path))
        run_start = RunStart(
            self.folder.path,
            RecipeSummary(source.recipe, source.env, self.preset),
            {source.recipe.learning.seed: source},
            fleet.name,
            fleet.capacity,
            self.is_resume,
            read_last_returns(self.folder.path / "episodes.csv", RECENT_EPISODES),
            factory.is_local_fallback(runtime),
            factory.list_candidates(fleet),
        )
        with host.view.open(run_start), self._open_learners(fleet) as (learner, group):
            name, show_note = self.folder.path.name, host.view.show_note
            trainer = components.make_trainer(
                source, fleet, clip_recorder, host.stop, name, learner, show_note
            )
            complete = trainer.run()
            # A run that was stopped while it waited for workers has no work to record.
            if trainer.progress.iteration > source.progress.iteration:
                shared_batches = group.batch_count if group is not None else 0
                machine_log.record_work(self.rollouts[1].read_episodes(), shared_batches)
            return complete and _score(trainer, source.recipe, recorder, host.stop)

    @contextmanager
    def _open_learners(self, fleet: Fleet) -> Iterator[tuple[Algorithm[Any], LearnerGroup | None]]:
        """Yield the algorithm, and the group of local learners if there is one."""
        source, runtime, host = self.source, self.runtime, self.host
        learning, compare_every = source.recipe.learning, runtime.compare_learners_every
        hint = partial(format_resume_hint, self.folder.path)
        with launcher.start_learners(runtime, hint, host.stop) as group:
            if group.size > 1:
                yield components.make_learner(source, self.start, group, compare_every), None
                return
            algorithm = make_algorithm(learning, source.policy_spec, self.start)
            is_parallel = fleet.capacity > 1 or factory.is_remote(fleet.name)
            is_idle = is_parallel and not host.is_shared
            plan = components.make_plan(source.recipe, source.env, self.folder.path.name)
            show_note = host.view.show_note
            with open_learner_group(
                algorithm, plan, source.progress, runtime, show_note, has_idle_cores=is_idle
            ) as learners:
                yield learners or algorithm, learners

    def _write_config(self) -> None:
        config = RunConfig.from_recipe(self.source.recipe, self.runtime)
        with report_disk_errors(self.folder.path):
            self.folder.check()
            safetensors_file.write_atomically(
                self.folder.path / "config.toml", format_config(config).encode()
            )


def _make_result(
    folder: RunFolder,
    runtime: RuntimeSettings,
    result: Checkpoint,
    *,
    complete: bool,
    has_trained: bool,
) -> RunResult:
    environment = result.recipe.learning.environment
    options: list[object] = [
        *format_module_options(
            environment.id, environment.kwargs, environment.wrapper_names, runtime.env_file
        )
    ]
    if runtime.env_file is not None:
        options = ["--env-file", Path(runtime.env_file), *options]
    best = resume.find_best_policy(folder.path, folder.latest)
    command = resume.format_continue_command(result, folder.path, best)
    return RunResult(
        folder.path,
        result.progress,
        complete,
        has_trained,
        result.state_digest,
        result.digest,
        result.evaluation,
        result.best,
        f"{command} {format_shell(*options)}".rstrip(),
        format_command("eval", best, *options),
    )


def _score(
    trainer: Trainer[Any], recipe: Recipe, recorder: FileRecorder, stop: StopRequest
) -> bool:
    """Run and save the final evaluation; return False if it was stopped."""
    snapshot = trainer.take_snapshot()
    try:
        with recorder.time_phase("evaluate"), stop.allow_interrupt():
            record = trainer.evaluate(
                make_evaluation_plan(recipe.evaluation, final=True), snapshot.policy
            )
    except StopInterrupt:
        return False
    recorder.offer_best(snapshot.progress, record, snapshot.policy)
    recorder.save_final_evaluation(snapshot, record)
    return True
