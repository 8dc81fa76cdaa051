"""The division of gradients into networks and shards, and the summing order."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from crews import together

from rlflame.learning.parallel.process_group import Shards
from rlflame.learning.parallel.units import Units

SPANS = {"actor": slice(0, 3), "critic": slice(3, 5)}
SUMS = {"actor": ("loss", "kl"), "critic": ("value",)}
#: In float32, adding 1 to 1e8 loses the 1, wherever this happens in the sum.
PARTS = np.array([1.0, 1e8, -1e8, 1.0], np.float32)


def compute_part(shard, networks):
    """The gradient of a shard, set by its number. Other networks have garbage."""
    gradient = np.full(5, np.nan, np.float32)
    sums = {}
    for name in networks:
        gradient[SPANS[name]] = PARTS[shard.number] * (1.0 + (name == "critic"))
        sums |= dict.fromkeys(SUMS[name], 2.0**40 + shard.number)
    return gradient, sums


def each(part):
    """Return the function that calls `part` for each of several shards."""

    def compute_parts(shards, networks):
        for shard in shards:
            gradient, sums = part(shard, networks)
            yield gradient[None], [sums]

    return compute_parts


def compute_all(seat, count: int, rows: int):
    shards = Shards(count) if seat is None else Shards(count, seat)
    units = Units(shards, SPANS, SUMS)
    gradient, squares, sums = units.compute_gradient(rows, each(compute_part))
    vector = np.zeros(5, np.float32)
    for span in units.own_spans:
        vector[span] = gradient[span]
    units.share_vector(vector)
    return vector.tobytes(), squares, sums


@pytest.mark.parametrize(
    ("count", "learners"), [(1, 2), (4, 2), (4, 3), (4, 4), (4, 8), (3, 2), (3, 6)]
)
def test_any_number_of_learners_adds_shard_by_shard(count, learners):
    alone = compute_all(None, count, 12)
    assert together(learners, lambda seat: compute_all(seat, count, 12)) == [alone] * learners


def test_shards_are_added_in_order_in_float32():
    vector, squares, sums = compute_all(None, 4, 12)
    # By hand: 1e8 absorbs 1, -1e8 cancels 1e8, then 0 + 1 = 1. The critic has twice that.
    assert np.frombuffer(vector, np.float32).tolist() == [1.0, 1.0, 1.0, 2.0, 2.0]
    assert squares == [3.0, 8.0]
    assert sums == dict.fromkeys(("loss", "kl", "value"), 4 * 2.0**40 + 6)


@pytest.mark.parametrize(("count", "learners"), [(1, 2), (4, 2), (4, 3), (4, 8), (8, 4)])
def test_every_unit_is_computed_once_and_every_weight_is_updated_by_one_learner(count, learners):
    computed = []
    owners = []

    def work(seat):
        units = Units(Shards(count, seat), SPANS, SUMS)
        owners.extend(units.own_spans)

        def note(shard, networks):
            computed.extend((shard.number, name) for name in networks)
            return np.zeros(5, np.float32), {key: 0.0 for name in networks for key in SUMS[name]}

        units.compute_gradient(count * 3, each(note))

    together(learners, work)
    assert sorted(computed) == sorted(itertools.product(range(count), SPANS))
    assert sorted(index for span in owners for index in range(span.start, span.stop)) == [*range(5)]


@pytest.mark.parametrize("rows", [3, 8, 21])
@pytest.mark.parametrize("learners", [1, 2, 4, 8])
def test_values_of_rows_come_back_in_their_places(rows, learners):
    numbers = np.arange(rows, dtype=np.float32) ** 2

    def work(seat):
        units = Units(Shards(4, seat), SPANS, SUMS)
        return units.compute_values(rows, 2, lambda own: numbers[own])

    for values in together(learners, work):
        np.testing.assert_array_equal(values, numbers)


def test_too_few_rows_for_the_shards_are_computed_by_the_owners():
    def work(seat):
        asked = []

        def part(shard, networks):
            asked.append((shard.rows, tuple(networks)))
            return np.ones(5, np.float32), {key: 1.0 for name in networks for key in SUMS[name]}

        _, squares, sums = Units(Shards(8, seat), SPANS, SUMS).compute_gradient(5, each(part))
        return asked, squares, sums

    results = together(4, work)
    asked = [item for found, _, _ in results for item in found]
    assert sorted(asked, key=str) == [(slice(0, 5), ("actor",)), (slice(0, 5), ("critic",))]
    assert [(squares, sums) for _, squares, sums in results] == [
        ([3.0, 2.0], {"loss": 1.0, "kl": 1.0, "value": 1.0})
    ] * 4
