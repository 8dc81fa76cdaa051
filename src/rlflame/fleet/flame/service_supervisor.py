"""Replaces `flamepy.runner.runpy` on an executor, and restarts a dead service.

Flame does not replace a dead worker process: its executor would fail all tasks and could never be
released. This parent process therefore forks the service again, and the new process resumes the
session. The module is sent as text for `python -c`, so it must not import another module of
rlflame. It must not contain a dollar sign either, because Flame expands variables in arguments.
"""

import base64
import ctypes
import json
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from typing import Any

#: The supervisor gives up after this many consecutive deaths within `LONG_LIFE_S` of a start.
ATTEMPTS = 30
LONG_LIFE_S = 60.0
#: The interval at which a service without a session checks whether its executor manager is alive.
CHECK_S = 30.0
#: From linux/prctl.h.
PR_SET_PDEATHSIG = 1


def main() -> None:
    instance = os.path.basename(os.environ.get("FLAME_INSTANCE_ENDPOINT", "instance"))
    record_path = os.path.join(os.getcwd(), instance + ".session")
    if os.path.exists(record_path):
        os.remove(record_path)
    # Temporary files of the service and its children are deleted when this process ends.
    folder = tempfile.mkdtemp(prefix="rlflame-")
    os.environ["TMPDIR"] = folder
    tempfile.tempdir = None
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        watch(record_path)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def watch(record_path: str) -> None:
    """Fork the service, and fork it again if it dies.

    A signal to the process group reaches both processes.
    """
    deaths = 0
    while deaths < ATTEMPTS:
        started_at, supervisor = time.monotonic(), os.getpid()
        child_pid = os.fork()
        if child_pid == 0:
            die_with(supervisor)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            serve(record_path)
            os._exit(0)
        _, status = os.waitpid(child_pid, 0)
        if os.WIFEXITED(status) and os.WEXITSTATUS(status) == 0:
            return
        if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGTERM:
            return
        deaths = 0 if time.monotonic() - started_at > LONG_LIFE_S else deaths + 1
        if deaths > 1:
            time.sleep(0.5)
    sys.exit(1)


def die_with(supervisor: int) -> None:
    """Make this process end when its supervisor ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != supervisor:
            os._exit(1)


def serve(record_path: str) -> None:
    """Answer Flame's calls until the process is terminated."""
    from flamepy.core import service as core
    from flamepy.runner import runpy
    from grpc import _common

    # gRPC's main thread would wake up ten times a second.
    _common.MAXIMUM_WAIT_TIMEOUT = 60.0
    start_event = threading.Event()

    class SessionRecorder(runpy.FlameRunpyService):  # type: ignore[misc]
        def on_session_enter(self, context: Any) -> bool:
            start_event.set()
            has_entered = bool(super().on_session_enter(context))
            data = base64.b64encode(context.common_data() or b"").decode()
            with open(record_path + ".new", "w") as file:
                json.dump([data, context.session_id, context.application.name], file)
            os.replace(record_path + ".new", record_path)
            return has_entered

        def on_session_leave(self) -> bool:
            if os.path.exists(record_path):
                os.remove(record_path)
            return bool(super().on_session_leave())

    threading.Thread(target=exit_without_manager, args=(start_event,), daemon=True).start()
    runpy._setup_logging()
    service = SessionRecorder()
    if os.path.exists(record_path):
        with open(record_path) as file:
            data, session_id, name = json.load(file)
        application = core.ApplicationContext(name=name)
        context = core.SessionContext(base64.b64decode(data), session_id, application)
        service.on_session_enter(context)
    core.run(service)


def exit_without_manager(start_event: threading.Event) -> None:
    """End this process if its executor manager dies before a session starts.

    From then on, the service of the session ends the process.
    """
    ancestors = list_ancestors()
    while not start_event.wait(CHECK_S):
        if list_ancestors() != ancestors:
            os._exit(0)  # with this exit code, the supervisor ends, too


def list_ancestors() -> list[int]:
    """Return the parent of the supervisor and its parent: `uv run` and the executor manager."""
    pids = [os.getppid()]
    try:
        for _ in range(2):
            with open(f"/proc/{pids[-1]}/stat") as file:
                pids.append(int(file.read().rpartition(")")[2].split()[1]))
    except OSError:  # one of them has just ended, or this system has no /proc
        return []
    return pids[1:]


if __name__ == "__main__":
    main()
