"""One run, from its config or its checkpoint to its result.

Never loads torch unless a recipe asks for it. Must not know: the command line, terminals.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlflame.config import env_file, resolve, toml_io
from rlflame.config.module_trust import module_options
from rlflame.config.recipe import LearningSettings, Recipe, RunConfig
from rlflame.config.runtime import RuntimeSettings
from rlflame.console.base import RunResult, RunStart, Show, Silent
from rlflame.errors import CheckpointError, ConfigError, shell, typed
from rlflame.experiment import components
from rlflame.experiment.learners import launcher
from rlflame.experiment.resume import (
    begun_anew,
    best_policy,
    check_environment,
    check_learns,
    check_state,
    extended,
    finished,
    further,
    machine_differences,
    scored,
    train_from,
)
from rlflame.experiment.run_settings import check_learners, recorded_env_file
from rlflame.fleet import factory
from rlflame.fleet.base import EventCount, Fleet, Observer, TrafficCount, policy_id
from rlflame.learning.factory import blas_threads, made_with
from rlflame.rendering.clip_recorder import filmed
from rlflame.rollout.spec import EnvSpec, PolicyArrays
from rlflame.storage import checkpoint, replay_segments, safetensors_file
from rlflame.storage.checkpoint import Checkpoint
from rlflame.storage.machine_log import MachineLog
from rlflame.storage.run_dir import (
    RunFolder,
    holds_anything,
    kept,
    named_policy,
    newest_checkpoint,
    writing,
)
from rlflame.storage.run_recorder import FileRecorder
from rlflame.storage.tracking import tensorboard
from rlflame.training.critic_helper import conditions
from rlflame.training.critic_helper.critic_helper import companion
from rlflame.training.stop_signal import NeverStop, endable
from rlflame.training.trainer import Stop, StopNow, Trainer


def train(
    config: RunConfig | None = None,
    *,
    env: str | None = None,
    algo: str | None = None,
    sets: Sequence[str] = (),
    init_from: Path | None = None,
    preset: str = "",
    fleet: Fleet | None = None,
    show: Show | None = None,
    stop: Stop | None = None,
    counts: EventCount | None = None,
    shared: bool = False,
) -> RunResult:
    """Train a config, or the preset of an environment, in a new run folder.

    A `fleet` that is handed in stays open, and `counts` are of its events; otherwise one is opened
    for this run, as the runtime settings say. The machine is `shared` where other runs learn on it
    at the same time.
    """
    if config is None:
        config, preset = resolve.resolve(
            environment=env, algorithm=algo, sets=sets, continuous=components.acts_continuously
        )
    recipe, runtime = config.recipe.with_horizon(), config.runtime
    recipe = env_file.with_env_file(recipe, runtime.env_file)
    check_learners(recipe.learning, runtime.learners)
    conditions.check(recipe.learning, runtime)
    show = show or Silent()
    check_start(recipe.learning, init_from)
    if recipe.in_vain:
        show.note(recipe.in_vain)
    counts = _counts(fleet, counts, show)
    with _opened(fleet, runtime, recipe.learning.rollout.num_slots, counts) as fleet:
        env_spec = environment(recipe, stop or NeverStop())
        components.check_memory(recipe, env_spec, begun=False)
        start = None
        if init_from is not None:
            learning, start = started_from(recipe.learning, env_spec, init_from)
            recipe = recipe.model_copy(update={"learning": learning})
        begun = components.beginning(recipe, env_spec, start)
        folder = RunFolder.create(run_path(recipe, runtime))
        if moved := folder.instead_of(runtime.out):
            show.note(moved)
        try:
            described = _start(folder, begun, runtime, fleet, preset=preset, resumed=False)
            return _run(
                folder, begun, runtime, fleet, show, stop or NeverStop(), described, counts, start,
                shared=shared,
            )  # fmt: skip
        finally:
            folder.release()


def check_start(learning: LearningSettings, file: Path | None) -> None:
    if learning.init_policy is not None and file is None:
        raise ConfigError(
            f"The recipe starts from a policy (learning.init_policy = {learning.init_policy}), and "
            "no file was given.",
            "--init-from FILE, or --set learning.init_policy=none",
        )


def started_from(
    learning: LearningSettings, env: EnvSpec, file: Path
) -> tuple[LearningSettings, PolicyArrays]:
    """The settings of a run that starts from the policy in a file, and that policy."""
    spec = components.policy_spec(learning, env)
    start = components.starting_policy(named_policy(file), spec, str(file))
    wanted, found = learning.init_policy, policy_id(start)
    if wanted not in (None, found):
        raise ConfigError(
            f"The recipe starts from the policy {wanted}, and {file} holds {found}.",
            "--init-from the file it was made with, or --set learning.init_policy=none",
        )
    return learning.model_copy(update={"init_policy": found}), start


def resume(
    target: Path,
    runtime: RuntimeSettings,
    *,
    steps: int | None = None,
    fresh_replay: bool = False,
    fleet: Fleet | None = None,
    show: Show | None = None,
    stop: Stop | None = None,
    counts: EventCount | None = None,
    shared: bool = False,
) -> RunResult:
    """Continue a run exactly where its newest checkpoint, or the named one, stands.

    A run that is finished stays as it is: the result says how it ended. With `fresh_replay` the
    weights go on, and the replay begins anew: another run from here on, with other digests.
    """
    show = show or Silent()
    if not target.exists():
        raise CheckpointError(f"{target} does not exist.", "rlflame runs lists the runs here")
    path = target if target.is_dir() else replay_segments.run_of(target)
    if not holds_anything(path):
        newest_checkpoint(target, show.note)  # says what there is not, and leaves no lock behind
    folder = RunFolder.open(path)
    try:
        found = newest_checkpoint(target, show.note)
        if not found.resumable:
            raise CheckpointError(
                f"{target} holds a policy alone, without the state that training needs.",
                f"start a new run from it: {typed('train', '--init-from', target)}",
            )
        best = best_policy(path, target)
        longer = extended(found, steps, best)
        if fresh_replay:
            longer = components.with_fresh_replay(longer)
        more = train_from(found.recipe, best, (steps or 0) - found.progress.steps)
        advice = f"train on from its policy, with a schedule of its own: {more}"
        check_learns(found, longer, advice)
        found = longer
        if finished(found) and scored(folder.path, found):
            launcher.excuse()
            if fresh_replay:
                raise ConfigError(
                    f"This run is over: it ended at step {found.progress.steps}, and an empty "
                    "replay is for going on.",
                    begun_anew(found, target),
                )
            return _result(folder, found, runtime, began=False)
        check_learners(found.recipe.learning, runtime.learners)
        conditions.check(found.recipe.learning, runtime)
        here = made_with(found.recipe.learning)
        for difference in machine_differences(found, here):
            show.note(f"This machine differs from the one before in {difference}; bits may too.")
        if found.recipe.in_vain:
            show.note(found.recipe.in_vain)
        found = replace(found, fingerprint=here)
        env_file.with_env_file(
            found.recipe, runtime.env_file, lambda: recorded_env_file(folder.path)
        )
        components.check_memory(found.recipe, found.env, begun=True)
        check_state(found, target)
        found = check_environment(found)
        slots = found.recipe.learning.rollout.num_slots
        counts = _counts(fleet, counts, show)
        with _opened(fleet, runtime, slots, counts) as fleet:
            described = _start(folder, found, runtime, fleet, preset="", resumed=True)
            return _run(
                folder, found, runtime, fleet, show, stop or NeverStop(), described, counts, None,
                shared=shared,
            )  # fmt: skip
    finally:
        folder.release()


def run_path(recipe: Recipe, runtime: RuntimeSettings) -> Path:
    if runtime.out is not None:
        return Path(runtime.out)
    learning = recipe.learning
    name = f"{resolve.short_name(learning.environment.id)}-{learning.algorithm}-{learning.seed}"
    return Path("runs") / name


def _start(
    folder: RunFolder,
    begun: Checkpoint,
    runtime: RuntimeSettings,
    fleet: Fleet,
    *,
    preset: str,
    resumed: bool,
) -> RunStart:
    return RunStart(
        folder.path,
        begun,
        fleet.name,
        fleet.capacity,
        preset,
        resumed,
        factory.found_no_cluster(runtime),
        factory.candidates(fleet),
    )


def _run(
    folder: RunFolder,
    begun: Checkpoint,
    runtime: RuntimeSettings,
    fleet: Fleet,
    show: Show,
    stop: Stop,
    described: RunStart,
    counts: EventCount,
    start: PolicyArrays | None,
    *,
    shared: bool,
) -> RunResult:
    traffic = TrafficCount(fleet)
    recorder = FileRecorder(
        folder,
        begun,
        every_steps=runtime.checkpoint_every_steps,
        keep=runtime.keep_checkpoints,
        watcher=show,
        counts=lambda: {**counts.take(), **traffic.take()},
    )
    filming = filmed(
        recorder, folder.path / "videos", begun, runtime.video_every_steps, show.note,
        folder.check_whole,
    )  # fmt: skip
    complete = False
    try:
        # Only now: a run that is refused keeps the config it has.
        _write_config(folder, begun.recipe, runtime)
        machines = MachineLog(folder, fleet, begun.progress.steps)
        if runtime.tensorboard:
            recorder.also(tensorboard.TensorBoard(folder.path, begun.recipe))
            show.note(tensorboard.note(folder.path))
        threads = blas_threads(begun.recipe.learning)
        with (
            show.begin(described),
            launcher.learners(runtime, threads, lambda: kept(folder.path), stop) as group,
            companion(
                begun.recipe,
                begun.policy_spec,
                runtime,
                fleet,
                begun.progress,
                show.note,
                shared=shared,
            ) as beside,
        ):
            trainer = components.trainer(
                begun, fleet, filming, stop, folder.path.name, start, group,
                runtime.compare_learners_every, beside,
            )  # fmt: skip
            complete = trainer.run()
            # Who was stopped while waiting for workers waits no longer.
            if trainer.progress.iteration > begun.progress.iteration:
                machines.note_work(beside.batches)
            if complete:
                complete = _score(trainer, begun.recipe, recorder, stop)
    finally:
        filming.close(lambda: stop.requested or not complete)
        recorder.close()
    return _result(folder, checkpoint.load(folder.latest), runtime, complete=complete)


def _result(
    folder: RunFolder,
    saved: Checkpoint,
    runtime: RuntimeSettings,
    *,
    complete: bool = True,
    began: bool = True,
) -> RunResult:
    environment = saved.recipe.learning.environment
    own: list[object] = [*module_options(environment.id, environment.kwargs)]
    if runtime.env_file is not None:
        own = ["--env-file", Path(runtime.env_file)]  # which names its own module
    best = best_policy(folder.path, folder.latest)
    return RunResult(
        folder.path,
        saved.progress,
        complete,
        began,
        saved.state_digest,
        saved.digest,
        saved.evaluation,
        saved.best,
        " ".join([further(saved, folder.path, best), *([shell(*own)] if own else [])]),
        typed("eval", best, *own),
    )


def _opened(
    fleet: Fleet | None, runtime: RuntimeSettings, slots: int, observer: Observer
) -> AbstractContextManager[Fleet]:
    """The fleet that was handed in, left open at the end, or one of this run's own."""
    return factory.for_training(runtime, slots, observer) if fleet is None else nullcontext(fleet)


