"""The life of an executor, with a thread each: idle, binding, bound, unbinding.

This module uses the state, the installer and the worker process. It does not know the clients.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import grpc
from flamepy.proto import shim_pb2
from flamepy.proto import types_pb2 as pb

from flame_stub.install import Installer, InstallFailed
from flame_stub.records import Application, Executor, Task
from flame_stub.rules import Refused, internal
from flame_stub.state import State
from flame_stub.worker import START_TIMEOUT_S, Worker, WorkerDied

INSTALL_FAILED, CREATE_FAILED, ENTER_FAILED = 10, 11, 12
LEAVE_TIMEOUT_S = 5.0
RPC_ERRORS = (grpc.RpcError, grpc.FutureCancelledError)


class Gone(Exception):
    """The executor was deleted while its thread was running."""


class Life(threading.Thread):
    """Runs one executor until it is not needed, its node is lost, or the stub closes."""

    def __init__(
        self,
        executor: Executor,
        state: State,
        installer: Installer,
        root: Path,
        endpoints: Callable[[], dict[str, str]],
        keep_log: Callable[[str, str], None],
    ) -> None:
        super().__init__(name=f"flame-executor-{executor.id[:8]}", daemon=True)
        self.executor = executor
        self._state = state
        self._installer = installer
        self._root = root
        self._endpoints = endpoints
        self._keep_log = keep_log
        self.worker: Worker | None = None

    def run(self) -> None:
        try:
            self._live()
        except Gone:
            pass
        finally:
            self._end_worker()
            if not self.executor.gone:
                self._state.drop(self.executor)

    def _live(self) -> None:
        self._pause(lambda: not self.executor.stuck)
        self._enter(pb.ExecutorIdle)
        while self._state.claim(self.executor):
            if self._bind():
                self._serve()
            self._enter(pb.ExecutorUnbinding)
            if not self._leave():
                if self._state.faults.black_hole:
                    self._pause(lambda: False)  # Flame keeps calling the dead worker.
                return
            self._enter(pb.ExecutorIdle)

    def _pause(self, until: Callable[[], bool], timeout_s: float | None = None) -> bool:
        """Wait for a condition or a time. Ends the thread if the executor is deleted."""
        with self._state.lock:
            deadline = None if timeout_s is None else time.monotonic() + timeout_s
            while not self.executor.gone:
                if until():
                    return True
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    return False
                self._state.changed.wait(left)
            raise Gone

    def _enter(self, state: int) -> None:
        with self._state.lock:
            if self.executor.gone:
                raise Gone
            self.executor.state = state
            self._state.settle()

    # Called by other threads

    def kill(self, number: int) -> None:
        worker = self.worker
        if worker is not None:
            worker.kill(number)

    def stop(self) -> None:
        """End the worker in any state, and wait for the thread of a deleted executor."""
        with self._state.lock:
            worker = self.worker
        if worker is not None:
            worker.end(signal.SIGKILL)
        self.join()

    def log(self) -> str:
        worker = self.worker
        return worker.log() if worker is not None else ""

    # Binding

    def _bind(self) -> bool:
        """Install, start, enter the session. A failure is an event of the session."""
        self._state.pause("cold_start_s")
        code = INSTALL_FAILED
        try:
            application = self._state.application(self.executor.session.spec.application)
            if self._state.faults.bind_failure:
                code = ENTER_FAILED
                raise internal(self._state.faults.bind_failure)
            variables = self._installer.variables(application) | self._endpoints()
            code = CREATE_FAILED
            self._start_worker(application, variables)
            code = ENTER_FAILED
            self._enter_session(application)
        except (OSError, InstallFailed, WorkerDied, Refused, *RPC_ERRORS) as error:
            if isinstance(error, WorkerDied) and self._state.faults.black_hole:
                self._pause(lambda: False)  # Flame waits forever for the socket.
            what = {
                INSTALL_FAILED: "application installation failed",
                CREATE_FAILED: "shim creation failed",
                ENTER_FAILED: "on_session_enter failed",
            }[code]
            self._state.bind_failed(self.executor, code, f"{what}: {text_of(error)}")
            return False
        self._enter(pb.ExecutorBound)
        return True

    def _start_worker(self, application: Application, variables: dict[str, str]) -> None:
        name = self.executor.id
        folder = self._root / "executors" / name
        socket = self._root / "s" / f"{name}.sock"
        with self._state.lock:
            if self.executor.gone:
                raise Gone
            self.worker = Worker(folder, socket, name, application.spec.working_directory or None)
        self.worker.start(application.name, application.python_arguments, variables)
        self.executor.pid = self.worker.pid
        self.worker.wait_until_listening()

    def _enter_session(self, application: Application) -> None:
        assert self.worker is not None
        spec, session = application.spec, self.executor.session
        context = shim_pb2.ApplicationContext(name=application.name, shim=spec.shim)
        for field in ("image", "command", "working_directory", "url", "installer"):
            if spec.HasField(field):
                setattr(context, field, getattr(spec, field))
        request = shim_pb2.SessionContext(session_id=session.id, application=context)
        if session.spec.HasField("common_data"):
            request.common_data = session.spec.common_data
        result = self.worker.call("OnSessionEnter", request, START_TIMEOUT_S)
        if result.return_code:
            raise internal(result.message)

    # Bound

    def _serve(self) -> None:
        """Run tasks until there are none for delay_release or the worker is dead."""
        while task := self._next_task():
            if self._state.faults.take("cancel_tasks"):
                self._state.finish(self.executor, pb.Cancelled, None, "")
            elif self._state.faults.take("fail_tasks"):
                self._state.finish(self.executor, pb.Failed, None, self._state.faults.fail_text)
            elif not self._run(task) and not self._state.faults.black_hole:
                return

    def _next_task(self) -> Task | None:
        found: list[Task] = []

        def look() -> bool:
            if not self._state.online:
                return False
            task = self._state.take_task(self.executor)
            found.extend([task] if task else [])
            return bool(task) or self.executor.session.state != pb.Open or self.executor.let_go

        with self._state.lock:
            self.executor.let_go = False
            application = self._state.applications.get(self.executor.session.spec.application)
            self._pause(look, application.delay_release_s if application else 0.0)
        return found[0] if found else None

    def _run(self, task: Task) -> bool:
        """Run one task. Returns False if the worker is dead."""
        assert self.worker is not None
        request = shim_pb2.TaskContext(task_id=str(task.id), session_id=task.session.id)
        if task.input is not None:
            request.input = task.input
        try:
            result = self.worker.call("OnTaskInvoke", request)
        except RPC_ERRORS as error:
            self._finish(pb.Failed, None, text_of(error))
            return False
        if result.return_code:
            self._finish(pb.Failed, None, result.message)
        else:
            output = result.output if result.HasField("output") else None
            forge = self._state.faults.forge_output
            if forge is not None and output is not None:
                session = task.session
                output = forge(f"{session.spec.application}/{session.id}", output)
            self._finish(pb.Succeed, output, "")
        return True

    def _finish(self, state: int, output: bytes | None, text: str) -> None:
        with self._state.lock:
            self._pause(lambda: self._state.online)
            self._state.finish(self.executor, state, output, text)

    # Unbinding

    def _leave(self) -> bool:
        """Leave the session and end the worker; False if the worker does not answer."""
        answered = True
        if self.worker is not None and self.worker.listening:
            try:
                self.worker.call("OnSessionLeave", pb.EmptyRequest(), LEAVE_TIMEOUT_S)
            except RPC_ERRORS:
                answered = False
        self._end_worker()
        return answered

    def _end_worker(self, first: int = signal.SIGTERM) -> None:
        worker, self.worker = self.worker, None
        self.executor.pid = None
        if worker is not None:
            self._keep_log(self.executor.id, worker.log())
            worker.end(first)


def text_of(error: Exception) -> str:
    if isinstance(error, Refused):
        return error.text
    if isinstance(error, grpc.RpcError):
        return f"status: {error.code().name}, message: {error.details()!r}"
    return str(error)
