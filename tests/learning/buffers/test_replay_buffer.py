"""The replay buffer, compared with a list of transitions and arithmetic by hand."""

from __future__ import annotations

import math
from decimal import Decimal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from replays import World, buffer_for, copied, small_segments

from rlflame.errors import LearningError
from rlflame.learning.base import Segment, compute_digest
from rlflame.learning.buffers.replay_buffer import ReplayShape, make_emptied_state
from rlflame.learning.buffers.transition_ring import TransitionRing

quick = settings(max_examples=60, deadline=None)
few_rows = small_segments(8)


@st.composite
def lives(draw):
    """Draw a world, a buffer capacity, and the steps of each iteration."""
    world = World(
        draw(st.integers(1, 3)),
        draw(st.integers(1, 3)),
        np.random.default_rng(draw(st.integers(0, 99))),
        ends=draw(st.sampled_from([0.0, 0.2, 0.9])),
    )
    capacity = draw(st.integers(1, 40))
    return world, capacity, draw(st.lists(st.integers(1, 25), min_size=1, max_size=6))


def assert_drawn_from(drawn, expected):
    for i, name in enumerate(drawn.observations[:, 0].tolist()):
        action, reward, following, bootstrap = expected[name]
        assert drawn.observations[i].tolist() == [name, name]
        assert drawn.actions[i].tolist() == [action, action]
        assert drawn.rewards[i] == pytest.approx(reward, abs=1e-5)
        assert drawn.bootstrap[i] == pytest.approx(bootstrap, rel=1e-6)
        if following is not None:
            assert drawn.next_observations[i].tolist() == [following, following]


