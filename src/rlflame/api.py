"""rlflame from Python: the same parts that the command line uses.

    from rlflame.api import load_policy
    policy = load_policy("best.safetensors")
    action = policy(observation)

Never loads torch unless a recipe asks for it. Must not know: the command line, terminals.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from rlflame import (
    build,
    checkpoint,
    env_file,
    fleets,
    presets,
    segments,
    tensor_file,
    tensorboard,
    toml,
    video,
)
from rlflame.checkpoint import Checkpoint
from rlflame.clips import filmed
from rlflame.config import LearningSettings, Recipe, RunConfig, RuntimeSettings
from rlflame.errors import CheckpointError, ConfigError
from rlflame.evaluate import EvaluationPlan, EvaluationRecord
from rlflame.evaluate import evaluate as run_episodes
from rlflame.fleet import EventCount, Fleet, Observer, TrafficCount, policy_id
from rlflame.machine_log import MachineLog
from rlflame.recorder import FileRecorder
from rlflame.render import Drawing
from rlflame.rollout.child import versions
from rlflame.rollout.policy import Policy
from rlflame.rollout.spec import Array, EnvSpec, PolicyArrays
from rlflame.run_folder import RunFolder, named_policy, newest_checkpoint
from rlflame.show import RunResult, RunStart, Show, Silent
from rlflame.stop import NeverStop
from rlflame.tensorboard import TensorBoard
from rlflame.trainer import Stop, StopNow, Trainer


class LoadedPolicy:
    """A policy from a file: observation in, action out, as the environment wants them."""

    def __init__(self, source: Checkpoint) -> None:
        self.checkpoint = source
        self._policy = Policy(source.policy_spec, source.policy)
        width, size = source.policy_spec.width, source.policy_spec.observation_size
        self._rows = np.zeros((width, size), np.float32)

    def __call__(self, observation: Any) -> Any:
        """The deterministic action for one observation, both of the environment's own shapes."""
        with np.errstate(over="ignore"):
            flat = np.asarray(observation, np.float32).ravel()
        if flat.shape != self._rows.shape[1:]:
            raise ValueError(
                f"observation of {flat.size} numbers; this policy takes {self._rows.shape[1]}"
            )
        if not np.isfinite(flat).all():
            raise ValueError("observation with NaN, infinity or a number beyond float32")
        self._rows[0] = flat
        action: Array = self._policy.to_environment(self._policy.best(self._rows))[0]
        env = self.checkpoint.env
        if env.action_kind == "discrete":
            return int(action) + env.action_start
        shape = action.shape if env.action_shape is None else env.action_shape
        return action.copy().reshape(shape)


def load_policy(path: str | Path) -> LoadedPolicy:
    """The policy in a checkpoint or policy file."""
    return LoadedPolicy(checkpoint.load(Path(path)))


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
) -> RunResult:
    """Train a config, or the preset of an environment, in a new run folder.

    A `fleet` that is handed in stays open, and `counts` are of its events; otherwise one is opened
    for this run, as the runtime settings say.
    """
    if config is None:
        config, preset = presets.resolve(
            environment=env, algorithm=algo, sets=sets, continuous=build.acts_continuously
        )
    recipe, runtime = config.recipe.with_horizon(), config.runtime
    if runtime.env_file is not None:
        env_file.admit(runtime.env_file)
    show = show or Silent()
    if recipe.learning.init_policy is not None and init_from is None:
        raise ConfigError(
            f"The recipe starts from a policy (learning.init_policy = "
            f"{recipe.learning.init_policy}), and no file was given.",
            "--init-from FILE, or --set learning.init_policy=none",
        )
    counts = _counts(fleet, counts, show)
    with _open(fleet, runtime, recipe.learning.rollout.num_slots, counts) as fleet:
        env_spec = _environment(recipe, stop or NeverStop())
        build.check_memory(recipe, env_spec, begun=False)
        start = None
        if init_from is not None:
            learning, start = started_from(recipe.learning, env_spec, init_from)
            recipe = recipe.model_copy(update={"learning": learning})
        begun = build.beginning(recipe, env_spec, start)
        folder = RunFolder.create(run_path(recipe, runtime))
        try:
            alone = fleets.found_no_cluster(runtime)
            described = RunStart(
                folder.path, begun, fleet.name, fleet.capacity, preset, False, alone
            )
            return _run(
                folder, begun, runtime, fleet, show, stop or NeverStop(), described, counts, start
            )
        finally:
            folder.release()


