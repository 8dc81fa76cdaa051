"""The conversion of fragments to a batch."""

from __future__ import annotations

import numpy as np

from rlflame.learning.buffers.rollout_buffer import RolloutBuffer, concatenate_fragments
from rlflame.rollout.task import Fragment


def fragment(slot, lengths, size=3, garbage=0.0):
    """A fragment whose numbers encode slot, step and row. Idle steps contain garbage."""
    lengths = np.array(lengths)
    steps, rows = int(lengths.max()), len(lengths)
    t, row = np.meshgrid(np.arange(steps), np.arange(rows), indexing="ij")
    name = 1000.0 * (slot + 1) + 10.0 * t + row
    valid = t < lengths
    last = t == lengths - 1
    name[~valid] = garbage
    odd = (row % 2 == 1) & last
    index = np.argwhere(odd)
    return Fragment(
        iteration=0,
        slot=slot,
        observations=np.repeat(name[..., None], size, axis=2).astype(np.float32),
        actions=np.where(valid, t, -7 if garbage else 0).astype(np.int64),
        log_probs=(-name).astype(np.float32),
        rewards=name.copy(),
        terminated=(last & ~odd) | (~valid & bool(garbage)),
        truncated=odd | (~valid & bool(garbage)),
        lengths=lengths,
        last_observations=np.full((rows, size), -slot, np.float32),
        boundary_index=index,
        boundary_observations=np.array([[slot, t, r] for t, r in index], np.float32).reshape(-1, 3),
        episodes=(),
        states=(),
    )


def test_every_number_finds_its_place():
    batch = concatenate_fragments(
        [fragment(0, [2, 4]), fragment(1, [3]), fragment(2, [1, 1, 5])], {}
    )

    assert batch.rewards.shape == (5, 6)
    assert batch.steps == 2 + 4 + 3 + 1 + 1 + 5
    assert batch.valid.sum(axis=0).tolist() == [2, 4, 3, 1, 1, 5]
    assert batch.rewards[:, 0].tolist() == [1000, 1010, 0, 0, 0]
    assert batch.rewards[:, 2].tolist() == [2000, 2010, 2020, 0, 0]
    assert batch.rewards[:, 5].tolist() == [3002, 3012, 3022, 3032, 3042]
    np.testing.assert_array_equal(batch.observations[..., 0], batch.rewards)
    np.testing.assert_array_equal(batch.log_probs, -batch.rewards)
    assert batch.actions[:, 1].tolist() == [0, 1, 2, 3, 0]
    assert batch.last_observations[:, 0].tolist() == [0, 0, -1, -2, -2, -2]
    # (t, column) of each truncation, and its observation: slot, t, row.
    assert batch.boundary_index.tolist() == [[3, 1], [0, 4]]
    assert batch.boundary_observations.tolist() == [[0, 3, 1], [2, 0, 1]]
    assert np.argwhere(batch.truncated).tolist() == [[0, 4], [3, 1]]
    assert batch.terminated.sum() == 4


def test_idle_places_hold_zeros_whatever_the_worker_left_there():
    clean = [fragment(0, [2, 4]), fragment(1, [3, 1])]
    dirty = [fragment(0, [2, 4], garbage=np.nan), fragment(1, [3, 1], garbage=np.nan)]
    assert np.isnan(dirty[0].rewards).any()

    expected, found = concatenate_fragments(clean, {}), concatenate_fragments(dirty, {})

    for name in ("observations", "actions", "log_probs", "rewards", "terminated", "truncated"):
        np.testing.assert_array_equal(getattr(found, name), getattr(expected, name))


def test_fragments_are_not_written_to():
    dirty = fragment(0, [2, 4], garbage=np.nan)
    concatenate_fragments([dirty], {})
    assert np.isnan(dirty.rewards).any()


def test_the_store_yields_once_and_forgets():
    store = RolloutBuffer()
    behaviour = {"actor.0.bias": np.zeros(2, np.float32)}
    assert list(store.take_batches()) == []
    store.add([fragment(0, [2])], behaviour)
    (batch,) = store.take_batches()
    assert batch.behaviour is behaviour
    assert list(store.take_batches()) == []

    store.add([fragment(0, [2])], behaviour)
    store.add([fragment(0, [3])], behaviour)
    assert [batch.steps for batch in store.take_batches()] == [3]
    assert store.get_state() == {}
    assert store.list_segments() == ()
    store.load_state({}, ())
