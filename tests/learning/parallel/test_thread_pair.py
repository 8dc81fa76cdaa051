"""A thread pair runs two lanes, in Python or in compiled code, in one thread or in two."""

from __future__ import annotations

import ctypes
import gc
import os
import time
import warnings

import numpy as np
import pytest

from rlflame.learning.kernels.library import AdamFields, get_address, load_kernels
from rlflame.learning.parallel.thread_pair import LANES, ThreadPair, slice_half

needs_kernels = pytest.mark.skipif(load_kernels() is None, reason="the kernels were not compiled")


def test_the_halves_cover_all_items():
    for size in range(12):
        parts = [list(range(size))[slice_half(size, lane)] for lane in range(LANES)]
        assert [*parts[0], *parts[1]] == list(range(size))


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("failing", range(LANES))
def test_an_exception_in_a_lane_is_raised_and_the_next_work_runs(threads, failing):
    thread_pair, ran = ThreadPair(threads), []

    def work(lane: int) -> None:
        if lane == failing:
            raise ValueError(f"lane {lane}")

    with pytest.raises(ValueError, match=f"lane {failing}"):
        thread_pair.run(work)
    thread_pair.run(ran.append)
    assert sorted(ran) == [0, 1]


@pytest.mark.parametrize("threads", [1, 2])
def test_both_lanes_use_the_error_handling_of_the_caller(threads):
    thread_pair, large = ThreadPair(threads), np.full(3, 1e38, np.float32)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with np.errstate(over="ignore"):
            thread_pair.run(lambda lane: np.multiply(large, large))
        assert not caught
        thread_pair.run(lambda lane: np.multiply(large, large) if lane else None)
        assert [str(one.message) for one in caught] == ["overflow encountered in multiply"]


def count_threads() -> int:
    return len(os.listdir("/proc/self/task"))


@needs_kernels
@pytest.mark.parametrize("pause_s", [0.0, 0.05])  # the helper sleeps after about a millisecond
def test_the_helper_runs_all_work(pause_s):
    kernels, thread_pair = load_kernels(), ThreadPair(2)
    assert thread_pair.helper
    weights = np.zeros((LANES, 8), np.float32)
    gradient, moments = np.ones(8, np.float32), np.zeros((LANES, 2, 8), np.float32)
    steps = [
        AdamFields(
            parameters=get_address(weights[lane]),
            gradient=get_address(gradient),
            first=get_address(moments[lane, 0]),
            second=get_address(moments[lane, 1]),
            count=8,
            to_first=0.5,
            to_second=0.5,
            rate=1.0,
        )
        for lane in range(LANES)
    ]
    for number in range(4 if pause_s else 2_000):
        kernels.run_lanes(thread_pair.helper, "step_adam", [*map(ctypes.addressof, steps)])
        assert weights[0].tobytes() == weights[1].tobytes()
        assert number or weights[0, 0] < 0.0
        time.sleep(pause_s)


@needs_kernels
@pytest.mark.skipif(not os.path.exists("/proc/self/task"), reason="needs /proc")
def test_a_thread_pair_that_is_deleted_leaves_no_thread():
    gc.collect()
    before = count_threads()
    thread_pair = ThreadPair(2)
    assert count_threads() == before + 1
    del thread_pair
    gc.collect()
    assert count_threads() == before


def test_one_thread_needs_no_helper():
    assert ThreadPair(1).helper is None