def started_from(
    learning: LearningSettings, env: EnvSpec, file: Path
) -> tuple[LearningSettings, PolicyArrays]:
    """The settings of a run that starts from the policy in a file, and that policy."""
    spec = build.policy_spec(learning, env)
    start = build.starting_policy(named_policy(file), spec, str(file))
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
) -> RunResult:
    """Continue a run exactly where its newest checkpoint, or the named one, stands.

    A run that is finished stays as it is: the result says how it ended. With `fresh_replay` the
    weights go on, and the replay begins anew: another run from here on, with other digests.
    """
    show = show or Silent()
    if not target.exists():
        raise CheckpointError(f"{target} does not exist.", "rlflame runs lists the runs here")
    path = target if target.is_dir() else segments.run_of(target)
    folder = RunFolder.open(path)
    try:
        found = newest_checkpoint(target, show.note)
        if not found.resumable:
            raise CheckpointError(
                f"{target} holds a policy alone, without the state that training needs.",
                f"start a new run from it: rlflame train --init-from {target}",
            )
        found = extended(found, steps, folder.best if folder.best.exists() else target)
        if fresh_replay:
            found = build.with_fresh_replay(found)
        if finished(found) and _scored(folder, found):
            return _result(folder, found, began=False)
        _check_replay(found, target)
        for difference in machine_differences(found):
            show.note(f"This machine differs from the one before in {difference}; bits may too.")
        found = replace(found, fingerprint=versions())
        build.check_memory(found.recipe, found.env, begun=True)
        if runtime.env_file is not None:
            env_file.admit(runtime.env_file)
        check_environment(found)
        slots = found.recipe.learning.rollout.num_slots
        counts = _counts(fleet, None, show)
        with _open(fleet, runtime, slots, counts) as fleet:
            alone = fleets.found_no_cluster(runtime)
            described = RunStart(path, found, fleet.name, fleet.capacity, "", True, alone)
            return _run(
                folder, found, runtime, fleet, show, stop or NeverStop(), described, counts, None
            )
    finally:
        folder.release()


