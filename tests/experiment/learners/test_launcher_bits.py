"""One table: three algorithms by numbers of learners by fleets, and the digests of a row are equal.

Everything is as in use: learners are processes that meet over torch.distributed, rollouts come from
worker processes here or from Flame (the stub, or the cluster that FLAME_ENDPOINT names). Each row
is held against one learner that collects its rollouts itself.
"""

from __future__ import annotations

import flames
import gloo
import pytest
from test_replica_main import PPO, REINFORCE, SAC, recipe
from tiny_runs import run

from rlflame.fleet.local import LocalFleet
from rlflame.learning.parallel.process_group import Shards, release_replicas

#: Eight shards, however many learners there are. The last of them is shorter than the first in
#: PPO's minibatches of 50 and of 42 samples and in SAC's of 15; REINFORCE's are what episodes give.
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
    """What every cell of a row has to be: the digest, and every number on the way to it."""
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
