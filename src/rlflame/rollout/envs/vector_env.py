"""The environments of one slot, stepped together: the contract, and Gymnasium behind it.

Must not know: policies, tasks, how states travel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from ..spec import Array, EnvSpec, EnvState, Float32, Float64
from .gymnasium_env import EnvRow


@dataclass(frozen=True, slots=True)
class Standing:
    """Where a row's episode stands."""

    row: int
    episode: int
    seed: int
    elapsed: int
    episode_return: float


class Rows(Protocol):
    """The environments of a slot; `out` is the row's line, or all lines, of what is observed."""

    spec: EnvSpec

    def begin(self, row: int, episode: int, seed: int, out: Float32) -> None:
        """Start an episode."""

    def expect(self, seeds: Sequence[int]) -> None:
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

    def hold(self) -> None:
        """Called before a fragment's last step."""

    def snapshot(self, row: int, observation: Float32) -> EnvState:
        """Where the row stands, as a value."""

    def standing(self, row: int) -> Standing: ...

    def current(self) -> Standing:
        """The row being stepped now, for whoever watches over a hang."""

    def check_finite(self, row: int, observation: Float32) -> None: ...

    def close(self) -> None: ...


class GymnasiumRows:
    """One instance of Gymnasium's for each row, stepped one after the other.

    `new_row` makes them; whoever draws an episode has rows that draw.
    """

    def __init__(
        self, spec: EnvSpec, count: int, new_row: Callable[[EnvSpec, int], EnvRow] = EnvRow
    ) -> None:
        self.spec = spec
        self._rows = [new_row(spec, row) for row in range(count)]
        self._current = self._rows[0]

    def begin(self, row: int, episode: int, seed: int, out: Float32) -> None:
        self._current = self._rows[row]
        self._current.begin(episode, seed, out)

    def expect(self, seeds: Sequence[int]) -> None:
        """An instance is reset when it is needed."""

    def restore(self, row: int, state: EnvState, out: Float32) -> None:
        self._current = self._rows[row]
        self._current.restore(state, out)

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
            row = self._current = self._rows[i]
            rewards[i], terminal, limited = row.step(actions[i], out[i])
            if terminal or limited:
                terminated[i], truncated[i] = terminal, not terminal
                ended.append(i)
        return ended

    def hold(self) -> None:
        for row in self._rows:
            row.hold()

    def snapshot(self, row: int, observation: Float32) -> EnvState:
        return self._rows[row].snapshot(observation)

    def standing(self, row: int) -> Standing:
        return _standing(self._rows[row])

    def current(self) -> Standing:
        return _standing(self._current)

    def check_finite(self, row: int, observation: Float32) -> None:
        self._rows[row].check_finite(observation)

    def close(self) -> None:
        for row in self._rows:
            row.close()


def _standing(row: EnvRow) -> Standing:
    return Standing(row.row, row.episode, row.seed, row.elapsed, row.episode_return)
