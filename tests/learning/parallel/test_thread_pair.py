"""A thread pair runs two lanes, in Python or in compiled code, in one thread or in two."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
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


def list_threads() -> set[str]:
    return set(os.listdir("/proc/self/task"))


def make_steps() -> tuple[np.ndarray, list[AdamFields]]:
    """The weights of two lanes, and a step of Adam for each of them."""
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
    steps[0].arrays = gradient, moments  # kept alive
    return weights, steps


def run_steps(thread_pair: ThreadPair, steps: list[AdamFields]) -> None:
    addresses = [*map(ctypes.addressof, steps)]
    load_kernels().run_lanes(thread_pair.helper, "step_adam", addresses)


@needs_kernels
@pytest.mark.parametrize("pause_s", [0.0, 0.05])  # the helper sleeps after about half a millisecond
def test_the_helper_runs_all_work(pause_s):
    thread_pair = ThreadPair(2)
    weights, steps = make_steps()
    for number in range(4 if pause_s else 2_000):
        run_steps(thread_pair, steps)
        assert weights[0].tobytes() == weights[1].tobytes()
        assert number or weights[0, 0] < 0.0
        time.sleep(pause_s)


@needs_kernels
@pytest.mark.parametrize("uses_python", [False, True])
@pytest.mark.skipif(not os.path.exists("/proc/self/task"), reason="needs /proc")
def test_a_thread_pair_that_is_deleted_leaves_no_thread(uses_python):
    before = list_threads()
    thread_pair = ThreadPair(2)
    if uses_python:
        thread_pair.run(lambda lane: None)
    else:
        assert thread_pair.helper
    (thread,) = list_threads() - before
    del thread_pair
    end = time.monotonic() + 20.0
    while thread in list_threads() and time.monotonic() < end:
        time.sleep(0.01)  # the kernel may list a thread for a moment after its end
    assert thread not in list_threads()


def test_one_thread_needs_no_helper():
    assert ThreadPair(1).helper is None


@needs_kernels
def test_several_threads_can_use_a_thread_pair():
    thread_pair, results = ThreadPair(2), []

    def run() -> None:
        weights, steps = make_steps()
        for _ in range(500):
            run_steps(thread_pair, steps)
        results.append(weights.tobytes())

    threads = [threading.Thread(target=run, daemon=True) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
    assert len(results) == 3
    assert len(set(results)) == 1


@pytest.mark.parametrize("threads", [1, 2])
def test_an_exception_of_a_signal_handler_leaves_a_pair_that_works(threads):
    thread_pair, ran = ThreadPair(threads), []

    def interrupt(*_: object) -> None:
        raise InterruptedError

    thread_pair.run(lambda lane: None)  # from now on, there is a second thread
    previous = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    try:
        with pytest.raises(InterruptedError):
            thread_pair.run(lambda lane: time.sleep(0.3 * lane))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, previous)

    def append(lane: int) -> None:
        time.sleep(0.5 * lane)
        ran.append(lane)

    thread_pair.run(append)
    assert sorted(ran) == [0, 1]


@needs_kernels
def test_a_forked_process_can_use_a_thread_pair():
    thread_pair = ThreadPair(2)
    weights, steps = make_steps()

    def use() -> None:
        thread_pair.run(lambda lane: None)
        run_steps(thread_pair, steps)

    use()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            signal.alarm(30)
            use()
            code = 0 if weights[0].tobytes() == weights[1].tobytes() else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


@needs_kernels
def test_a_process_can_end_while_a_thread_uses_a_thread_pair():
    script = """
import threading, time
from test_thread_pair import ThreadPair, make_steps, run_steps

thread_pair, (_, steps) = ThreadPair(2), make_steps()
def run():
    while True:
        run_steps(thread_pair, steps)
threading.Thread(target=run, daemon=True).start()
time.sleep(0.1)
"""
    path = os.pathsep.join([os.path.dirname(__file__), os.environ.get("PYTHONPATH", "")])
    for _ in range(3):
        result = subprocess.run(
            [sys.executable, "-c", script], env={**os.environ, "PYTHONPATH": path}, timeout=60
        )
        assert result.returncode == 0
