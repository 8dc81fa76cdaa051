"""The compiled loop over minibatches has the bits of the loop in `ppo.py`."""

from __future__ import annotations

import os
import signal
import threading

import numpy as np
import pytest
from batches import policy_spec, random_batch, random_network
from forked_learners import fork_learners

from rlflame.config.algorithms import PpoSettings
from rlflame.learning.kernels.library import load_kernels
from rlflame.learning.parallel.process_group import Shards
from rlflame.learning.parallel.shared_memory_group import (
    LostLearner,
    SharedMemoryGroup,
)
from rlflame.learning.ppo import compiled_epoch
from rlflame.learning.ppo.compiled_loss import CompiledPpo, make_ppo
from rlflame.learning.ppo.loss import NumpyPpo
from rlflame.learning.ppo.ppo import Ppo

pytestmark = pytest.mark.skipif(load_kernels() is None, reason="the kernels were not compiled")
COLUMNS = 8


def make_learner(settings: PpoSettings, spec, *, compiled: bool = True, shards=None) -> Ppo:
    _, vector = random_network(np.random.default_rng(0), spec)
    provider = make_ppo(vector, spec) if compiled else NumpyPpo(vector, spec)
    learner = Ppo(settings, spec, vector, provider, shards, seed=3, columns=COLUMNS)
    assert isinstance(provider, CompiledPpo) == compiled
    assert (learner._compiled_epoch is not None) == compiled
    return learner


def make_batch(learner: Ppo, spec, number: int):
    return random_batch(
        np.random.default_rng(number), spec, learner.get_policy(), steps=40, columns=COLUMNS
    )


def read_bits(learner: Ppo) -> dict[str, bytes]:
    return {name: np.asarray(array).tobytes() for name, array in learner.get_state().items()}


@pytest.mark.parametrize("changes", [
    {}, {"minibatch_size": 50}, {"max_gradient_norm": None}, {"max_gradient_norm": 1e-3},
    {"clip_range_value": 0.1, "entropy_weight": 0.05, "value_weight": 1.0},
    {"target_kl": 1e-3}, {"normalise_advantages": "minibatch", "anneal_clip_range": True},
    {"recompute_advantages": False, "scale_rewards": True}, {"minibatch_size": 1000},
])  # fmt: skip
@pytest.mark.parametrize(("kind", "activation"), [
    ("continuous", "tanh"), ("continuous", "relu"), ("discrete", "tanh"),
])  # fmt: skip
@pytest.mark.parametrize("count", [1, 2, 4])
def test_updates_have_the_same_bits(changes, kind, activation, count):
    """Minibatches of 50 samples cannot be divided into four equal shards."""
    settings = PpoSettings(**{"minibatch_size": 64, "epochs": 3, **changes})
    spec = policy_spec(kind, activation=activation, normalise=True)
    learners = [
        make_learner(settings, spec, compiled=compiled, shards=Shards(count))
        for compiled in (True, False)
    ]
    for number in range(5):
        batch = make_batch(learners[1], spec, number)
        first, second = (repr(learner.update(batch, 0.1 * number)) for learner in learners)
        assert first == second
        assert read_bits(learners[0]) == read_bits(learners[1])


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e38])
@pytest.mark.parametrize("count", [1, 4])
def test_a_bad_minibatch_is_skipped(value, count):
    settings, spec = PpoSettings(minibatch_size=20, epochs=1), policy_spec()
    learners = [
        make_learner(settings, spec, compiled=compiled, shards=Shards(count))
        for compiled in (True, False)
    ]
    batch = make_batch(learners[1], spec, 0)
    batch.log_probs[3, 2] = -value
    metrics = [learner.update(batch, 0.0) for learner in learners]
    assert repr(metrics[0]) == repr(metrics[1])
    assert metrics[0]["refused_minibatches"] == 1
    assert read_bits(learners[0]) == read_bits(learners[1])


def test_equal_shards_run_in_the_compiled_loop(monkeypatch):
    learner = make_learner(PpoSettings(minibatch_size=64), policy_spec(), shards=Shards(4))
    monkeypatch.setattr(learner._provider, "compute_shards", None)
    assert learner.update(make_batch(learner, policy_spec(), 0), 0.0)["n_updates"] == 50


def test_a_loop_with_other_results_is_not_used(monkeypatch):
    compiled_epoch._has_equal_results.cache_clear()
    try:
        monkeypatch.setattr(compiled_epoch, "clip", lambda *given: None)
        settings, spec = PpoSettings(max_gradient_norm=1e-3), policy_spec()
        _, vector = random_network(np.random.default_rng(0), spec)
        learner = Ppo(settings, spec, vector, make_ppo(vector, spec), seed=0, columns=8)
        assert learner._compiled_epoch is None
    finally:
        compiled_epoch._has_equal_results.cache_clear()