def _counts(fleet: Fleet | None, counts: EventCount | None, show: Show) -> EventCount:
    """Of the events of a fleet; of one that was handed in alone, nothing can be counted."""
    if counts is not None:
        return counts
    return EventCount(show.fleet) if fleet is None else EventCount(counted=())


def _score(trainer: Trainer[Any], recipe: Recipe, recorder: FileRecorder, stop: Stop) -> bool:
    """The final evaluation, written into the last checkpoint; False when it was cut short."""
    snapshot = trainer.snapshot()
    try:
        with recorder.phase("evaluate"), stop.interruptible():
            record = trainer.evaluate(
                components.evaluation_plan(recipe, final=True), snapshot.policy
            )
    except StopNow:
        return False
    recorder.offer_best(snapshot.progress, record, snapshot.policy)
    recorder.save_evaluated(snapshot, record)
    return True


def environment(recipe: Recipe, stop: Stop) -> EnvSpec:
    """The environment as it is here, which may take long to make."""
    with endable(stop):
        return components.environment(recipe.learning.environment)


def _write_config(folder: RunFolder, recipe: Recipe, runtime: RuntimeSettings) -> None:
    config = RunConfig(
        **{name: getattr(recipe, name) for name in Recipe.model_fields}, runtime=runtime
    )
    with writing(folder.path):
        folder.check()
        safetensors_file.write_atomically(
            folder.path / "config.toml", toml_io.to_toml(config).encode()
        )