@few_rows
@quick
@given(lives(), st.integers(1, 5))
def test_what_is_drawn_is_what_happened(life, n_step):
    world, capacity, iterations = life
    buffer = buffer_for(world, capacity, n_step=n_step)
    for update, steps in enumerate(iterations):
        buffer.add(world.iteration(steps), {})
        rows = -(-capacity // world.columns)
        expected = world.transitions(rows, n_step, 0.9)
        assert buffer.size == len(expected)
        assert buffer.total_added == sum(map(len, world.history))
        assert_drawn_from(buffer.draw(update), expected)


def test_every_transition_is_drawn_as_often_as_any_other():
    world = World(2, 2, np.random.default_rng(0))
    buffer = buffer_for(world, 40, batch_size=100)
    for _ in range(7):
        buffer.add(world.iteration(3), {})
    names = list(world.transitions(10, 1, 0.9))
    drawn = np.concatenate([copied(buffer.draw(u))["observations"][:, 0] for u in range(200)])
    counts = np.array([(drawn == name).sum() for name in names])
    assert counts.sum() == 20_000
    statistic = float(np.square(counts - 500).sum() / 500)
    # The chi-square statistic with 39 degrees of freedom leaves this range in 0.2% of cases.
    assert 16.3 < statistic < 72.1


def test_each_update_has_its_own_draw_and_always_the_same():
    world = World(1, 2, np.random.default_rng(0))
    one, other = buffer_for(world, 100), buffer_for(world, 100, seed=4)
    fragments = world.iteration(40)
    one.add(fragments, {})
    other.add(fragments, {})
    first, second = copied(one.draw(0)), copied(one.draw(1))
    assert not np.array_equal(first["observations"], second["observations"])
    assert not np.array_equal(first["observations"], other.draw(0).observations)
    np.testing.assert_array_equal(first["observations"], one.draw(0).observations)


@few_rows
@quick
@given(
    st.lists(st.integers(1, 15), min_size=1, max_size=5),
    st.integers(1, 3),
    st.sampled_from(["1.0", "0.25", "0.1", "0.3", "2.5", "20.0", "0.07"]),
    st.integers(0, 60),
)
def test_updates_owed_are_a_matter_of_steps_and_not_of_their_shape(
    iterations, columns, ratio, starts
):
    world = World(1, columns, np.random.default_rng(0))
    buffer = buffer_for(
        world, 50, batch_size=1, updates_per_step=float(ratio), learning_starts=starts
    )
    made = steps = 0
    for count in iterations:
        buffer.add(world.iteration(count), {})
        (batch,) = buffer.take_batches()
        assert batch.fresh.steps == count * columns
        assert [update for update, _ in batch] == list(range(made, made + batch.updates))
        made, steps = made + batch.updates, steps + count * columns
        # In decimal arithmetic, three tenths are exact.
        assert made == math.floor(max(0, steps - starts) * Decimal(ratio))
    assert list(buffer.take_batches()) == []


@pytest.mark.parametrize(("steps", "ratio", "expected"), [(10, 0.3, 3), (100, 0.29, 29)])
def test_three_tenths_of_ten_are_three(steps, ratio, expected):
    """As floats, 0.3 is less than three tenths, and 100 * 0.29 is less than 29."""
    world = World(1, 1, np.random.default_rng(0))
    buffer = buffer_for(world, 50, updates_per_step=ratio)
    buffer.add(world.iteration(steps), {})
    (batch,) = buffer.take_batches()
    assert batch.updates == expected


def test_a_capacity_is_rounded_up_to_whole_rows():
    world = World(1, 3, np.random.default_rng(0))
    buffer = buffer_for(world, 10)
    for _ in range(9):
        buffer.add(world.iteration(1), {})
    assert buffer.size == 12


def test_a_reward_beyond_float32_is_kept_as_the_greatest():
    world = World(1, 1, np.random.default_rng(0), ends=0.0)
    (fragment,) = world.iteration(2)
    fragment.rewards[:, 0] = [1e300, -1e300]
    buffer = buffer_for(world, 10)
    buffer.add([fragment], {})
    greatest = np.finfo(np.float32).max
    assert set(buffer.draw(0).rewards.tolist()) == {float(greatest), float(-greatest)}


def test_a_truncated_step_without_its_observation_is_refused():
    world = World(1, 1, np.random.default_rng(0), ends=0.0)
    (fragment,) = world.iteration(3)
    fragment.truncated[1] = True
    with pytest.raises(LearningError, match="final observations"):
        buffer_for(world, 10).add([fragment], {})


# Memory.


def test_a_million_steps_of_ant_fit_into_a_gigabyte():
    shape = ReplayShape(1_000_000, 16, 105, 8)
    # The numbers of a step, and one byte for its end: 457 bytes.
    assert 457_000_000 <= shape.nbytes < 460_000_000
    world = World(1, 16, np.random.default_rng(0), observation_size=105, action_size=8)
    buffer = buffer_for(world, 1_000_000)
    assert buffer.nbytes == pytest.approx(shape.nbytes, abs=100_000)


@pytest.mark.parametrize("limit", [1, 3, 50])
def test_what_time_limits_hide_is_counted(limit):
    """All episodes reach their time limit, in all columns at the same step."""
    shape, plain = (ReplayShape(5000, 4, 30, 2, one) for one in (limit, None))
    ring = TransitionRing(shape.stored_rows, 4, 30, 2)
    most = 0
    for first in range(0, 6000, 30):
        ends = (np.arange(first + 1, first + 31) % limit == 0)[:, None].repeat(4, axis=1)
        steps = {name: np.zeros(of, kind) for name, (kind, of) in ring.list_shapes(30, 0).items()
                 if not name.startswith("boundary")}  # fmt: skip
        index = np.argwhere(ends)
        hidden = np.zeros((len(index), 30), np.float32)
        ring.append({**steps, "truncated": ends, "boundary_index": index,
                     "boundary_observations": hidden})  # fmt: skip
        most = max(most, ring.nbytes)
    assert most <= shape.nbytes
    assert most - plain.nbytes > (shape.nbytes - plain.nbytes) / 5


def test_the_table_of_hidden_observations_does_not_grow_with_the_run():
    world = World(1, 2, np.random.default_rng(0), ends=1.0)
    buffer = buffer_for(world, 100)
    sizes = []
    for _ in range(12):
        buffer.add(world.iteration(700), {})
        sizes.append(buffer.nbytes)
    # The number of time limits among the newest steps is random.
    assert max(sizes[6:]) < 1.2 * max(sizes[:6])


# Saved state.


def saved(buffer):
    """A copy of the state and the segments, as files would contain them."""
    kept = []
    for segment in buffer.list_segments():
        arrays = {name: array.copy() for name, array in segment.arrays().items()}
        assert compute_digest(arrays) == segment.digest
        kept.append(Segment(segment.number, segment.digest, lambda arrays=arrays: arrays))
    return {name: array.copy() for name, array in buffer.get_state().items()}, tuple(kept)


def assert_equal(one, other):
    (state, segments), (state2, segments2) = one, other
    assert segments == segments2
    assert state.keys() == state2.keys()
    for name in state:
        np.testing.assert_array_equal(state[name], state2[name], err_msg=name)


@few_rows
@quick
@given(lives(), st.integers(0, 5), st.integers(1, 4))
def test_a_replay_taken_up_at_any_moment_goes_on_the_same(life, moment, n_step):
    world, capacity, iterations = life
    whole = buffer_for(world, capacity, n_step=n_step, learning_starts=9)
    other = whole
    for i, steps in enumerate(iterations):
        fragments = world.iteration(steps)
        for buffer in {id(b): b for b in (whole, other)}.values():
            buffer.add(fragments, {})
            list(buffer.take_batches())
        if i == min(moment, len(iterations) - 1):
            other = buffer_for(world, capacity, n_step=n_step, learning_starts=9)
            other.load_state(*saved(whole))
        assert_equal(saved(whole), saved(other))
        for update in range(2):
            expected, found = copied(whole.draw(update)), copied(other.draw(update))
            for name in expected:
                np.testing.assert_array_equal(found[name], expected[name])


@few_rows
@quick
@given(lives())
def test_segments_and_tail_hold_each_transition_once_and_no_more_than_a_segment_too_many(life):
    world, capacity, iterations = life
    buffer = buffer_for(world, capacity)
    for steps in iterations:
        buffer.add(world.iteration(steps), {})
        state, segments = saved(buffer)
        parts = [segment.arrays()["observations"] for segment in segments]
        rows = np.concatenate([*parts, state["tail.observations"]])[..., 0]
        newest = np.array([[s.observation for s in column] for column in world.history]).T
        np.testing.assert_array_equal(rows, newest[len(newest) - len(rows) :])
        sampled = buffer.size // world.columns
        assert sampled <= max(len(rows), 1) < sampled + 2 * max(1, 8 // world.columns)


@few_rows
def test_a_segment_never_changes_and_its_digest_stands_for_all_before_it():
    world, digests = World(1, 2, np.random.default_rng(0)), {}
    buffer = buffer_for(world, 1000)
    for _ in range(20):
        buffer.add(world.iteration(3), {})
        for segment in saved(buffer)[1]:
            assert digests.setdefault(segment.number, segment.digest) == segment.digest
    assert len(set(digests.values())) == len(digests) == 15
    changed = buffer_for(world, 1000)
    again = World(1, 2, np.random.default_rng(0))
    (fragment,) = again.iteration(60)
    fragment.rewards[0, 1] += 1.0
    changed.add([fragment], {})
    assert not {s.digest for s in changed.list_segments()} & set(digests.values())


def test_a_segments_digest_is_of_names_types_and_shapes_too():
    content = np.arange(6, dtype=np.int32)
    held = {"a": content, "b": content}
    others = [
        {"a": content, "c": content},
        {"a": content.reshape(2, 3), "b": content},
        {"a": content.view(np.float32), "b": content},
        {"a": content + 1, "b": content},
        {"a": content},
    ]
    digests = {compute_digest(arrays) for arrays in (held, dict(reversed(held.items())), *others)}
    assert len(digests) == 1 + len(others)


@few_rows
def test_a_segment_that_has_left_memory_is_not_read_from_it():
    world = World(1, 1, np.random.default_rng(0))
    buffer = buffer_for(world, 8)
    buffer.add(world.iteration(8), {})
    (segment,) = buffer.list_segments()
    buffer.add(world.iteration(7), {})
    segment.arrays()
    buffer.add(world.iteration(1), {})
    with pytest.raises(LearningError, match="left memory"):
        segment.arrays()


@few_rows
def test_what_does_not_belong_together_is_refused():
    world = World(1, 2, np.random.default_rng(0))
    buffer = buffer_for(world, 1000)
    buffer.add(world.iteration(15), {})
    state, segments = saved(buffer)
    other_world = World(1, 2, np.random.default_rng(1))
    other = buffer_for(other_world, 1000)
    other.add(other_world.iteration(15), {})
    strangers = saved(other)[1]

    def refuses(words, changes=(), kept=segments):
        with pytest.raises(LearningError, match=words):
            buffer_for(world, 1000).load_state({**state, **dict(changes)}, kept)

    refuses("segments are not those", kept=segments[1:])
    refuses("segments are not those", kept=())
    refuses("segments are not those", kept=(segments[1], segments[0], segments[2]))
    refuses("rows is -1", {"rows": np.array(-1)})
    refuses(f"rows is {2**62}", {"rows": np.array(2**62)})
    refuses("do not follow", kept=strangers)
    refuses("do not follow", kept=(segments[0], strangers[1], segments[2]))
    refuses("do not follow", {"chain": np.zeros(32, np.uint8)})
    refuses("contradict", {"updates": np.array(31)})
    refuses("contradict", {"forgiven": np.array(1)})
    refuses("lineage is -1", {"lineage": np.array(-1)})
    refuses("shape: rewards", {"tail.rewards": state["tail.rewards"][:-1]})
    refuses("observations", {"tail.observations": state["tail.observations"].astype(np.float64)})
    refuses("shape: more", {"tail.more": np.zeros(1)})
    content = segments[0].arrays()
    content = {name: array for name, array in content.items() if name != "rewards"}
    refuses("shape: rewards", kept=(Segment(0, "", lambda: content), *segments[1:]))
    with pytest.raises(LearningError, match="observations"):
        buffer_for(World(1, 2, np.random.default_rng(0), observation_size=3), 1000).load_state(
            state, segments
        )


@few_rows
def test_a_new_lineage_is_empty_owes_no_updates_and_has_its_own_digest():
    world = World(1, 2, np.random.default_rng(0))
    buffer = buffer_for(world, 1000, learning_starts=10)
    buffer.add(world.iteration(20), {})
    list(buffer.take_batches())
    state, _ = saved(buffer)
    fresh = buffer_for(world, 1000, learning_starts=10)
    fresh.load_state(make_emptied_state(state), ())
    assert fresh.size == fresh.total_added == 0
    for steps, owed in [(4, 0), (1, 0), (3, 6), (1, 2)]:
        fresh.add(world.iteration(steps), {})
        (batch,) = fresh.take_batches()
        assert batch.updates == owed
    # The first thirty updates were made before.
    assert batch.first_update == 36
    assert int(fresh.get_state()["lineage"]) == 1
    again = make_emptied_state(saved(fresh)[0])
    assert (int(again["lineage"]), int(again["updates"]), int(again["forgiven"])) == (2, 38, 38)
