"""Three algorithms, several numbers of learners and fleets: equal digests.

The learners are processes that communicate with torch.distributed. Rollouts come from local worker
processes or from Flame (the stub, or the cluster that FLAME_ENDPOINT names). The expected digest of
a row comes from one learner with the inline fleet.
"""

from __future__ import annotations

import flames
import gloo
import pytest
from test_replica_main import PPO, REINFORCE, SAC, recipe
from tiny_runs import run

from rlflame.fleet.local import LocalFleet
from rlflame.learning.parallel.process_group import Shards, release_replicas

#: Eight shards for any number of learners. The last shard is shorter than the first in PPO's
#: minibatches of 50 and 42 samples and in SAC's minibatches of 15. In REINFORCE, the lengths of the
#: shards depend on the episodes.
ROWS = {
    name: case | {"gradient_shards": 8}
    for name, case in (("reinforce", REINFORCE), ("ppo", PPO), ("sac", SAC))
}


@pytest.fixture(scope="module", params=[1, 2, 4, 8], ids="{} learners".format)
def learners(request, tmp_path_factory):
    with gloo.gathered(request.param) as group:
        yield group


@pytest.fixture(scope="module")
def fleets():
    flames.settle(flames.environment())
    with LocalFleet(2) as local, flames.fleet(lambda event: None) as flame:
        yield {"local": local, "flame": flame}


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The expected results of a row: the digest and all recorded numbers."""
    folder = tmp_path_factory.mktemp("alone")
    runs = {name: run(recipe(row, 3)) for name, row in ROWS.items()}
    cells = {name: (ran.state_digest(folder), ran.recorded.metrics) for name, ran in runs.items()}
    assert len({digest for digest, _ in cells.values()}) == len(ROWS)
    return cells


@pytest.mark.parametrize("fleet", ["local", "flame"])
@pytest.mark.parametrize("algorithm", ROWS)
def test_a_row_has_one_digest(algorithm, learners, fleet, alone, fleets, tmp_path):
    ran = run(recipe(ROWS[algorithm], 3), group=learners, compare_every=1, fleet=fleets[fleet])
    release_replicas(learners)
    assert (ran.state_digest(tmp_path), ran.recorded.metrics) == alone[algorithm]


@pytest.mark.parametrize("samples", [50, 42, 15])
def test_the_last_of_eight_shards_is_shorter(samples):
    first, *_, last = (shard.rows for shard in Shards(8).split(samples))
    assert last.stop - last.start < first.stop - first.start
