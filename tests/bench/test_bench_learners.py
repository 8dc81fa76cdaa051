"""`rlflame bench learners`: measured times, results and output."""

from __future__ import annotations

import json

import numpy as np
import pytest
from commands import TINY, rlflame
from crews import together

from rlflame.bench.case import Stopwatch
from rlflame.bench.learners import TimedProcessGroup, describe_side, find_shard_count
from rlflame.bench.result import Side


def test_only_the_exchange_is_counted():
    """The clock advances by one at each reading."""

    def work(seat):
        ticks = iter(range(100))
        watch = Stopwatch(lambda: float(next(ticks)))
        timed = TimedProcessGroup(seat, watch)
        timed.gather(np.ones(2, np.float32))
        shared = timed.broadcast({"a": 1} if seat.rank == 0 else None)
        return watch.spent_s["exchange"], shared

    assert together(2, work) == [(2.0, {"a": 1})] * 2


@pytest.mark.parametrize(
    ("counts", "fewest", "shards"), [([1, 2, 4], 8, 8), ([1, 3], 8, 9), ([1, 2, 16], 8, 16)]
)
def test_all_numbers_of_learners_share_the_same_shards(counts, fewest, shards):
    assert find_shard_count(counts, fewest) == shards


def side(learners, *learn_s):
    counts = {"exchange_s": 0.25, "steps": 100, "updates": 5, "weights": "w"}
    runs = [{"seconds": 2 * s, "learn_s": s, **counts} for s in learn_s]
    return Side(f"{learners} learners", {"learners": learners}, runs)


def test_a_speed_up_is_beside_the_first_side():
    sides = [side(2, 8.0), side(4, 4.0), side(8, 2.0)]
    facts = [describe_side(one, sides[0]) for one in sides]
    assert [one["speedup_learning"].value for one in facts] == pytest.approx([1.0, 2.0, 4.0])
    assert [one["ideal"] for one in facts] == [1.0, 2.0, 4.0]
    # 8 s in 5 updates, of which 0.25 s are exchanges.
    assert (facts[0]["update_ms"], facts[0]["exchange_ms"]) == (1600.0, 50.0)
    assert facts[0]["exchange_share"] == 50.0 / 1600.0


@pytest.mark.parametrize("env", ["cartpole", "pendulum"])
def test_learners_are_timed_and_the_files_agree(env, tmp_path):
    spoken = rlflame(
        "bench", "learners", "--learners", "1,2", "--env", env, "--iterations", "1",
        "--repeat", "1", *TINY[2:], "--set", "network.hidden=[8]", "-o", tmp_path / "new",
    )  # fmt: skip
    assert spoken.code == 0, spoken.err
    facts = json.loads((tmp_path / "new/learners.json").read_text())
    assert facts["same_bits"]
    assert (facts["gradient_shards"], facts["samples"]) == (8, 32)
    one, two = facts["sides"]
    (alone,), (shared,) = one["runs"], two["runs"]
    # The second of two iterations has 64 steps, and two epochs of two minibatches.
    assert (alone["steps"], alone["updates"]) == (64, 4)
    assert (shared["steps"], shared["updates"]) == (64, 4)
    assert alone["exchange_s"] == 0.0 < shared["exchange_s"] < shared["learn_s"]
    assert "The learned weights are " in spoken.out
    assert spoken.out.strip() == (tmp_path / "new/learners.md").read_text().strip()
    text = rlflame("plot", tmp_path / "new/learners.csv", "-o", "-").out
    assert "Learners" in text
    # Learning and the whole run are each compared with one learner.
    assert text.splitlines().count("1: 1.00x") == 2


def test_numbers_of_learners_that_share_no_shards_are_refused():
    spoken = rlflame("bench", "learners", "--learners", "1,5", "--set", "gradient_shards=8")
    assert spoken.code == 2
    assert "5 learners cannot share 16 units of work evenly" in spoken.err
