"""The values that cross the boundary between a learner and its workers.

A rollout task is a pure function of these: RolloutTask and PolicyArrays in, Fragment or
RolloutFailure out.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Float32 = NDArray[np.float32]
Float64 = NDArray[np.float64]

#: A policy's weights by name: `actor.<i>.weight` [in, out] and `actor.<i>.bias`; for a Gaussian of
#: one deviation, or of one that gsde makes of its state, `actor.log_std`; with observation
#: normalisation `normaliser.mean` and `normaliser.scale`.
PolicyArrays = Mapping[str, Array]

ActionKind = Literal["discrete", "continuous"]
Activation = Literal["tanh", "relu"]
Exploration = Literal["independent", "gsde"]
#: The most likely action, one drawn from the policy, or one drawn evenly from all there are.
ActionMode = Literal["best", "sample", "uniform"]
EnvStateKind = Literal["fresh", "replay", "mujoco"]
#: Where a task stands: slot, row, seed of the episode and steps since its beginning.
TaskPosition = tuple[int, int, int, int]


@dataclass(frozen=True, slots=True)
class EnvSpec:
    """Which environment, and the shapes that were read from its spaces."""

    id: str
    kwargs: Mapping[str, Any]
    max_episode_steps: int | None
    observation_size: int
    action_kind: ActionKind
    action_size: int
    action_start: int
    action_low: tuple[float, ...]
    action_high: tuple[float, ...]
    #: What the environment's actions are shaped like; None is flat.
    action_shape: tuple[int, ...] | None = None
    #: The modules that may be imported to make it: decided by the driver, never read from a file.
    modules: tuple[str, ...] = field(default=(), compare=False)


def compute_output_size(actions: int, squash: bool, exploration: Exploration) -> int:
    """A squashed policy's network gives deviations too, unless a matrix of its own does."""
    return 2 * actions if squash and exploration == "independent" else actions


@dataclass(frozen=True, slots=True)
class PolicySpec:
    """The shape of a policy network and the one width at which it always runs."""

    action_kind: ActionKind
    observation_size: int
    action_size: int
    action_low: tuple[float, ...]
    action_high: tuple[float, ...]
    hidden: tuple[int, ...]
    activation: Activation
    normalise: bool
    observation_clip: float
    width: int
    #: A Gaussian of which mean and deviation both depend on the observation, squashed by tanh
    #: and stretched to the action bounds; recorded actions lie in [-1, 1].
    squash: bool = False
    #: Sampled actions leave their mean by new noise at every step; or by what a random matrix, held
    #: for so many steps of an episode or for all of it, makes of the last hidden layer's units.
    exploration: Exploration = "independent"
    exploration_interval: int | None = None

    @property
    def output_size(self) -> int:
        """Units of the network's last layer."""
        return compute_output_size(self.action_size, self.squash, self.exploration)

    @property
    def log_std_shape(self) -> tuple[int, ...] | None:
        """Of the learned log deviations; None where there are none, or the network gives them."""
        if self.action_kind == "discrete":
            return None
        if self.exploration == "gsde":
            return (self.hidden[-1], self.action_size)
        return None if self.squash else (self.action_size,)


@dataclass(frozen=True, slots=True)
class EnvState:
    """An environment between two steps, as a value that any process can take up.

    `kind` says how to get there: `fresh` starts the given episode; `replay` resets with the seed
    and repeats `actions`; `mujoco` sets `physics`, the integration state as it was before the
    last step, and repeats that step's action (setting the state after the step would not be
    exact, because some rewards read positions that lag one step behind).
    """

    kind: EnvStateKind
    episode: int
    seed: int
    elapsed: int
    episode_return: float
    actions: Array
    physics: Float64
    observation: Float32
    #: Hash of all of the above: a worker that still holds this very state skips the restoring.
    token: str = ""

    def __post_init__(self) -> None:
        if not self.token:
            position = (self.kind, self.episode, self.seed, self.elapsed)
            text = "|".join(map(str, position)) + f"|{self.episode_return!r}"
            digest = hashlib.blake2b(text.encode(), digest_size=16)
            for array in (self.actions, self.physics, self.observation):
                digest.update(np.ascontiguousarray(array).tobytes())
            object.__setattr__(self, "token", digest.hexdigest())


