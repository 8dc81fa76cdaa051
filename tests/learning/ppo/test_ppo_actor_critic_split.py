"""A batch in two halves, each in a thread: the bits and the metrics of one learner."""

from __future__ import annotations

import queue
import threading

import numpy as np
import pytest
from halves import assert_same, batches, learner, settings, spec_of

from rlflame.errors import LearningError
from rlflame.learning.networks.mlp import CHUNK_ROWS
from rlflame.learning.ppo.loss import HALVES, ActorCriticSplit


class Talk:
    """One end of a conversation between two threads; counts what is said."""

    def __init__(self, out: queue.Queue, into: queue.Queue):
        self.out, self.into, self.said = out, into, 0

    def exchange(self, mine, theirs):
        self.said += mine.size > 0
        self.out.put(mine.copy())
        found = self.into.get(timeout=60)
        assert (found.dtype, found.shape) == (theirs.dtype, theirs.shape)
        theirs[:] = found


def in_halves(learning, spec, work):
    """`work` with both learners at once: what each has returned or raised, by its network."""
    one, other = queue.Queue(), queue.Queue()
    talks = {"actor": Talk(one, other), "critic": Talk(other, one)}
    results = {}

    def live(name):
        half = learner(learning, spec)
        half.start_split(name, talks[name])
        try:
            results[name] = (work(half), half)
        except LearningError as error:
            results[name] = (error.message, half)

    threads = [threading.Thread(target=live, args=(name,)) for name in HALVES]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results, talks


CASES = {
    "continuous": ("continuous", {}),
    "discrete": ("discrete", {"normalise_advantages": "minibatch", "entropy_weight": 0.05}),
    "gsde": ("gsde", {"normalise_advantages": "batch", "clip_range_value": 0.1}),
    "once": ("continuous", {"recompute_advantages": False, "minibatch_size": 19}),
    "unclipped": ("continuous", {"max_gradient_norm": None, "scale_rewards": False}),
    "far": ("continuous", {"target_kl": 1e-4, "learning_rate": 3e-3}),
}


@pytest.mark.parametrize("case", CASES)
def test_two_halves_are_one_learner(case):
    kind, changes = CASES[case]
    learning, spec = settings(**changes), spec_of(kind)
    data = batches(spec, learning, 3)

    def work(one):
        return [one.update(batch, 0.2 * place) for place, batch in enumerate(data)]

    alone = learner(learning, spec)
    expected = work(alone)
    results, _ = in_halves(learning, spec, work)
    metrics, half = results["actor"]
    assert metrics == expected
    assert_same(half.get_state(), alone.get_state())
    if case == "far":
        assert expected[-1]["n_updates"] < 3 * 2 * 4


def test_the_actor_never_steps_the_critic_and_the_critic_never_the_actor(monkeypatch):
    """Each half moves its own network alone; the actor's is given the other at the end."""
    learning, spec = settings(), spec_of()
    held, share = {"actor": [], "critic": []}, ActorCriticSplit.fill_from_critic

    def watched(half, numbers):
        if numbers.ndim == 1:  # not the estimates
            held[half._name].append(numbers.copy())
        share(half, numbers)

    monkeypatch.setattr(ActorCriticSplit, "fill_from_critic", watched)
    (batch,) = batches(spec, learning, 1)
    results, talks = in_halves(learning, spec, lambda one: one.update(batch, 0.0))
    _, critic = results["critic"]
    begun, ended = learner(learning, spec).get_policy(), critic.get_policy()
    for name, array in begun.items():
        if name.startswith("actor."):
            np.testing.assert_array_equal(ended[name], array)
    at_first = learner(learning, spec)
    state, critic = at_first.get_state(), at_first._spans["critic"]
    for found, name in zip(held["actor"], ("parameters", "adam.first", "adam.second"), strict=True):
        np.testing.assert_array_equal(found, state[name][critic])
    assert (held["critic"][0] != held["actor"][0]).any()
    # Eight minibatches; estimates at the beginning and for the second epoch, and what it became.
    assert talks["actor"].said == 8
    assert talks["critic"].said == 8 + 2 + 3


def test_long_batches_are_estimated_in_the_same_pieces():
    learning, spec = settings(minibatch_size=1000), spec_of()
    (batch,) = batches(spec, learning, 1, steps=CHUNK_ROWS // 4)
    alone = learner(learning, spec)
    expected = alone.update(batch, 0.0)
    results, _ = in_halves(learning, spec, lambda one: one.update(batch, 0.0))
    assert results["actor"][0] == expected
    assert_same(results["actor"][1].get_state(), alone.get_state())


@pytest.mark.parametrize("epochs", [1, 2])
@pytest.mark.parametrize("spoilt", ["rewards", "observations"])
def test_both_halves_refuse_what_one_learner_refuses(spoilt, epochs):
    """A few minibatches, or so many that both give up."""
    size = 24 if epochs == 1 else 8
    learning, spec = settings(epochs=epochs, scale_rewards=False, minibatch_size=size), spec_of()
    (batch,) = batches(spec, learning, 1)
    getattr(batch, spoilt)[3, : 1 if epochs == 1 else 8] = 1e30 if spoilt == "rewards" else np.nan
    alone = learner(learning, spec)
    try:
        expected = alone.update(batch, 0.0)
    except LearningError as error:
        expected = error.message
    results, _ = in_halves(learning, spec, lambda one: one.update(batch, 0.0))
    assert alone.get_state()["guard"][0] > 0
    assert isinstance(expected, str) == (epochs == 2)
    for name in HALVES:
        found, half = results[name]
        if name == "critic" and isinstance(found, dict):
            found["std"] = expected["std"]  # of an actor that it does not step
        assert repr(found) == repr(expected)
        np.testing.assert_array_equal(half.get_state()["guard"], alone.get_state()["guard"])


def test_who_stays_alone_learns_both_networks_again():
    learning, spec = settings(), spec_of()
    first, second = batches(spec, learning, 2)
    alone = learner(learning, spec)
    alone.update(first, 0.0)
    alone.update(second, 0.1)
    results, _ = in_halves(learning, spec, lambda one: one.update(first, 0.0))
    half = results["actor"][1]
    half.stop_split()
    half.update(second, 0.1)
    assert_same(half.get_state(), alone.get_state())


def test_a_sum_that_the_other_half_would_lose_is_refused():
    """A metric that is in one process only would disappear from the metrics of the update."""

    class WithAnotherSum:
        def compute_gradient(self, batch, count, networks):
            return np.zeros(3, np.float32), {"value_loss": 1.0, "another": 2.0}

    talk = Talk(queue.Queue(), queue.Queue())
    split = ActorCriticSplit("critic", talk, WithAnotherSum(), {"critic": slice(0, 3)})
    with pytest.raises(AssertionError, match="lose a sum"):
        split.compute_gradient(None, 1)
    assert talk.said == 0
