"""One run, from its config or its checkpoint to its result.

Never loads torch unless a recipe asks for it. Must not know: the command line, terminals.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlflame.config import resolve, toml_io, user_env_file
from rlflame.config.module_trust import format_module_options
from rlflame.config.recipe import LearningSettings, Recipe, RunConfig
from rlflame.config.runtime import RuntimeSettings
from rlflame.console.base import NullView, RunResult, RunStart, RunView
from rlflame.console.recipe_summary import RecipeSummary
from rlflame.errors import CheckpointError, ConfigError, format_command, format_shell
from rlflame.experiment import components
from rlflame.experiment.learners import launcher
from rlflame.experiment.resume import (
    check_can_learn,
    check_environment,
    check_state,
    extend_budget,
    find_best_policy,
    find_machine_differences,
    format_continue_command,
    format_fresh_replay_command,
    format_train_command,
    has_final_evaluation,
    is_finished,
)
from rlflame.experiment.run_settings import check_learners, read_recorded_env_file
from rlflame.fleet import factory
from rlflame.fleet.base import EventCounter, Fleet, Observer, TrafficCounter, make_policy_id
from rlflame.learning.factory import compute_environment_fingerprint, count_blas_threads
from rlflame.rendering.clips import make_clip_recorder
from rlflame.rollout.spec import EnvSpec, PolicyArrays
from rlflame.storage import checkpoint, replay_segments, safetensors_file
from rlflame.storage.checkpoint import Checkpoint
from rlflame.storage.machine_info import MachineLog
from rlflame.storage.run_dir import (
    RunFolder,
    format_resume_hint,
    has_checkpoint_files,
    load_newest_checkpoint,
    load_policy_file,
    report_disk_errors,
)
from rlflame.storage.run_recorder import FileRecorder
from rlflame.storage.tracking import tensorboard
from rlflame.training.critic_helper import conditions
from rlflame.training.critic_helper.helper_client import open_critic_helper
from rlflame.training.stop_signal import NullStop, abort_on_stop
from rlflame.training.trainer import StopInterrupt, StopRequest, Trainer


def train(
    config: RunConfig | None = None,
    *,
    env: str | None = None,
    algo: str | None = None,
    sets: Sequence[str] = (),
    init_from: Path | None = None,
    preset: str = "",
    fleet: Fleet | None = None,
    show: RunView | None = None,
    stop: StopRequest | None = None,
    counts: EventCounter | None = None,
    shared: bool = False,
) -> RunResult:
    """Train a config, or the preset of an environment, in a new run folder.

    A `show_fleet_event` that is handed in stays open, and `counts` are of its events; otherwise one
    is opened for this run, as the runtime settings say. The machine is `shared` where other runs
    learn on it at the same time.
    """
    if config is None:
        config, preset = resolve.resolve(
            environment=env, algorithm=algo, sets=sets, continuous=components.has_continuous_actions
        )
    recipe, runtime = config.recipe.copy_with_horizon(), config.runtime
    recipe = user_env_file.pin_env_file(recipe, runtime.env_file)
    check_learners(recipe.learning, runtime.learners)
    conditions.check_critic_helper(recipe.learning, runtime)
    if runtime.tensorboard:
        tensorboard.check_available()
    show = show or NullView()
    check_start(recipe.learning, init_from)
    if recipe.budget_warning:
        show.show_note(recipe.budget_warning)
    counts = _make_event_count(fleet, counts, show)
    with _open_fleet(fleet, runtime, recipe.learning.rollout.num_slots, counts) as fleet:
        env_spec = await_env_spec(recipe, stop or NullStop())
        components.check_memory(recipe, env_spec, resumed=False)
        start = None
        if init_from is not None:
            learning, start = apply_init_policy(recipe.learning, env_spec, init_from)
            recipe = recipe.model_copy(update={"learning": learning})
        source = components.make_initial_checkpoint(recipe, env_spec, start)
        folder = RunFolder.create(choose_run_path(recipe, runtime))
        if note := folder.format_relocation_note(runtime.out):
            show.show_note(note)
        try:
            run_start = _make_run_start(
                folder, source, runtime, fleet, preset=preset, resumed=False
            )
            return _run(
                folder, source, runtime, fleet, show, stop or NullStop(), run_start, counts, start,
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


def apply_init_policy(
    learning: LearningSettings, env: EnvSpec, file: Path
) -> tuple[LearningSettings, PolicyArrays]:
    """The settings of a run that starts from the policy in a file, and that policy."""
    spec = components.make_policy_spec(learning, env)
    start = components.check_starting_policy(load_policy_file(file), spec, str(file))
    expected, actual = learning.init_policy, make_policy_id(start)
    if expected not in (None, actual):
        raise ConfigError(
            f"The recipe starts from the policy {expected}, and {file} holds {actual}.",
            "--init-from the file it was made with, or --set learning.init_policy=none",
        )
    return learning.model_copy(update={"init_policy": actual}), start


def resume(
    target: Path,
    runtime: RuntimeSettings,
    *,
    steps: int | None = None,
    fresh_replay: bool = False,
    fleet: Fleet | None = None,
    show: RunView | None = None,
    stop: StopRequest | None = None,
    counts: EventCounter | None = None,
    shared: bool = False,
) -> RunResult:
    """Continue a run exactly where its newest checkpoint, or the named one, stands.

    A run that is finished stays as it is: the result says how it ended. With `fresh_replay` the
    weights go on, and the replay begins anew: another run from here on, with other digests.
    """
    show = show or NullView()
    if not target.exists():
        raise CheckpointError(f"{target} does not exist.", "rlflame runs lists the runs here")
    path = target if target.is_dir() else replay_segments.find_run_folder(target)
    if not has_checkpoint_files(path):
        load_newest_checkpoint(
            target, show.show_note
        )  # says what there is not, and leaves no lock behind
    folder = RunFolder.open(path)
    try:
        source = load_newest_checkpoint(target, show.show_note)
        if not source.resumable:
            raise CheckpointError(
                f"{target} holds a policy alone, without the state that training needs.",
                f"start a new run from it: {format_command('train', '--init-from', target)}",
            )
        best = find_best_policy(path, target)
        extension = extend_budget(source, steps, best)
        if fresh_replay:
            extension = components.copy_with_fresh_replay(extension)
        command = format_train_command(source.recipe, best, (steps or 0) - source.progress.steps)
        hint = f"train on from its policy, with a schedule of its own: {command}"
        check_can_learn(source, extension, hint)
        source = extension
        if is_finished(source) and has_final_evaluation(folder.path, source):
            launcher.release_learners()
            if fresh_replay:
                raise ConfigError(
                    f"This run is over: it ended at step {source.progress.steps}, and an empty "
                    "replay is for going on.",
                    format_fresh_replay_command(source, target),
                )
            return _make_result(folder, source, runtime, has_trained=False)
        check_learners(source.recipe.learning, runtime.learners)
        conditions.check_critic_helper(source.recipe.learning, runtime)
        if runtime.tensorboard:
            tensorboard.check_available()
        fingerprint = compute_environment_fingerprint(source.recipe.learning)
        for difference in find_machine_differences(source, fingerprint):
            show.show_note(
                f"This machine differs from the one before in {difference}; bits may too."
            )
        if source.recipe.budget_warning:
            show.show_note(source.recipe.budget_warning)
        source = replace(source, fingerprint=fingerprint)
        user_env_file.pin_env_file(
            source.recipe, runtime.env_file, lambda: read_recorded_env_file(folder.path)
        )
        components.check_memory(source.recipe, source.env, resumed=True)
        check_state(source, target)
        source = check_environment(source)
        slots = source.recipe.learning.rollout.num_slots
        counts = _make_event_count(fleet, counts, show)
        with _open_fleet(fleet, runtime, slots, counts) as fleet:
            run_start = _make_run_start(folder, source, runtime, fleet, preset="", resumed=True)
            return _run(
                folder, source, runtime, fleet, show, stop or NullStop(), run_start, counts, None,
                shared=shared,
            )  # fmt: skip
    finally:
        folder.release()


def choose_run_path(recipe: Recipe, runtime: RuntimeSettings) -> Path:
    if runtime.out is not None:
        return Path(runtime.out)
    learning = recipe.learning
    name = (
        f"{resolve.make_short_name(learning.environment.id)}-{learning.algorithm}-{learning.seed}"
    )
    return Path("runs") / name


def _make_run_start(
    folder: RunFolder,
    source: Checkpoint,
    runtime: RuntimeSettings,
    fleet: Fleet,
    *,
    preset: str,
    resumed: bool,
) -> RunStart:
    return RunStart(
        folder.path,
        RecipeSummary(source.recipe, source.env, preset),
        {source.recipe.learning.seed: source},
        fleet.name,
        fleet.capacity,
        resumed,
        factory.is_local_fallback(runtime),
        factory.list_candidates(fleet),
    )


def _run(
    folder: RunFolder,
    source: Checkpoint,
    runtime: RuntimeSettings,
    fleet: Fleet,
    show: RunView,
    stop: StopRequest,
    run_start: RunStart,
    counts: EventCounter,
    start: PolicyArrays | None,
    *,
    shared: bool,
) -> RunResult:
    traffic = TrafficCounter(fleet)
    recorder = FileRecorder(
        folder,
        source,
        every_steps=runtime.checkpoint_every_steps,
        keep_count=runtime.keep_checkpoints,
        observer=show,
        take_counts=lambda: {**counts.take(), **traffic.take()},
    )
    clip_recorder = make_clip_recorder(
        recorder, folder.path / "videos", source, runtime.video_every_steps, show.show_note,
        folder.check_all,
    )  # fmt: skip
    complete = False
    try:
        # Only now: a run that is refused keeps the config it has.
        _write_config(folder, source.recipe, runtime)
        machine_log = MachineLog(folder, fleet, source.progress.steps)
        if runtime.tensorboard:
            recorder.add_sink(tensorboard.TensorBoard(folder.path, source.recipe))
            show.show_note(tensorboard.format_view_hint(folder.path))
        threads = count_blas_threads(source.recipe.learning)
        with (
            show.open(run_start),
            launcher.start_learners(
                runtime, threads, lambda: format_resume_hint(folder.path), stop
            ) as group,
            open_critic_helper(
                source.recipe,
                source.policy_spec,
                runtime,
                fleet,
                source.progress,
                show.show_note,
                shared=shared,
            ) as critic_helper,
        ):
            trainer = components.make_trainer(
                source, fleet, clip_recorder, stop, folder.path.name, start, group,
                runtime.compare_learners_every, critic_helper,
            )  # fmt: skip
            complete = trainer.run()
            # Who was stopped while waiting for workers waits no longer.
            if trainer.progress.iteration > source.progress.iteration:
                machine_log.record_work(critic_helper.batch_count)
            if complete:
                complete = _score(trainer, source.recipe, recorder, stop)
    finally:
        clip_recorder.close(lambda: stop.requested or not complete)
        recorder.close()
    return _make_result(folder, checkpoint.load(folder.latest), runtime, complete=complete)


def _make_result(
    folder: RunFolder,
    saved: Checkpoint,
    runtime: RuntimeSettings,
    *,
    complete: bool = True,
    has_trained: bool = True,
) -> RunResult:
    environment = saved.recipe.learning.environment
    options: list[object] = [*format_module_options(environment.id, environment.kwargs)]
    if runtime.env_file is not None:
        options = ["--env-file", Path(runtime.env_file)]  # which names its own module
    best = find_best_policy(folder.path, folder.latest)
    return RunResult(
        folder.path,
        saved.progress,
        complete,
        has_trained,
        saved.state_digest,
        saved.digest,
        saved.evaluation,
        saved.best,
        " ".join(
            [
                format_continue_command(saved, folder.path, best),
                *([format_shell(*options)] if options else []),
            ]
        ),
        format_command("eval", best, *options),
    )


def _open_fleet(
    fleet: Fleet | None, runtime: RuntimeSettings, slots: int, observer: Observer
) -> AbstractContextManager[Fleet]:
    """The fleet that was handed in, left open at the end, or one of this run's own."""
    return (
        factory.make_training_fleet(runtime, slots, observer)
        if fleet is None
        else nullcontext(fleet)
    )


