"""The values that the driver and its workers exchange.

A slot is a group of environments that one worker steps together, and a row is one of these
environments. A worker runs a RolloutTask with PolicyArrays and returns a Fragment or a
RolloutFailure. The result depends only on the task and the arrays.
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

#: A policy's weights by name: `actor.<i>.weight` [in, out] and `actor.<i>.bias`; `actor.log_std`
#: for a Gaussian whose standard deviations do not depend on the observation, or with gSDE;
#: `normaliser.mean` and `normaliser.scale` with observation normalisation.
PolicyArrays = Mapping[str, Array]

#: One choice, only numbers, or several actions of which at least one is a choice.
ActionKind = Literal["discrete", "continuous", "composite"]
LeafKind = Literal["box", "discrete", "multi_discrete", "multi_binary"]
#: Where an environment reports which choices are allowed: in `info`, in an entry of its Dict
#: observation, or with the method `action_masks`.
MaskSource = Literal["none", "info", "observation", "method"]
Activation = Literal["tanh", "relu"]
Exploration = Literal["independent", "gsde"]
#: The deterministic action, a sampled action, or a uniformly distributed action.
ActionMode = Literal["best", "sample", "uniform"]
#: See `EnvSpec.episodes`.
EpisodeStart = Literal["auto", "fresh", "reuse", "compare"]
EnvStateKind = Literal["fresh", "replay", "mujoco"]
#: The position of a task: slot, row, seed of the episode, and steps since its start.
TaskPosition = tuple[int, int, int, int]


@dataclass(frozen=True, slots=True)
class SpaceLeaf:
    """A space without parts, and its place in a tree of Dict and Tuple spaces.

    `path` has the key of each Dict and the index of each Tuple, from the root to the leaf.
    """

    path: tuple[str | int, ...]
    kind: LeafKind
    dtype: str
    shape: tuple[int, ...]
    #: The number of values and the first value of each choice of a discrete space.
    counts: tuple[int, ...] = ()
    starts: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class WrapperSpec:
    """A wrapper of an environment, as `module:Class`, and its arguments."""

    name: str
    kwargs: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class EnvSpec:
    """How to make an environment, and the sizes and bounds of its spaces."""

    id: str
    kwargs: Mapping[str, Any]
    max_episode_steps: int | None
    #: The number of inputs of the policy network.
    observation_size: int
    action_kind: ActionKind
    #: The number of values of a single choice; otherwise, the number of actions.
    action_size: int
    action_start: int
    action_low: tuple[float, ...]
    action_high: tuple[float, ...]
    #: The shape of the environment's actions, or None if they are flat.
    action_shape: tuple[int, ...] | None = None
    #: The instance in which an episode starts: a new one (`fresh`) or that of the previous episode
    #: (`reuse`). `auto` reuses only the instances of environments that were tested for it.
    #: `compare` plays both beside each other (`episode_comparison.py`).
    episodes: EpisodeStart = "auto"
    #: The modules that may be imported to make the environment. Only the driver sets them.
    modules: tuple[str, ...] = field(default=(), compare=False)
    #: The leaves of the spaces. Empty for a single flat Box of observations, and for actions that
    #: the fields above describe completely (see `space_codec.py`).
    observation_leaves: tuple[SpaceLeaf, ...] = ()
    action_leaves: tuple[SpaceLeaf, ...] = ()
    #: For composite actions: the number of values of each action, or 0 for a number.
    action_counts: tuple[int, ...] = ()
    mask_source: MaskSource = "none"
    #: The parts of the observation that are left out.
    ignore: tuple[str, ...] = ()
    #: Applied in this order, so the last one is the outermost.
    wrappers: tuple[WrapperSpec, ...] = ()

    @property
    def mask_size(self) -> int:
        """The number of values of all choices if the environment masks them, otherwise 0."""
        if self.mask_source == "none":
            return 0
        return self.action_size if self.action_kind == "discrete" else sum(self.action_counts)

    @property
    def row_size(self) -> int:
        """The length of a row: an observation, followed by any mask."""
        return self.observation_size + self.mask_size


@dataclass(frozen=True, slots=True)
class PolicySpec:
    """The architecture of a policy; `width` is the number of rows per forward pass."""

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
    #: Whether tanh squashes Gaussian actions, which are then scaled to the action bounds. Recorded
    #: actions lie in [-1, 1], and the standard deviation depends on the observation.
    squash: bool = False
    #: The noise of sampled actions: new at every step, or the last hidden layer times a random
    #: matrix that is held for `exploration_interval` steps, or for an episode if None.
    exploration: Exploration = "independent"
    exploration_interval: int | None = None
    #: For composite actions: the number of values of each action, or 0 for a number.
    action_counts: tuple[int, ...] = ()
    #: The length of the mask at the end of each row: 1 for each choice that is allowed, otherwise
    #: 0. The mask is not an input of the network.
    mask_size: int = 0
    #: Spans of observations that encode choices as 0 or 1, and are not standardised.
    choice_spans: tuple[tuple[int, int], ...] = ()

    @property
    def row_size(self) -> int:
        """The length of a row: an observation, followed by any mask."""
        return self.observation_size + self.mask_size

    @property
    def output_size(self) -> int:
        """The size of the network's last layer, including any log standard deviations."""
        if self.action_kind == "composite":
            return sum(max(count, 1) for count in self.action_counts)
        has_std = self.squash and self.exploration == "independent"
        return 2 * self.action_size if has_std else self.action_size

    @property
    def log_std_shape(self) -> tuple[int, ...] | None:
        """The shape of `actor.log_std`, or None if the policy has no such array."""
        if self.action_kind == "composite":
            numbers = self.action_counts.count(0)
            return (numbers,) if numbers else None
        if self.action_kind == "discrete":
            return None
        if self.exploration == "gsde":
            return (self.hidden[-1], self.action_size)
        return None if self.squash else (self.action_size,)


