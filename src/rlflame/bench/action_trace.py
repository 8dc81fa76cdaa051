"""What workers did, as resets and actions that can be repeated without them.

Must not know: who repeats it, and why.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np

from rlflame.rollout.spec import Array, EnvSpec, Fragment

#: Steps after which a repetition may well begin again at the first.
_MAX_STEPS = 20_000


class ActionTrace:
    """Episodes as (seed of the reset, actions after it), put together from fragments.

    `given` turns a step's recorded actions into what the environments were given.
    """

    def __init__(self, env: EnvSpec, to_environment: Callable[[Array], Array]) -> None:
        self._env, self._to_environment = env, to_environment
        self._open: dict[tuple[int, int], list[Array]] = {}
        self._seeds: dict[tuple[int, int], int] = {}
        self._pieces: list[tuple[int, Array]] = []
        self._steps = 0

    def add(self, fragments: Sequence[Fragment]) -> None:
        """The next round's; each slot's rows go on where its last fragment left them."""
        for fragment in fragments:
            self._add_fragment(fragment)

    def _add_fragment(self, fragment: Fragment) -> None:
        # Step by step, as it was acted; what is given back may be used again for the next step.
        actions = np.stack([self._to_environment(step).copy() for step in fragment.actions])
        for row, length in enumerate(fragment.lengths.tolist()):
            place, begin = (fragment.slot, row), 0
            for episode in sorted(
                (e for e in fragment.episodes if e.row == row), key=lambda e: e.end
            ):
                self._open.setdefault(place, []).append(actions[begin : episode.end + 1, row])
                self._pieces.append((episode.seed, np.concatenate(self._open.pop(place))))
                begin = episode.end + 1
            if begin < length:
                self._open.setdefault(place, []).append(actions[begin:length, row])
            if fragment.states:
                self._seeds[place] = fragment.states[row].seed
            self._steps += length

    @property
    def is_full(self) -> bool:
        return self._steps >= _MAX_STEPS

    def list_pieces(self) -> list[tuple[int, Array]]:
        """Unfinished episodes too, as far as they have come."""
        unfinished = [
            (self._seeds[place], np.concatenate(parts)) for place, parts in self._open.items()
        ]
        return [*self._pieces, *unfinished]

    def save(self, path: Path) -> None:
        seeds, parts = zip(*self.list_pieces(), strict=True)
        np.savez(
            path,
            env=np.array(json.dumps(asdict(self._env))),
            seeds=np.array(seeds, np.uint64),
            lengths=np.array([len(part) for part in parts], np.int64),
            actions=np.concatenate(parts),
        )