def _make_event_count(
    fleet: Fleet | None, counts: EventCounter | None, show: RunView
) -> EventCounter:
    """Of the events of a fleet; of one that was handed in alone, nothing can be counted."""
    if counts is not None:
        return counts
    return EventCounter(show.show_fleet_event) if fleet is None else EventCounter(kinds=())


def _score(
    trainer: Trainer[Any], recipe: Recipe, recorder: FileRecorder, stop: StopRequest
) -> bool:
    """The final evaluation, written into the last checkpoint; False when it was cut short."""
    snapshot = trainer.take_snapshot()
    try:
        with recorder.time_phase("evaluate"), stop.allow_interrupt():
            record = trainer.evaluate(
                components.make_evaluation_plan(recipe, final=True), snapshot.policy
            )
    except StopInterrupt:
        return False
    recorder.offer_best(snapshot.progress, record, snapshot.policy)
    recorder.save_final_evaluation(snapshot, record)
    return True


def await_env_spec(recipe: Recipe, stop: StopRequest) -> EnvSpec:
    """The environment as it is here, which may take long to make."""
    with abort_on_stop(stop):
        return components.make_env_spec(recipe.learning.environment)


def _write_config(folder: RunFolder, recipe: Recipe, runtime: RuntimeSettings) -> None:
    config = RunConfig(
        **{name: getattr(recipe, name) for name in Recipe.model_fields}, runtime=runtime
    )
    with report_disk_errors(folder.path):
        folder.check()
        safetensors_file.write_atomically(
            folder.path / "config.toml", toml_io.to_toml(config).encode()
        )
