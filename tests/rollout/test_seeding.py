"""Keyed random streams: equal keys give equal numbers, other keys others."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from gymnasium.utils import seeding

from rlflame.rollout.seeding import (
    Role,
    make_reset_seed,
    make_reset_seeds,
    make_reset_streams,
    make_stream,
    make_streams,
)


def test_a_stream_is_the_descendant_that_numpy_spawns_for_its_key() -> None:
    """The key (2, 3, 0, 5) selects child 5 of child 0 of child 3 of child 2."""
    parent = np.random.SeedSequence(17)
    for child in (2, 3, 0, 5):
        parent = parent.spawn(child + 1)[child]
    expected = np.random.Generator(np.random.Philox(parent)).random(8)
    assert make_stream(17, Role.ACTION, 3, 0, 5).random(8).tolist() == expected.tolist()
    assert make_reset_seed(17, Role.ACTION, 3, 0, 5) == parent.generate_state(1)[0]


def test_the_numbers_that_recipes_have_been_promised() -> None:
    """If these numbers change, the results of all recorded runs change."""
    names = "RESET ACTION EVALUATION_RESET EVALUATION_ACTION INITIALISE SHUFFLE BOOTSTRAP"
    names += " REPLAY LEARN EXPLORATION EVALUATION_EXPLORATION"
    assert [Role[name].value for name in names.split()] == list(range(1, 12))
    resets = [make_reset_seed(0, Role.RESET, slot, 1, 2) for slot in range(3)]
    assert resets == [1345071001, 1317684456, 83145925]
    drawn = make_stream(7, Role.ACTION, 1, 2, 3).integers(0, 2**32, 3)
    assert drawn.tolist() == [1380756979, 1221915932, 1876546500]


def test_asking_twice_gives_the_same_and_draws_elsewhere_change_nothing() -> None:
    first = make_stream(1, Role.SHUFFLE, 4, 2).permutation(50).tolist()
    np.random.seed(5)
    other = make_stream(1, Role.SHUFFLE, 4, 3)
    other.random(1000)
    assert make_stream(1, Role.SHUFFLE, 4, 2).permutation(50).tolist() == first


def test_no_two_keys_share_a_stream() -> None:
    keys = [
        (seed, role, *key)
        for seed, role in itertools.product((0, 1, 2**40), Role)
        for key in [(), *itertools.product(range(4), repeat=2), *itertools.product(range(4), [0])]
    ]
    keys += [(0, Role.RESET, a, b, c) for a, b, c in itertools.product(range(8), repeat=3)]
    distinct = sorted(set(keys))
    first = {tuple(make_stream(*key).integers(0, 2**63, 2).tolist()) for key in distinct}
    assert len(first) == len(distinct)


@pytest.mark.parametrize("step", [(1, 0, 0), (0, 1, 0), (0, 0, 1)])
def test_neighbouring_streams_are_not_correlated(step: tuple[int, int, int]) -> None:
    count, base = 2000, np.array([2, 3, 4])
    here = make_stream(0, Role.ACTION, *base.tolist()).standard_normal(count)
    there = make_stream(0, Role.ACTION, *(base + step).tolist()).standard_normal(count)
    assert abs(np.corrcoef(here, there)[0, 1]) < 4.0 / np.sqrt(count)


def test_reset_seeds_fit_what_gymnasium_takes() -> None:
    seeds = [make_reset_seed(3, Role.EVALUATION_RESET, episode) for episode in range(500)]
    assert all(isinstance(seed, int) and 0 <= seed < 2**32 for seed in seeds)
    assert len(set(seeds)) == 500
    assert max(seeds) > 2**31


@pytest.mark.parametrize("seed", [0, 17, 2**32 - 1, 2**32, 2**64 + 5, 2**200])
@pytest.mark.parametrize("key", [(), (0,), (3, 0, 5), (2**32 - 1, 1), (1, 2**32, 4), (1, 2, 3, 4)])
def test_numbers_of_any_size_lead_where_numpys_own_spawning_leads(
    seed: int, key: tuple[int, ...]
) -> None:
    expected = np.random.SeedSequence(seed, spawn_key=(int(Role.LEARN), *key)).generate_state(8)
    drawn = make_stream(seed, Role.LEARN, *key).bit_generator.seed_seq
    assert drawn.generate_state(8).tolist() == expected.tolist()
    assert make_reset_seed(seed, Role.LEARN, *key) == expected[0]


@pytest.mark.parametrize("seed", [0, 17, 2**32 - 1, 2**32, 2**200])
@pytest.mark.parametrize("size", [0, 1, 3, 8])
@pytest.mark.parametrize("largest", [5, 2**32 - 1, 2**33])
def test_many_keys_at_once_lead_where_each_leads(seed: int, size: int, largest: int) -> None:
    generator = np.random.default_rng(size)
    keys = [tuple(generator.integers(0, largest, size).tolist()) for _ in range(20)]
    keys[7] = (largest,) * size
    streams = make_streams(seed, Role.ACTION, keys)
    for stream, key in zip(streams, keys, strict=True):
        state = make_stream(seed, Role.ACTION, *key).bit_generator.state
        assert str(stream.bit_generator.state) == str(state)
    seeds = make_reset_seeds(seed, Role.RESET, keys)
    assert seeds == [make_reset_seed(seed, Role.RESET, *key) for key in keys]


def test_no_keys_lead_nowhere() -> None:
    assert make_streams(3, Role.ACTION, []) == make_reset_seeds(3, Role.RESET, []) == []
    assert make_reset_streams([]) == []


@pytest.mark.parametrize("seeds", [[0, 5, 2**32 - 1, 5], [2**70, 1], [1, 2**70], [2**32], [3]])
def test_resets_draw_what_gymnasium_draws(seeds: list[int]) -> None:
    for seed, stream in zip(seeds, make_reset_streams(seeds), strict=True):
        theirs, _ = seeding.np_random(seed)
        assert stream.bit_generator.state == theirs.bit_generator.state
        assert stream.random(5).tolist() == theirs.random(5).tolist()


def test_negative_seeds_are_refused_as_numpy_refuses_them() -> None:
    with pytest.raises(ValueError, match="non-negative"):
        make_reset_streams([3, -1])
