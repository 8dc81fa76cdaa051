"""The replay on a device, run on the CPU: the same bytes as from the buffer in CPU memory."""

from __future__ import annotations

from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from replays import World, buffer_for, copied, small_segments

from rlflame.learning.base import Transitions
from rlflame.learning.buffers.replay_buffer import ReplayShape
from rlflame.learning.device import replay
from rlflame.learning.device.replay import DeviceReplay, count_replay_bytes, measure_free_bytes

CPU = torch.device("cpu")
quick = settings(max_examples=60, deadline=None)
#: Send five transitions at a time, which is no multiple of the columns.
small_parts = mock.patch.object(replay, "_PART_TRANSITIONS", 5)
few_rows = small_segments(8)


def on_device(made, update):
    numbers = torch.from_numpy(made.draw_rows(update)).to(made._table.device)
    fields = [field.cpu().numpy() for field in made.gather(numbers)]
    return dict(zip(Transitions.__slots__, fields, strict=True))


def assert_same_bytes(made, buffer):
    for update in range(3):
        expected, found = copied(buffer.draw(update)), on_device(made, update)
        for name, array in expected.items():
            assert found[name].dtype == array.dtype
            assert found[name].tobytes() == array.tobytes(), name


@st.composite
def worlds(draw):
    return World(
        draw(st.integers(1, 3)),
        draw(st.integers(1, 3)),
        np.random.default_rng(draw(st.integers(0, 99))),
        ends=draw(st.sampled_from([0.0, 0.2, 0.9])),
        observation_size=draw(st.integers(1, 4)),
    )


iterations = st.lists(st.integers(1, 25), min_size=1, max_size=6)


@small_parts
@quick
@given(worlds(), st.integers(1, 40), iterations, st.integers(1, 5), st.sampled_from([0.0, 0.9, 1]))
def test_samples_are_those_of_the_buffer(world, capacity, iterations, n_step, discount):
    """Small capacities are exceeded several times, also by a single iteration."""
    buffer = buffer_for(world, capacity, n_step=n_step, discount=discount)
    made = DeviceReplay(buffer, CPU)
    for steps in iterations:
        buffer.add(world.iteration(steps), {})
        made.send_new()
        assert_same_bytes(made, buffer)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no card here")
@pytest.mark.parametrize("n_step", [1, 4])
def test_samples_on_a_gpu_are_those_of_the_buffer(n_step):
    world = World(2, 8, np.random.default_rng(n_step), 0.2, observation_size=17, action_size=6)
    buffer = buffer_for(world, 20_000, n_step=n_step)
    made = DeviceReplay(buffer, torch.device("cuda:0"))
    for steps in (3, 700, 500, 400, 1):
        buffer.add(world.iteration(steps), {})
        made.send_new()
        assert_same_bytes(made, buffer)


@small_parts
@few_rows
@quick
@given(worlds(), st.integers(1, 40), iterations, iterations, st.integers(1, 3))
def test_a_state_that_the_buffer_loads_replaces_all_transitions(
    world, capacity, iterations, later, n_step
):
    whole = buffer_for(world, capacity, n_step=n_step)
    for steps in iterations:
        whole.add(world.iteration(steps), {})
    fresh, other = (buffer_for(world, capacity, n_step=n_step) for _ in range(2))
    copies = DeviceReplay(fresh, CPU), DeviceReplay(other, CPU)
    # The other buffer has transitions of the same number, or more, before it loads the state.
    other.add(world.iteration(sum(iterations) + 3), {})
    copies[1].send_new()
    for buffer, made in zip((fresh, other), copies, strict=True):
        buffer.load_state(whole.get_state(), whole.list_segments())
        made.send_new()
        assert_same_bytes(made, whole)
    for steps in later:
        fragments = world.iteration(steps)
        for buffer in (whole, fresh, other):
            buffer.add(fragments, {})
        for made in copies:
            made.send_new()
            assert_same_bytes(made, whole)


def test_each_transition_is_sent_once_and_the_latest_row_again():
    world = World(1, 2, np.random.default_rng(0))
    buffer = buffer_for(world, 100)
    made = DeviceReplay(buffer, CPU)
    with mock.patch.object(buffer, "copy_steps", wraps=buffer.copy_steps) as copy:
        for _ in range(3):
            buffer.add(world.iteration(4), {})
            made.send_new()
    assert [call.args[:2] for call in copy.call_args_list] == [(0, 8), (6, 16), (14, 24)]


@small_parts
def test_the_memory_of_a_copy_is_filled_again_only_after_it(monkeypatch):
    calls = []
    event = mock.Mock()
    event.synchronize.side_effect = lambda: calls.append("wait")
    event.record.side_effect = lambda stream: calls.append(f"record on {stream}")
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "stream")
    world = World(1, 2, np.random.default_rng(0))
    buffer = buffer_for(world, 100)
    made = DeviceReplay(buffer, CPU)
    made._copy = event
    whole = buffer.copy_steps
    monkeypatch.setattr(buffer, "copy_steps", lambda *a: calls.append("write") or whole(*a))
    buffer.add(world.iteration(4), {})
    made.send_new()
    # Eight transitions are sent in two parts.
    assert calls == ["wait", "write", "record on stream"] * 2


def test_next_observations_are_those_of_the_next_row_even_if_an_environment_reports_others():
    world = World(1, 2, np.random.default_rng(0), ends=0.0)
    buffer = buffer_for(world, 100)
    made = DeviceReplay(buffer, CPU)
    first, second = world.iteration(4), world.iteration(4)
    second[0].observations[0] += 1000.0
    for fragments in (first, second):
        buffer.add(fragments, {})
        made.send_new()
        assert_same_bytes(made, buffer)


def test_negative_zeros_remain_negative():
    world = World(1, 2, np.random.default_rng(0), ends=0.3)
    buffer = buffer_for(world, 100, n_step=3)
    made = DeviceReplay(buffer, CPU)
    fragments = world.iteration(20)
    fragments[0].rewards[:] = -0.0
    buffer.add(fragments, {})
    made.send_new()
    assert np.signbit(on_device(made, 0)["rewards"]).all()
    assert_same_bytes(made, buffer)


def test_the_table_does_not_move_or_grow():
    """A captured graph reads from its address."""
    world = World(1, 2, np.random.default_rng(0))
    buffer = buffer_for(world, 10)
    made = DeviceReplay(buffer, CPU)
    address = made._table.data_ptr()
    for _ in range(5):
        buffer.add(world.iteration(7), {})
        made.send_new()
    assert made._table.data_ptr() == address
    assert made._table.nbytes == count_replay_bytes(buffer.shape)


def test_bytes_are_those_of_both_observations_the_action_and_three_numbers():
    shape = ReplayShape(1_000_000, 8, 17, 6)
    assert count_replay_bytes(shape) == 4 * 1_000_000 * (17 + 17 + 6 + 3)


@pytest.mark.parametrize(
    ("free", "total", "left"),
    [(20e9, 80e9, 12e9), (6e9, 8e9, 6e9 - 2**30), (1e9, 8e9, 0)],
)
def test_a_part_of_a_gpus_memory_stays_free(free, total, left, monkeypatch):
    """A tenth, but at least 1 GiB."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (int(free), int(total)))
    assert measure_free_bytes(torch.device("cuda:0")) == left
