"""The thread that keeps worker processes busy, and the calls that other threads make to it.

A caller that adds a job sends it to an idle worker itself: to wake the thread, which then waits for
the interpreter, takes longer than to send it.
"""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable, Iterable, Sequence

from rlflame.errors import FleetError
from rlflame.rollout.process.channel import Message, MessageKind, ProtocolError, WakePipe, wait
from rlflame.rollout.process.worker_process import WorkerProcess

from .base import Observer, TrafficMeter, ignore_event
from .job_queue import FleetJob, JobQueue
from .retry_policy import decode_result, make_broken_worker_error
from .worker_pool import START_DEADLINE_S, PoolSettings, WorkerHandle, WorkerPool

_TICK_S = 0.2
#: For a thread that may or may not have begun when Ctrl-C came.
_INTERRUPT_WAIT_S = 2.0


class Dispatcher:
    """A pool of workers that work through jobs. Every public method is safe from any thread."""

    def __init__(
        self,
        settings: PoolSettings,
        *,
        observer: Observer,
        clock: Callable[[], float],
        meter: TrafficMeter,
        processes: Sequence[WorkerProcess] = (),
    ) -> None:
        self._observer = observer
        self._clock = clock
        self._meter = meter
        self._lock = threading.Lock()
        self._jobs = JobQueue()
        self._pool = WorkerPool(settings, self._jobs, meter, clock)
        self._closing = False
        self._wake_pipe = WakePipe()
        self._thread_done = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="rlflame-fleet", daemon=True)
        try:
            self._pool.start(processes)
            self._start_thread()
        except BaseException as error:
            self._dispose()
            if not isinstance(error, OSError | RuntimeError):
                raise
            message = f"{settings.workers} worker processes could not be started: {error}."
            raise FleetError(message, "try fewer --workers") from error

    def _start_thread(self) -> None:
        try:
            self._thread.start()
        except RuntimeError:  # it has not begun
            raise
        except BaseException:
            # Ctrl-C may have come while the thread began, which must not see its workers end.
            with self._lock:
                self._closing = True
            self._wake_pipe.wake()
            self._thread_done.wait(timeout=_INTERRUPT_WAIT_S)
            raise

    def add_policy(self, policy_id: str) -> None:
        """Workers may keep this policy once it was sent to them."""
        with self._lock:
            self._pool.policy_ids.add(policy_id)

    def forget_policy(self, policy_id: str) -> None:
        """Not urgent: it goes out with the next jobs, or at the next tick."""
        with self._lock:
            self._pool.policy_ids.discard(policy_id)
            self._pool.dropped_policy_ids.append(policy_id)

    def add(self, jobs: Iterable[FleetJob]) -> None:
        """Send each to an idle worker at once, if there is one; the iterator may still make others.

        Where Ctrl-C comes in between, the caller has nothing to wait for and must cancel them.
        """
        for job in jobs:
            with self._lock:
                was_empty = not self._jobs
                self._jobs.add([job])
                if was_empty and self._pool.final_error is None:
                    # No other caller's jobs, which Ctrl-C must not take along.
                    try:
                        self._pool.dispatch()
                    except BaseException:
                        # Before the thread replaces the worker and counts that as a failure.
                        self._jobs.cancel([job])
                        raise
        with self._lock:
            final_error = self._pool.final_error
            if final_error is not None:
                self._pool.fail_all(final_error)
        self._wake_pipe.wake()
        if final_error is not None:
            self._notify_observer()

    def cancel(self, jobs: Sequence[FleetJob]) -> None:
        with self._lock:
            self._jobs.cancel(jobs)
        self._wake_pipe.wake()

    def wait_for_greetings(self) -> list[dict[str, str]]:
        """What every worker runs on."""
        self._pool.all_greeted.wait(timeout=START_DEADLINE_S)
        with self._lock:
            if self._pool.final_error is not None:
                raise self._pool.final_error
            return [worker.hello for worker in self._pool.workers if worker.hello is not None]

    def list_pids(self) -> list[int]:
        with self._lock:
            return [worker.process.pid for worker in self._pool.workers]

    def close(self) -> None:
        with self._lock:
            if self._closing:
                return
            self._closing = True
            self._pool.fail_all(FleetError("The fleet was closed."))
        self._wake_pipe.wake()
        self._thread.join()
        self._notify_observer()
        self._dispose()

    def _dispose(self) -> None:
        self._pool.close()
        self._wake_pipe.close()

    def _notify_observer(self) -> None:
        """Call the observer without the lock: it may ask the fleet something in turn."""
        self._jobs.deliver_news(self._lock, self._observer)

    def _serve(self) -> None:
        """The life of the thread."""
        try:
            self._serve_until_closed()
        except Exception as error:  # an error for those who would otherwise wait for ever
            with self._lock:
                self._pool.fail_all(
                    FleetError(f"The dispatcher failed: {error!r}.", "", traceback.format_exc())
                )
            self._observer = ignore_event
            self._notify_observer()
        finally:
            self._thread_done.set()

    def _serve_until_closed(self) -> None:
        while not self._closing:
            worker_by_channel = {worker.process.channel: worker for worker in self._pool.workers}
            for channel in wait(worker_by_channel, _TICK_S, self._wake_pipe):
                self._receive(worker_by_channel[channel])
            for worker in [worker for worker in self._pool.workers if worker.process.has_exited]:
                # A program that it started may hold its pipe open, so that no end of file comes.
                self._receive(worker)
                with self._lock:
                    self._pool.handle_loss(worker)
            with self._lock:
                if not self._closing:
                    self._pool.check_workers()
                    self._pool.dispatch()
            self._notify_observer()

    def _receive(self, worker: WorkerHandle) -> None:
        try:
            for message in worker.process.channel.receive_all():
                self._handle_message(worker, message)
        except (EOFError, ProtocolError) as error:
            with self._lock:
                self._pool.handle_loss(worker, error)

    def _handle_message(self, worker: WorkerHandle, message: Message) -> None:
        if message.kind is MessageKind.RESULT:
            self._handle_result(worker, message.payload)
            return
        value = message.value
        if not isinstance(value, dict):
            raise ProtocolError("a frame without names")
        with self._lock:
            if message.kind is MessageKind.BEAT:
                position = (value["slot"], value["row"], value["seed"], value["step"])
                worker.update_position(position, self._clock())
            elif message.kind is MessageKind.HELLO:
                self._pool.greet(worker, value)
            elif message.kind is MessageKind.BROKEN and worker.job is not None:
                printed = worker.process.read_output()
                error = make_broken_worker_error(worker.job.task, value["traceback"], printed)
                self._jobs.finish(worker.job, error)
                worker.job = None

    def _handle_result(self, worker: WorkerHandle, payload: bytes) -> None:
        self._meter.count_received(len(payload))
        with self._lock:
            job, worker.job = worker.job, None
            # Send the next job before this thread spends time on the result.
            self._pool.dispatch()
        if job is None or job.ended:
            return
        outcome = decode_result(job.task, payload, worker.process.read_output)
        with self._lock:
            self._jobs.finish(job, outcome)
        self._notify_observer()
