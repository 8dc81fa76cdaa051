"""One run, from its config or its checkpoint to its result.

Never loads torch unless a recipe asks for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rlflame.config import resolve, toml_io
from rlflame.config.module_trust import format_module_options
from rlflame.config.recipe import Recipe, RunConfig
from rlflame.config.runtime import RuntimeSettings
from rlflame.console.base import NullView, RunResult, RunStart, RunView
from rlflame.console.recipe_summary import RecipeSummary
from rlflame.errors import CheckpointError, ConfigError, format_command, format_shell
from rlflame.experiment import components, resume
from rlflame.experiment.learners import launcher
from rlflame.experiment.preflight import list_warnings, run_preflight
from rlflame.experiment.recorded_config import read_recorded_env_file
from rlflame.fleet import factory
from rlflame.fleet.base import EventCounter, Fleet, TrafficCounter
from rlflame.learning.factory import compute_environment_fingerprint, count_blas_threads
from rlflame.rendering.clip_recorder import ClipRecorder
from rlflame.rollout.task import PolicyArrays
from rlflame.storage import checkpoint, safetensors_file
from rlflame.storage.checkpoint import Checkpoint
from rlflame.storage.run_folder import (
    RunFolder,
    format_resume_hint,
    has_checkpoint_files,
    load_newest_checkpoint,
    report_disk_errors,
)
from rlflame.storage.run_recorder import FileRecorder, MachineLog
from rlflame.storage.tracking import tensorboard
from rlflame.training.critic_helper.helper_client import open_critic_helper
from rlflame.training.evaluation import make_evaluation_plan
from rlflame.training.stop_signal import NullStop
from rlflame.training.trainer import StopInterrupt, StopRequest, Trainer


@dataclass(frozen=True, kw_only=True)
class RunHost:
    """Who shows and stops a run, and what the run shares with others."""

    view: RunView = field(default_factory=NullView)
    stop: StopRequest = field(default_factory=NullStop)
    #: A fleet that stays open afterwards; None: the run opens the fleet of its runtime.
    fleet: Fleet | None = None
    #: The observer of that fleet's events; without one they are not counted.
    counts: EventCounter | None = None
    #: Whether other runs learn on this machine at the same time.
    shared: bool = False

    def show_warnings(self, recipe: Recipe) -> None:
        """Show the warnings, unless a sweep has shown them for all of its runs."""
        for warning in () if self.shared else list_warnings(recipe):
            self.view.show_note(warning)


@contextmanager
def start_run(
    config: RunConfig,
    *,
    preset: str = "",
    init_from: Path | None = None,
    host: RunHost | None = None,
) -> Iterator[Run]:
    """A new run folder for a config, locked and ready to train."""
    host, runtime = host or RunHost(), config.runtime
    recipe = config.recipe.copy_with_horizon()
    preflight = run_preflight(recipe, runtime, init_from=init_from, stop=host.stop)
    source = components.make_initial_checkpoint(preflight.recipe, preflight.env, preflight.start)
    host.show_warnings(preflight.recipe)
    with _open_fleet(runtime, recipe, host) as rollouts:
        folder = RunFolder.create(choose_run_path(recipe, runtime))
        try:
            if note := folder.format_relocation_note(runtime.out):
                host.view.show_note(note)
            yield Run(folder, source, runtime, host, rollouts, preset=preset, start=preflight.start)
        finally:
            folder.release()


@contextmanager
def open_run(
    target: Path,
    runtime: RuntimeSettings,
    *,
    steps: int | None = None,
    fresh_replay: bool = False,
    host: RunHost | None = None,
) -> Iterator[Run]:
    """A run at its newest checkpoint, or at the named one, locked and ready to continue.

    With `fresh_replay` the weights stay and the replay is emptied, which makes it another run from
    there on, with other digests.
    """
    host = host or RunHost()
    folder = _open_run_folder(target, host.view)
    try:
        source = resume.load_source(
            target, steps, fresh_replay=fresh_replay, show_note=host.view.show_note
        )
        if resume.is_finished(source) and resume.has_final_evaluation(folder.path, source):
            launcher.release_learners()
            if fresh_replay:
                raise ConfigError(
                    f"This run is over: it ended at step {source.progress.steps}, and an empty "
                    "replay is for going on.",
                    resume.format_fresh_replay_command(source, target),
                )
            yield Run(folder, source, runtime, host, None, resumed=True)
            return
        fingerprint = compute_environment_fingerprint(source.recipe.learning)
        for difference in resume.find_machine_differences(source, fingerprint):
            host.view.show_note(
                f"This machine differs from the previous one ({difference}); results may not be "
                "bit-identical."
            )
        source = replace(source, fingerprint=fingerprint)
        preflight = run_preflight(
            source.recipe,
            runtime,
            resumed=True,
            stop=host.stop,
            read_recorded_env_file=lambda: read_recorded_env_file(folder.path),
        )
        host.show_warnings(source.recipe)
        resume.check_state(source, target)
        source = resume.check_environment(source, preflight.env)
        with _open_fleet(runtime, source.recipe, host) as rollouts:
            yield Run(folder, source, runtime, host, rollouts, resumed=True)
    finally:
        folder.release()


def choose_run_path(recipe: Recipe, runtime: RuntimeSettings) -> Path:
    if runtime.out is not None:
        return Path(runtime.out)
    learning = recipe.learning
    name = resolve.make_short_name(learning.environment.id)
    return Path("runs") / f"{name}-{learning.algorithm}-{learning.seed}"


def _open_run_folder(target: Path, view: RunView) -> RunFolder:
    if not target.exists():
        raise CheckpointError(f"{target} does not exist.", "rlflame runs lists the runs here")
    path = resume.find_run(target)
    if not has_checkpoint_files(path):
        load_newest_checkpoint(target, view.show_note)  # raises, and leaves no lock behind
    return RunFolder.open(path)


@contextmanager
def _open_fleet(
    runtime: RuntimeSettings, recipe: Recipe, host: RunHost
) -> Iterator[tuple[Fleet, EventCounter]]:
    """The fleet of the host, or one for this run, with the observer of its events."""
    if host.fleet is not None:
        yield host.fleet, host.counts or EventCounter(kinds=())
        return
    counts = host.counts or EventCounter(host.view.show_fleet_event)
    slots = recipe.learning.rollout.num_slots
    with factory.make_fleet(runtime, slots, counts, is_training=True) as fleet:
        yield fleet, counts


@dataclass(frozen=True)
class Run:
    """A run folder that this process has locked; made by `start_run` and `open_run`."""

    folder: RunFolder
    #: Where the run stands.
    source: Checkpoint
    runtime: RuntimeSettings
    host: RunHost
    #: The fleet and the observer of its events; None where the run is complete.
    rollouts: tuple[Fleet, EventCounter] | None
    preset: str = ""
    #: The policy that a new run starts from.
    start: PolicyArrays | None = None
    resumed: bool = False

    def train(self) -> RunResult:
        """Train to the end of the recipe or to a stop request, and score the final policy."""
        if self.rollouts is None:
            return self._make_result(self.source, complete=True, has_trained=False)
        (fleet, counts), host = self.rollouts, self.host
        traffic = TrafficCounter(fleet)
        recorder = FileRecorder(
            self.folder,
            self.source,
            every_steps=self.runtime.checkpoint_every_steps,
            keep_count=self.runtime.keep_checkpoints,
            observer=host.view,
            take_counts=lambda: {**counts.take(), **traffic.take()},
        )
        clip_recorder = ClipRecorder(
            recorder,
            self.folder.path / "videos",
            self.source,
            self.runtime.video_every_steps or 0,
            host.view.show_note,
            check=self.folder.check_all,
        )
        complete = False
        try:
            # Not earlier: a run that is refused keeps its config.
            self._write_config()
            complete = self._train(fleet, recorder, clip_recorder)
        finally:
            clip_recorder.close(lambda: host.stop.requested or not complete)
            recorder.close()
        saved = checkpoint.load(self.folder.latest)
        return self._make_result(saved, complete=complete, has_trained=True)

    def _train(self, fleet: Fleet, recorder: FileRecorder, clip_recorder: ClipRecorder) -> bool:
        """Whether training and the final evaluation are complete."""
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
            self.resumed,
            factory.is_local_fallback(runtime),
            factory.list_candidates(fleet),
        )
        threads = count_blas_threads(source.recipe.learning)
        with (
            host.view.open(run_start),
            launcher.start_learners(
                runtime, threads, lambda: format_resume_hint(self.folder.path), host.stop
            ) as group,
            open_critic_helper(
                source.recipe,
                source.policy_spec,
                runtime,
                fleet,
                source.progress,
                host.view.show_note,
                shared=host.shared,
            ) as helper,
        ):
            learner = components.make_learner(
                source, self.start, group, runtime.compare_learners_every
            )
            algorithm, name = helper.wrap_algorithm(learner), self.folder.path.name
            trainer = components.make_trainer(
                source, fleet, clip_recorder, host.stop, name, algorithm
            )
            complete = trainer.run()
            # A stop while waiting for workers leaves no work to record.
            if trainer.progress.iteration > source.progress.iteration:
                machine_log.record_work(helper.batch_count)
            return complete and _score(trainer, source.recipe, recorder, host.stop)

    def _write_config(self) -> None:
        config = RunConfig.from_recipe(self.source.recipe, self.runtime)
        with report_disk_errors(self.folder.path):
            self.folder.check()
            safetensors_file.write_atomically(
                self.folder.path / "config.toml", toml_io.to_toml(config).encode()
            )

    def _make_result(self, saved: Checkpoint, *, complete: bool, has_trained: bool) -> RunResult:
        environment = saved.recipe.learning.environment
        options: list[object] = [*format_module_options(environment.id, environment.kwargs)]
        if self.runtime.env_file is not None:
            options = ["--env-file", Path(self.runtime.env_file)]  # which names its own module
        best = resume.find_best_policy(self.folder.path, self.folder.latest)
        command = resume.format_continue_command(saved, self.folder.path, best)
        return RunResult(
            self.folder.path,
            saved.progress,
            complete,
            has_trained,
            saved.state_digest,
            saved.digest,
            saved.evaluation,
            saved.best,
            " ".join([command, *([format_shell(*options)] if options else [])]),
            format_command("eval", best, *options),
        )


def _score(
    trainer: Trainer[Any], recipe: Recipe, recorder: FileRecorder, stop: StopRequest
) -> bool:
    """The final evaluation, written into the last checkpoint; False when it was cut short."""
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