def evaluate(
    source: Checkpoint,
    plan: EvaluationPlan,
    runtime: RuntimeSettings | None = None,
    *,
    fleet: Fleet | None = None,
    show: Show | None = None,
) -> EvaluationRecord:
    """Score the policy in a checkpoint; `fleet` as in `train`."""
    check_environment(source)
    groups = -(-plan.episodes // source.policy_spec.width)
    watched = EventCount((show or Silent()).fleet)
    with _open(fleet, runtime or RuntimeSettings(), groups, watched) as fleet:
        return run_episodes(fleet, source.env, source.policy_spec, source.policy, plan)


def render(
    source: Checkpoint,
    wish: video.Wish,
    out: Path | None,
    *,
    show_output: bool = False,
    tell: Callable[[int, int], None] = lambda made, of: None,
) -> Drawing:
    """Draw episodes of the policy in a checkpoint into a file, or a window."""
    check_environment(source)
    return video.render(source, wish, out, show_output=show_output, tell=tell)


def machine_differences(found: Checkpoint) -> list[str]:
    """What differs between this machine and the one a file was made on that can change bits."""
    return checkpoint.fingerprint_differences(found.fingerprint, versions())


def extended(found: Checkpoint, steps: int | None, policy: Path) -> Checkpoint:
    """The same run with another end; nothing else of the recipe changes.

    `policy` is the file that a new run can start from where this one does not go on.
    """
    recipe = found.recipe
    if steps is None or (steps == recipe.stop_at_steps and recipe.stop_at_iterations is None):
        return found
    if found.progress.reached:
        raise ConfigError(
            f"This run ended at step {found.progress.steps}, when an evaluation had reached "
            f"{found.recipe.evaluation.until_return:g}; it does not go on.",
            f"start a new run from its policy: {train_from(recipe, policy)}",
        )
    if steps <= found.progress.steps:
        raise ConfigError(
            f"--steps {steps} is not beyond the {found.progress.steps} steps already taken.",
            f"--steps {found.progress.steps * 2}",
        )
    changes = {"stop_at_steps": steps, "stop_at_iterations": None}
    return replace(found, recipe=found.recipe.model_copy(update=changes))


def train_from(recipe: Recipe, policy: Path) -> str:
    """The command that starts a new run from a policy of this recipe."""
    return f"rlflame train --env {recipe.learning.environment.id} --init-from {policy}"


def finished(found: Checkpoint) -> bool:
    """Whether training is over; the final evaluation may still be missing."""
    return found.progress.spent(found.recipe.stop_at_steps, found.recipe.stop_at_iterations)


def run_path(recipe: Recipe, runtime: RuntimeSettings) -> Path:
    if runtime.out is not None:
        return Path(runtime.out)
    learning = recipe.learning
    name = f"{presets.short_name(learning.environment.id)}-{learning.algorithm}-{learning.seed}"
    return Path("runs") / name


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
    filming = filmed(recorder, folder.path / "videos", begun, runtime.video_every_steps, show.note)
    complete = False
    try:
        # Only now: a run that is refused keeps the config it has.
        _write_config(folder, begun.recipe, runtime)
        machines = MachineLog(folder.path, fleet, begun.progress.steps)
        if runtime.tensorboard:
            recorder.also(TensorBoard(folder.path, begun.recipe))
            show.note(tensorboard.note(folder.path))
        with show.begin(described):
            trainer = build.trainer(begun, fleet, filming, stop, folder.path.name, start)
            complete = trainer.run()
            machines.note_workers()
            if complete:
                complete = _score(trainer, begun.recipe, recorder, stop)
    finally:
        filming.close(lambda: stop.requested or not complete)
        recorder.close()
    return _result(folder, checkpoint.load(folder.latest), complete=complete)


def _result(
    folder: RunFolder, saved: Checkpoint, *, complete: bool = True, began: bool = True
) -> RunResult:
    return RunResult(
        folder.path,
        saved.progress,
        complete,
        began,
        saved.state_digest,
        saved.digest,
        saved.evaluation,
        saved.best,
        # A run that has reached its return does not go on.
        train_from(saved.recipe, folder.best)
        if saved.progress.reached
        else f"rlflame resume {folder.path} --steps {2 * saved.progress.steps}",
    )


def _scored(folder: RunFolder, found: Checkpoint) -> bool:
    """Whether the final evaluation is there, in the checkpoint and beside it."""
    try:
        result = json.loads((folder.path / "result.json").read_text("utf-8"))
    except (OSError, ValueError):
        return False
    return found.evaluation is not None and result.get("steps") == found.progress.steps


def _open(
    fleet: Fleet | None, runtime: RuntimeSettings, tasks: int, observer: Observer
) -> AbstractContextManager[Fleet]:
    """The fleet that was handed in, left open at the end, or one of this run's own."""
    return fleets.fleet(runtime, tasks, observer) if fleet is None else nullcontext(fleet)


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
            record = trainer.evaluate(build.evaluation_plan(recipe, final=True), snapshot.policy)
    except StopNow:
        return False
    recorder.offer_best(snapshot.progress, record, snapshot.policy)
    recorder.save_evaluated(snapshot, record)
    return True


def _environment(recipe: Recipe, stop: Stop) -> EnvSpec:
    """The environment as it is here; making one may take long, and nothing is lost by ending."""
    try:
        with stop.interruptible():
            return build.environment(recipe.learning.environment)
    except StopNow:
        raise KeyboardInterrupt from None


def check_environment(found: Checkpoint) -> None:
    """The environment as it is here must be the one the policy was made for."""
    here = build.environment(found.recipe.learning.environment)
    for name in ("observation_size", "action_kind", "action_size"):
        before, now = getattr(found.env, name), getattr(here, name)
        if before != now:
            raise CheckpointError(
                f"{found.env.id} has {name} {now} here, and {before} in the checkpoint.",
                "install the environment's version that the checkpoint was made with",
            )


def _check_replay(found: Checkpoint, target: Path) -> None:
    """Every segment that the checkpoint needs is there and whole; before anything is written."""
    for segment in found.snapshot.segments if found.snapshot is not None else ():
        try:
            segment.arrays()
        except CheckpointError as error:
            raise CheckpointError(
                error.message,
                f"rlflame resume {target} --fresh-replay goes on with its weights and an empty "
                "replay",
            ) from error


def _write_config(folder: RunFolder, recipe: Recipe, runtime: RuntimeSettings) -> None:
    config = RunConfig(
        **{name: getattr(recipe, name) for name in Recipe.model_fields}, runtime=runtime
    )
    try:
        tensor_file.write_atomically(folder.path / "config.toml", toml.to_toml(config).encode())
    except OSError as error:
        raise CheckpointError(
            f"{folder.path} cannot be written: {error.strerror or error}.",
            "make room or choose another folder with --out",
        ) from error