NO_PHYSICS: Float64 = np.zeros(0, np.float64)
_NO_NUMBERS: Float32 = np.zeros(0, np.float32)


def make_fresh_state(
    episode: int, seed: int, actions: Array = _NO_NUMBERS, observation: Float32 = _NO_NUMBERS
) -> EnvState:
    """The state of an episode before its first step; `actions` is empty."""
    return EnvState("fresh", episode, seed, 0, 0.0, actions, NO_PHYSICS, observation)


@dataclass(frozen=True, slots=True)
class RolloutTask:
    """One slot's share of one iteration, or of several slots that are stepped together; or one
    group of evaluation episodes.
    """

    run: str
    seed: int
    purpose: Literal["train", "evaluate"]
    iteration: int
    slot: int
    env: EnvSpec
    policy: PolicySpec
    #: Which weights, by content; the fleet resolves it.
    policy_id: str
    #: `steps`: that many per environment, across episodes. `episodes`: one whole episode each.
    unit: Literal["steps", "episodes"]
    #: Steps per environment, or the cap on an episode's length.
    steps: int
    #: How many environments a slot has, and at which row of the policy's width the first one sits.
    rows: int
    first_row: int
    acting: ActionMode
    #: False ships the statistics of the episodes and nothing else.
    record: bool
    #: One state for each row, slot by slot; empty for whole episodes.
    states: tuple[EnvState, ...]
    #: Slots that are stepped together with the first (`task_batching.py`).
    extra_slots: tuple[int, ...] = ()

    @property
    def slots(self) -> tuple[int, ...]:
        return (self.slot, *self.extra_slots)

    @property
    def columns(self) -> int:
        """Environments of all its slots."""
        return self.rows * (1 + len(self.extra_slots))

    @property
    def row_slice(self) -> slice:
        """Where its columns stand among the rows that the policy is given: a slot has the policy's
        width, and several slots have all of it or one row of it each.
        """
        if self.extra_slots and self.rows < self.policy.width:
            return slice(self.first_row, None, self.policy.width)
        return slice(self.first_row, self.first_row + self.columns)

    def locate(self, column: int) -> tuple[int, int]:
        """The slot of a column, and its row in there."""
        return self.slots[column // self.rows], column % self.rows

    def get_episode(self, column: int) -> int:
        """The number of a whole episode: of the slot's row, or of the evaluation."""
        if self.purpose == "evaluate":
            return self.iteration * self.policy.width + self.first_row + column
        return self.iteration


@dataclass(frozen=True, slots=True)
class EpisodeStat:
    """A finished episode. `truncated` means that a time limit ended it, not the environment."""

    row: int
    episode: int
    seed: int
    episode_return: float
    length: int
    truncated: bool
    #: The index of its last step inside the fragment.
    end: int


#: The arrays of a fragment that have a row for each step; all tasks fill those of STEP_ENDS.
STEP_ENDS = ("rewards", "terminated", "truncated")
STEP_FIELDS = ("observations", "actions", "log_probs", *STEP_ENDS)


@dataclass(frozen=True, slots=True)
class Fragment:
    """What a task brought back. Arrays are `[T, N, ...]`; rows past `lengths` are idle.

    Of several slots, N are the rows of the first, then those of the next.
    """

    iteration: int
    slot: int
    observations: Float32
    actions: Array
    log_probs: Float32
    rewards: Float64
    terminated: NDArray[np.bool_]
    truncated: NDArray[np.bool_]
    #: Steps taken by each row: T for all of them unless the task was of whole episodes.
    lengths: NDArray[np.int64]
    #: What each row observed after its last step (after the reset, where an episode had ended).
    last_observations: Float32
    #: (t, row) of each truncated step and the observation that the reset hid.
    boundary_index: NDArray[np.int64]
    boundary_observations: Float32
    episodes: tuple[EpisodeStat, ...]
    states: tuple[EnvState, ...]
    extra_slots: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class RolloutFailure:
    """A task that cannot succeed: the environment's own fault, in its own words."""

    iteration: int
    slot: int
    row: int
    seed: int
    step: int
    message: str
    traceback: str
    output: str


class EnvironmentFault(Exception):
    """Raised inside a worker when an environment misbehaves; becomes a RolloutFailure."""

    def __init__(self, message: str, row: int, seed: int, step: int) -> None:
        super().__init__(message)
        self.row = row
        self.seed = seed
        self.step = step
