"""The parent's view of a worker process."""

from __future__ import annotations

import os
import signal
import threading

from rlflame.rollout.process.worker_process import WorkerProcess


def test_a_dead_process_has_exited_also_while_another_thread_polls_it() -> None:
    process = WorkerProcess()
    popen, poll = process._process, process._process.poll
    is_polling, may_end = threading.Event(), threading.Event()
    answers = []

    def poll_slowly() -> int | None:
        with popen._waitpid_lock:  # `poll` itself holds this lock while it calls the system
            is_polling.set()
            may_end.wait()
        return poll()

    def ask() -> None:
        answers.append(process.has_exited)

    try:
        os.kill(process.pid, signal.SIGKILL)
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        popen.poll = poll_slowly
        threads = [threading.Thread(target=ask)]
        threads[0].start()
        is_polling.wait()
        popen.poll = poll
        threads.append(threading.Thread(target=ask))
        threads[1].start()
        threads[1].join(0.2)
        may_end.set()
        for thread in threads:
            thread.join()
    finally:
        may_end.set()
        process.terminate()
    assert answers == [True, True]