@pytest.mark.parametrize(("kind", "changes"), [
    ("continuous", {}), ("continuous", {"minibatch_size": 50}), ("continuous", {"target_kl": 1e-3}),
    ("discrete", {}),
])  # fmt: skip
@pytest.mark.parametrize("count", [1, 4])
def test_two_learners_have_the_same_bits(kind, changes, count):
    settings = PpoSettings(**{"minibatch_size": 64, "epochs": 3, **changes})
    spec = policy_spec(kind, normalise=True)
    alone = make_learner(settings, spec, shards=Shards(count))
    batches = [make_batch(alone, spec, number) for number in range(4)]
    batches[2].log_probs[3, 2] = np.nan

    def learn(group: SharedMemoryGroup) -> tuple[list[str], Ppo]:
        learner = make_learner(settings, spec, shards=Shards(count, group))
        return [repr(learner.update(batch, 0.0)) for batch in batches], learner

    group, (pid,) = fork_learners(2, learn)
    metrics, learner = learn(group)
    os.waitpid(pid, 0)
    is_used = settings.minibatch_size % count == 0
    assert (learner._compiled_epoch._memory is not None) == is_used
    assert metrics == [repr(alone.update(batch, 0.0)) for batch in batches]
    assert read_bits(learner) == read_bits(alone)
    group.close()


def test_a_learner_that_pauses_again_and_again_is_not_lost():
    settings, spec = PpoSettings(minibatch_size=8, epochs=10), policy_spec()
    alone = make_learner(settings, spec)
    batches = [make_batch(alone, spec, number) for number in range(12)]

    def learn(group: SharedMemoryGroup) -> Ppo:
        learner = make_learner(settings, spec, shards=Shards(1, group))
        for batch in batches:
            learner.update(batch, 0.0)
        return learner

    group, (pid,) = fork_learners(2, learn)
    has_ended = threading.Event()

    def disturb() -> None:
        while not has_ended.wait(0.003):
            os.kill(pid, signal.SIGSTOP)
            has_ended.wait(0.006)
            os.kill(pid, signal.SIGCONT)

    thread = threading.Thread(target=disturb)
    thread.start()
    try:
        learner = learn(group)
    finally:
        has_ended.set()
        thread.join()
        os.waitpid(pid, 0)
    for batch in batches:
        alone.update(batch, 0.0)
    assert read_bits(learner) == read_bits(alone)
    group.close()


@pytest.mark.parametrize("compiled", [(True, False), (False, True)])
def test_learners_of_which_only_one_has_the_kernels_have_the_same_bits(compiled):
    settings, spec = PpoSettings(minibatch_size=16, epochs=2), policy_spec()
    alone = make_learner(settings, spec)
    batches = [make_batch(alone, spec, number) for number in range(3)]

    def learn(group: SharedMemoryGroup) -> Ppo:
        shards = Shards(1, group)
        learner = make_learner(settings, spec, compiled=compiled[group.rank], shards=shards)
        for batch in batches:
            learner.update(batch, 0.0)
        return learner

    group, (pid,) = fork_learners(2, learn)
    learner = learn(group)
    os.waitpid(pid, 0)
    for batch in batches:
        alone.update(batch, 0.0)
    assert read_bits(learner) == read_bits(alone)
    group.close()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_learner_that_ends_or_hangs_in_the_loop_is_noticed(number):
    settings, spec = PpoSettings(minibatch_size=16, epochs=3), policy_spec()
    batch = make_batch(make_learner(settings, spec), spec, 0)

    def learn(group: SharedMemoryGroup) -> None:
        learner = make_learner(settings, spec, shards=Shards(1, group))
        step, calls = learner._compiled_epoch._kernels.run_epoch, []

        def stop(address: int) -> int:
            calls.append(address)
            if len(calls) == 2:
                os.kill(os.getpid(), number)
            return step(address)

        learner._compiled_epoch._kernels.run_epoch = stop
        learner.update(batch, 0.0)

    read, write = os.pipe()  # as a child's pipe, which closes when the child ends
    group, (pid,) = fork_learners(2, learn, deadline_s=0.5, child_pipes=[read])
    os.close(write)
    learner = make_learner(settings, spec, shards=Shards(1, group))
    try:
        with pytest.raises(LostLearner) as caught:
            learner.update(batch, 0.0)
        assert caught.value.is_hung == (number == signal.SIGSTOP)
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    # The same learner repeats the update alone.
    learner.shards.use_group(Shards().group)
    fresh = make_learner(settings, spec)
    learner.load_state(fresh.get_state())
    assert repr(learner.update(batch, 0.0)) == repr(fresh.update(batch, 0.0))
    assert read_bits(learner) == read_bits(fresh)
