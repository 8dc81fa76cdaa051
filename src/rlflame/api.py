"""The Python API, built on the same functions as the command line.

    from rlflame.api import load_policy
    policy = load_policy("best.safetensors")
    action = policy(observation)

Torch is imported only if a recipe needs it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np

from rlflame.config.flags import TrainFlags
from rlflame.config.module_trust import allow_modules, load_env_file
from rlflame.config.recipe import RunConfig
from rlflame.config.resolve import resolve
from rlflame.config.runtime import RuntimeSettings
from rlflame.console.base import NullView, RunResult, RunView
from rlflame.experiment import components
from rlflame.experiment.resume import check_environment, make_budget
from rlflame.experiment.run import RunHost, resume_run, train_run
from rlflame.experiment.sweep.sweep_run import resume as resume_seeds
from rlflame.experiment.sweep.sweep_run import train as train_seeds
from rlflame.fleet import factory
from rlflame.fleet.base import Fleet
from rlflame.rendering import policy_render
from rlflame.rendering.job import RenderOptions, RenderResult
from rlflame.rollout.policy import Policy
from rlflame.rollout.space_codec import (
    MASK_NAME,
    ActionDecoder,
    MaskEncoder,
    ObservationEncoder,
    SpaceError,
)
from rlflame.rollout.task import Float32
from rlflame.storage import checkpoint
from rlflame.storage.checkpoint import Checkpoint
from rlflame.storage.run_folder import find_policy_file
from rlflame.training.evaluation import EvaluationPlan, EvaluationRecord
from rlflame.training.evaluation import evaluate as run_episodes
from rlflame.training.stop_signal import NullStop
from rlflame.training.trainer import StopRequest

__all__ = [
    "LoadedPolicy",
    "allow_modules",
    "evaluate",
    "load_policy",
    "render",
    "resume",
    "resume_seeds",
    "train",
    "train_seeds",
]


class LoadedPolicy:
    """A policy loaded from a file. Call it with an observation to get an action."""

    def __init__(self, source: Checkpoint, file: Path | None = None) -> None:
        self.checkpoint = source
        #: The file that the policy was loaded from. For a run folder, that of its best policy.
        self.file = file
        self._policy = Policy(source.policy_spec, source.policy)
        spec = source.policy_spec
        self._rows = np.zeros((spec.width, spec.row_size), np.float32)
        leaves = source.env.observation_leaves
        self._encoder = ObservationEncoder(leaves)
        #: Whether an observation is one array of numbers, which may have any shape.
        self._is_array = not leaves or (leaves[0].kind == "box" and leaves[0].path == ())
        self._decoder = ActionDecoder(source.env)
        self._mask_encoder = MaskEncoder(source.env) if spec.mask_size else None

    def __call__(self, observation: Any, action_mask: Any = None) -> Any:
        """Return the deterministic action in the form that the environment expects.

        `observation` has the form of the environment's observation space. If the policy was trained
        with action masks, pass the mask too, unless the observation contains it.
        """
        size = self.checkpoint.policy_spec.observation_size
        self._write_observation(observation, self._rows[0, :size])
        if self._mask_encoder is not None:
            if self.checkpoint.env.mask_source == "observation" and action_mask is None:
                action_mask = observation.get(MASK_NAME)
            if action_mask is None:
                raise ValueError(
                    "The policy needs an action mask: policy(observation, action_mask)."
                )
            try:
                self._mask_encoder.write(action_mask, self._rows[0, size:])
            except SpaceError as error:
                raise ValueError(f"You {error}.") from None
        actions = self._policy.to_environment(self._policy.mode(self._rows))
        action = self._decoder.decode(actions[0])
        return action.copy() if isinstance(action, np.ndarray) else action

    def _write_observation(self, observation: Any, out: Float32) -> None:
        with np.errstate(over="ignore"):
            if not self._is_array:
                try:
                    self._encoder.write(observation, out)
                except SpaceError as error:
                    raise ValueError(f"The policy cannot use an observation {error}.") from None
            else:
                try:
                    flat = np.asarray(observation, np.float32).ravel()
                except (TypeError, ValueError):
                    kind = type(observation).__name__
                    raise ValueError(f"The observation is not numbers but {kind}.") from None
                if flat.shape != out.shape:
                    raise ValueError(
                        f"The observation has {flat.size} values; the policy needs {out.size}."
                    )
                out[:] = flat
        if not np.isfinite(out).all():
            raise ValueError("The observation has NaN, infinity or a value too large for float32.")


def load_policy(path: str | Path) -> LoadedPolicy:
    """Load the policy of a checkpoint or policy file, or the best policy of a run folder."""
    file = find_policy_file(Path(path))
    return LoadedPolicy(checkpoint.load(file), file)


def train(
    config: RunConfig | None = None,
    *,
    env: str | None = None,
    algo: str | None = None,
    sets: Sequence[str] = (),
    init_from: Path | None = None,
    fleet: Fleet | None = None,
    show: RunView | None = None,
    stop: StopRequest | None = None,
) -> RunResult:
    """Train a policy in a new run folder, from a config or an environment's preset.

    If `fleet` is given, it stays open after the run. Otherwise, the run opens and closes the fleet
    that its runtime settings name.
    """
    preset = ""
    if config is None:
        flags = TrainFlags(env=env, algo=algo, sets=sets)
        config, preset = resolve(flags, components.has_continuous_actions)
    host = RunHost(view=show or NullView(), stop=stop or NullStop(), fleet=fleet)
    return train_run(config, host, preset, init_from)


def resume(
    target: Path,
    runtime: RuntimeSettings,
    *,
    steps: int | None = None,
    iterations: int | None = None,
    fresh_replay: bool = False,
    fleet: Fleet | None = None,
    show: RunView | None = None,
    stop: StopRequest | None = None,
) -> RunResult:
    """Continue a run from its latest checkpoint, or from a given checkpoint file.

    Without `fresh_replay`, the results are bit-identical to those of an uninterrupted run. If the
    run has finished and neither `steps` nor `iterations` extends it, the run stays unchanged and
    its previous result is returned.
    """
    host = RunHost(view=show or NullView(), stop=stop or NullStop(), fleet=fleet)
    budget = make_budget(steps, iterations)
    return resume_run(target, runtime, host, budget=budget, fresh_replay=fresh_replay)


def evaluate(
    source: Checkpoint,
    plan: EvaluationPlan,
    runtime: RuntimeSettings | None = None,
    *,
    fleet: Fleet | None = None,
    show: RunView | None = None,
) -> EvaluationRecord:
    """Evaluate the policy of a checkpoint; `fleet` works as in `train`."""
    runtime = runtime or RuntimeSettings()
    if runtime.env_file is not None:
        load_env_file(runtime.env_file)
    source = check_environment(source)
    observer = (show or NullView()).show_fleet_event
    with (
        nullcontext(fleet)
        if fleet
        else factory.make_fleet(runtime, plan.episodes, observer) as fleet
    ):
        return run_episodes(fleet, source.env, source.policy_spec, source.policy, plan)


def render(
    source: Checkpoint,
    options: RenderOptions,
    out: Path | None,
    *,
    show_output: bool = False,
    report_progress: Callable[[str], None] = lambda text: None,
) -> RenderResult:
    """Render episodes of a policy to a file, or in a window if `out` is None."""
    source = check_environment(source)
    initial_policy = None
    if options.versus_untrained:
        initial_policy = components.make_initial_checkpoint(source.recipe, source.env).policy
    return policy_render.render(
        source,
        options,
        out,
        initial_policy=initial_policy,
        show_output=show_output,
        report_progress=report_progress,
    )
