"""Words of many keys at once: those of numpy's SeedSequence."""

from __future__ import annotations

import numpy as np
import pytest

from rlflame.rollout.seed_sequence import (
    WordSequence,
    generate_long_words,
    generate_words,
    mix_keys,
    mix_seeds,
)

SEEDS = [0, 1, 17, 2**31, 2**32 - 1]


@pytest.mark.parametrize("count", range(1, 9))
def test_words_of_seeds(count: int) -> None:
    expected = [np.random.SeedSequence(seed).generate_state(count).tolist() for seed in SEEDS]
    assert generate_words(mix_seeds(SEEDS), count).tolist() == expected


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("length", range(17))
def test_words_of_keys(seed: int, length: int) -> None:
    """Up to the longest key."""
    numbers = np.random.default_rng(length).integers(0, 2**32, (5, length))
    keys = [tuple(key) for key in numbers.tolist()]
    parents = [np.random.SeedSequence(seed, spawn_key=key) for key in keys]
    expected = [parent.generate_state(8).tolist() for parent in parents]
    assert generate_words(mix_keys(seed, keys), 8).tolist() == expected


@pytest.mark.parametrize("count", range(1, 5))
def test_a_sequence_gives_its_words_of_64_bits(count: int) -> None:
    expected = np.random.SeedSequence(5).generate_state(count, np.uint64)
    (words,) = generate_long_words(mix_seeds([5]), count)
    sequence = WordSequence(words)
    assert sequence.generate_state(count, np.uint64).tolist() == expected.tolist()
    for other in [(count + 1, np.uint64), (count, np.uint32)]:
        with pytest.raises(AssertionError):
            sequence.generate_state(*other)