@dataclass(frozen=True, slots=True)
class EnvState:
    """An environment's state between two steps, which any process can restore.

    `kind` determines how the state is restored: `fresh` starts the episode; `replay` resets with
    the seed and repeats `actions`; `mujoco` sets the MuJoCo state before the last step (`physics`)
    and repeats the action of that step. Restoring the state after the last step would not be exact,
    because some rewards use positions that lag one step behind.
    """

    kind: EnvStateKind
    episode: int
    seed: int
    elapsed: int
    episode_return: float
    actions: Array
    physics: Float64
    observation: Float32
    #: A hash of all fields above. A worker that still has this state need not restore it.
    token: str = ""

    def __post_init__(self) -> None:
        if not self.token:
            place = f"{self.kind}|{self.episode}|{self.seed}|{self.elapsed}|{self.episode_return!r}"
            arrays = (self.actions, self.physics, self.observation)
            content = b"".join([place.encode(), *(array.tobytes() for array in arrays)])
            token = hashlib.blake2b(content, digest_size=16).hexdigest()
            object.__setattr__(self, "token", token)


NO_PHYSICS: Float64 = np.zeros(0, np.float64)
_NO_NUMBERS: Float32 = np.zeros(0, np.float32)


def make_fresh_state(
    episode: int, seed: int, actions: Array = _NO_NUMBERS, observation: Float32 = _NO_NUMBERS
) -> EnvState:
    """Return an episode's state before its first step; `actions` must be empty."""
    return EnvState("fresh", episode, seed, 0, 0.0, actions, NO_PHYSICS, observation)


@dataclass(frozen=True, slots=True)
class RolloutTask:
    """A request to collect steps in one or more slots, or to evaluate a policy."""

    run: str
    seed: int
    purpose: Literal["train", "evaluate"]
    iteration: int
    slot: int
    env: EnvSpec
    policy: PolicySpec
    #: The ID of the weights, under which the fleet stores them.
    policy_id: str
    #: `steps`: the same number of steps in every environment. `episodes`: one whole episode each.
    unit: Literal["steps", "episodes"]
    #: Steps per environment, or the limit on an episode's length.
    steps: int
    #: The number of environments per slot, and their first row in the policy's input.
    rows: int
    first_row: int
    acting: ActionMode
    #: If false, the fragment contains only episode statistics, and no steps.
    record: bool
    #: One state per row, slot by slot; empty for whole episodes.
    states: tuple[EnvState, ...]
    #: Slots that step together with the first (`task_batching.py`).
    extra_slots: tuple[int, ...] = ()

    @property
    def slots(self) -> tuple[int, ...]:
        return (self.slot, *self.extra_slots)

    @property
    def columns(self) -> int:
        """The number of environments in all slots."""
        return self.rows * (1 + len(self.extra_slots))

    @property
    def row_slice(self) -> slice:
        """The rows of the task's environments in the policy's input."""
        # With several slots, each slot has the whole width or one row (see `task_batching.py`).
        if self.extra_slots and self.rows < self.policy.width:
            return slice(self.first_row, None, self.policy.width)
        return slice(self.first_row, self.first_row + self.columns)

    def locate(self, column: int) -> tuple[int, int]:
        """Return the slot of a column, and the row of the column in that slot."""
        return self.slots[column // self.rows], column % self.rows

    def get_episode(self, column: int) -> int:
        """Return the number of the episode that a column contains."""
        if self.purpose == "evaluate":
            return self.iteration * self.policy.width + self.first_row + column
        return self.iteration


@dataclass(frozen=True, slots=True)
class EpisodeStat:
    """A finished episode; `truncated` means that it ended before a terminal state."""

    row: int
    episode: int
    seed: int
    episode_return: float
    length: int
    truncated: bool
    #: The index of the episode's last step in the fragment.
    end: int


#: The arrays of a fragment with one row per step. Without `record`, only STEP_ENDS are collected.
STEP_ENDS = ("rewards", "terminated", "truncated")
STEP_FIELDS = ("observations", "actions", "log_probs", *STEP_ENDS)


@dataclass(frozen=True, slots=True)
class Fragment:
    """The result of a task: the steps of N environments, as arrays `[T, N, ...]`.

    In each row, the steps after the first `lengths` steps are unused. If a task has several slots,
    axis N contains the rows of the first slot, followed by the rows of the next one, and so on.
    """

    iteration: int
    slot: int
    observations: Float32
    actions: Array
    log_probs: Float32
    rewards: Float64
    terminated: NDArray[np.bool_]
    truncated: NDArray[np.bool_]
    #: The number of steps of each row: T for all rows unless the task has whole episodes.
    lengths: NDArray[np.int64]
    #: The observation of each row after its last step, or after the reset if an episode ended.
    last_observations: Float32
    #: The step and row of each truncation, and the final observation of the truncated episode.
    boundary_index: NDArray[np.int64]
    boundary_observations: Float32
    episodes: tuple[EpisodeStat, ...]
    states: tuple[EnvState, ...]
    extra_slots: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class RolloutFailure:
    """The failure of an environment, which would recur if the task were retried."""

    iteration: int
    slot: int
    row: int
    seed: int
    step: int
    message: str
    traceback: str
    output: str


class EnvironmentFault(Exception):
    """Raised in a worker when an environment fails, and sent as a RolloutFailure."""

    def __init__(self, message: str, row: int, seed: int, step: int) -> None:
        super().__init__(message)
        self.row = row
        self.seed = seed
        self.step = step
