"""The environments of one slot, stepped together: the contract, and Gymnasium behind it.

Must not know: policies, tasks, how states travel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from ..spec import Array, EnvSpec, EnvState, Float32, Float64
from .gymnasium_env import RestorableEnv


@dataclass(frozen=True, slots=True)
class EpisodePosition:
    """Where a row's episode stands."""

    row: int
    episode: int
    seed: int
    elapsed: int
    episode_return: float


class VectorEnv(Protocol):
    """The environments of a slot; `out` is the row's line, or all lines, of what is observed."""

    spec: EnvSpec

    def reset_row(self, row: int, episode: int, seed: int, out: Float32) -> None:
        """Start an episode."""

    def prepare_resets(self, seeds: Sequence[int]) -> None:
        """Episodes that begin with these seeds may come soon; for those who can prepare."""

    def restore(self, row: int, state: EnvState, out: Float32) -> None:
        """Take up an episode where another process, or an earlier one, left it."""

    def step(
        self,
        active: Sequence[int],
        actions: Array,
        out: Float32,
        rewards: Float64,
        terminated: Array,
        truncated: Array,
    ) -> Sequence[int]:
        """One transition of the active rows; returns those whose episode has ended.

        Nobody else writes into `actions`, which an environment may keep. The ends are written where
        they are true; an end by the environment itself wins over a time limit.
        """

    def prepare_snapshot(self) -> None:
        """Called before a fragment's last step."""

    def snapshot(self, row: int, observation: Float32) -> EnvState:
        """Where the row stands, as a value."""

    def get_position(self, row: int) -> EpisodePosition: ...

    def get_current_position(self) -> EpisodePosition:
        """The row being stepped now, for whoever watches over a hang."""

    def check_finite(self, row: int, observation: Float32) -> None: ...

    def close(self) -> None: ...


class GymnasiumVectorEnv:
    """One instance of Gymnasium's for each row, stepped one after the other.

    `new_row` makes them; whoever draws an episode has rows that draw.
    """

    def __init__(
        self,
        spec: EnvSpec,
        count: int,
        env_factory: Callable[[EnvSpec, int], RestorableEnv] = RestorableEnv,
    ) -> None:
        self.spec = spec
        self._envs = [env_factory(spec, row) for row in range(count)]
        self._current_env = self._envs[0]

    def reset_row(self, row: int, episode: int, seed: int, out: Float32) -> None:
        self._current_env = self._envs[row]
        self._current_env.reset(episode, seed, out)

    def prepare_resets(self, seeds: Sequence[int]) -> None:
        """An instance is reset when it is needed."""

    def restore(self, row: int, state: EnvState, out: Float32) -> None:
        self._current_env = self._envs[row]
        self._current_env.restore(state, out)

    def step(
        self,
        active: Sequence[int],
        actions: Array,
        out: Float32,
        rewards: Float64,
        terminated: Array,
        truncated: Array,
    ) -> Sequence[int]:
        ended: list[int] = []
        for i in active:
            env = self._current_env = self._envs[i]
            rewards[i], terminal, limited = env.step(actions[i], out[i])
            if terminal or limited:
                terminated[i], truncated[i] = terminal, not terminal
                ended.append(i)
        return ended

    def prepare_snapshot(self) -> None:
        for env in self._envs:
            env.prepare_snapshot()

    def snapshot(self, row: int, observation: Float32) -> EnvState:
        return self._envs[row].snapshot(observation)

    def get_position(self, row: int) -> EpisodePosition:
        return _read_position(self._envs[row])

    def get_current_position(self) -> EpisodePosition:
        return _read_position(self._current_env)

    def check_finite(self, row: int, observation: Float32) -> None:
        self._envs[row].check_finite(observation)

    def close(self) -> None:
        for env in self._envs:
            env.close()


def _read_position(env: RestorableEnv) -> EpisodePosition:
    return EpisodePosition(env.row, env.episode, env.seed, env.elapsed, env.episode_return)
