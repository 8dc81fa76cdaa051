"""Compares episodes on a used instance of an environment with the same ones on new instances.

A worker runs the comparison as a rollout task with `EnvSpec.episodes == "compare"` and one row. The
last rewards of its fragment contain the answer, so that every fleet can ask the question.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..task import Array, EnvSpec, EnvState, Float32, Float64, Fragment, make_fresh_state
from .gymnasium_env import RestorableEnv, read_global_random
from .vector_env import EpisodePosition

EPISODES = 5
#: Longer episodes are compared up to this step.
_LONGEST_EPISODE = 1000
#: What may differ, in the order in which it is compared.
DIFFERENCES = ("", "the first observation", "the observation", "the reward", "the end")


@dataclass(frozen=True, slots=True)
class EpisodeComparison:
    """The first difference between used and new instances, if there is one."""

    #: The name of the difference, which is empty if there is none.
    difference: str
    #: The number of the episode, counted from 1, and of the step in which the difference occurred.
    episode: int
    step: int
    #: Whether the environment drew numbers from np.random.
    uses_global_random: bool


#: The number of rewards that contain the answer.
_ANSWER_SIZE = 4
COMPARISON_STEPS = EPISODES * _LONGEST_EPISODE + _ANSWER_SIZE


def read_comparison(fragment: Fragment) -> EpisodeComparison:
    """Read the answer from the fragment of a comparison."""
    code, episode, step, draws = map(int, fragment.rewards[-_ANSWER_SIZE:, 0])
    return EpisodeComparison(DIFFERENCES[code], episode, step, bool(draws))


class ComparisonEnv:
    """Two instances that take the same steps: one for all episodes, and one per episode.

    After the last episode, or the first difference, the steps do nothing and return the answer.
    """

    def __init__(self, spec: EnvSpec) -> None:
        self.spec = spec
        self.current_row = 0
        self._old = RestorableEnv(replace(spec, episodes="reuse"), 0)
        self._new = RestorableEnv(replace(spec, episodes="fresh"), 0)
        #: The observation of the new instance.
        self._twin: Float32 = np.zeros(spec.observation_size, np.float32)
        self._random_state = b""
        self._num_steps = 0
        self._is_finished = False
        self._answer: tuple[float, ...] = ()

    def reset_row(self, row: int, episode: int, seed: int, out: Float32) -> None:
        if self._is_finished or episode >= EPISODES:
            self._finish(0)
            return
        self._twin = np.zeros_like(out)
        self._old.reset(episode, seed, out)
        self._new.reset(episode, seed, self._twin)
        if out.tobytes() != self._twin.tobytes():
            self._finish(1)

    def prepare_resets(self, seeds: Sequence[int]) -> None:
        """Do nothing, because instances are reset when an episode starts."""

    def restore(self, row: int, state: EnvState, out: Float32) -> None:
        """Start a comparison, with two new instances."""
        self.close()
        self._random_state, self._num_steps, self._is_finished = read_global_random(), 0, False
        self.reset_row(row, state.episode, state.seed, out)

    def step(
        self,
        active: Sequence[int],
        actions: Array,
        out: Float32,
        rewards: Float64,
        terminated: Array,
        truncated: Array,
    ) -> Sequence[int]:
        self._num_steps += 1
        if self._is_finished:
            index = self._num_steps - 1 - (COMPARISON_STEPS - _ANSWER_SIZE)
            rewards[0] = self._answer[index] if index >= 0 else 0.0
            return ()
        reward, terminal, at_limit = self._old.step(actions[0], out[0])
        twin_reward, *twin_ends = self._new.step(actions[0], self._twin)
        if out[0].tobytes() != self._twin.tobytes():
            self._finish(2)
        elif reward != twin_reward:
            self._finish(3)
        elif [terminal, at_limit] != twin_ends:
            self._finish(4)
        elif terminal or at_limit or self._old.elapsed >= _LONGEST_EPISODE:
            terminated[0], truncated[0] = terminal, not terminal
            return (0,)
        return ()

    def _finish(self, code: int) -> None:
        """End the comparison with the code of a difference, or with 0 if there is none."""
        if self._is_finished:
            return
        self._is_finished = True
        uses_global_random = read_global_random() != self._random_state
        place = (self._old.episode + 1, self._old.elapsed)
        self._answer = (float(code), *map(float, (*place, uses_global_random)))
        self.close()

    def prepare_snapshot(self) -> None: ...

    def snapshot(self, row: int, observation: Float32) -> EnvState:
        return make_fresh_state(0, 0, observation=observation.copy())

    def get_position(self, row: int) -> EpisodePosition:
        return self._old.position

    def close(self) -> None:
        self._old.close()
        self._new.close()
