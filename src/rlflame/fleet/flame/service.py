"""The service on a Flame executor, which runs tasks in a child process.

An environment that crashes, hangs or runs out of memory ends only the child, and the service
reports the failure in its answer. The service must never die: Flame would fail every task of the
executor until the supervisor has restarted the service.
"""

from __future__ import annotations

import contextlib
import io
import os
import socket
import threading
import time
import traceback
import uuid
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import numpy as np

import rlflame
from rlflame.fleet.flame.object_cache import make_array, read_lease, read_object, view_array
from rlflame.rollout import blas, wire
from rlflame.rollout.envs import user_code
from rlflame.rollout.process.channel import MessageKind, ProtocolError
from rlflame.rollout.process.worker_process import WorkerProcess, describe_exit

#: An answer's `kind` (result, broken, died, hung, no_policy or cancelled), and its details.
Answer = dict[str, Any]
#: The interval at which a running task is checked. A message or the child's end is noticed at once.
_TICK_S = 1.0
_START_DEADLINE_S = 120.0
_MAX_POLICIES = 4
#: The interval at which a running task checks whether its run is still alive.
_LEASE_INTERVAL_S = 2.0
#: A run whose lease has not changed for this long is dead.
_LEASE_DEADLINE_S = 90.0
#: A process that exists for this long after the end of its run has lost its executor manager.
_ORPHAN_S = 900.0
_ORPHAN_CHECK_INTERVAL_S = 30.0


class Service:
    """Runs tasks one after another in a child process."""

    def __init__(
        self,
        *,
        core: str,
        step_deadline_s: float,
        lease: Mapping[str, str],
        env_file: str | None = None,
        delay_release_s: float = 0.0,
    ) -> None:
        self._environment = blas.make_child_environment(core=core)
        if env_file is not None:  # the file was unpacked next to the package
            root = os.path.dirname(os.path.dirname(rlflame.__file__))
            self._environment[user_code.FILE_VARIABLE] = os.path.join(root, env_file)
        self._step_deadline_s = step_deadline_s
        self._lease_reference = lease
        self._lease = _LeaseReader(lease)
        self._child: WorkerProcess | None = None
        self._hello: dict[str, Any] = {}
        self._policies: OrderedDict[str, None] = OrderedDict()
        self._name = uuid.uuid4().hex[:8]
        #: The time at which the child was ready. Its startup does not count as task time.
        self._started_at = 0.0
        self._orphan_s = _ORPHAN_S + 2.0 * delay_release_s
        #: Whether the run has ended. Queued tasks are then not run.
        self._has_run_ended = False
        _limit_object_cache()
        threading.Thread(
            target=self._exit_when_orphaned, name="rlflame-orphan", daemon=True
        ).start()

    def _exit_when_orphaned(self) -> None:
        """End this process if its executor manager has died. Nothing else would end it."""
        lease, over_since = _LeaseReader(self._lease_reference), None
        while True:
            time.sleep(_ORPHAN_CHECK_INTERVAL_S)
            if not lease.is_over():
                over_since = None
                continue
            over_since = over_since or time.monotonic()
            if time.monotonic() - over_since > self._orphan_s:
                self._close_child()
                os._exit(0)  # with this exit code, the supervisor does not restart it

    def run(self, tasks: Any, policy: str, endpoint: str, key: str) -> Any:
        """Run encoded tasks and return encoded answers, even for tasks that fail.

        `tasks` is a file in memory if it was sent with the call, or an Arrow array if it was sent
        through the cache.
        """
        self._lease = _LeaseReader(self._lease_reference)
        content = tasks.getbuffer() if isinstance(tasks, io.BytesIO) else view_array(tasks)
        answers = [
            self._make_answer(bytes(task), policy, endpoint, key)
            for task in wire.decode(content)["tasks"]
        ]
        worker = {
            **self._hello, "name": self._name, "host": socket.gethostname(), "pid": os.getpid(),
            "child": self._child.pid if self._child else 0,
        }  # fmt: skip
        return make_array(wire.encode({"worker": worker, "answers": answers}))

    def _make_answer(self, task: bytes, policy: str, endpoint: str, key: str) -> Answer:
        self._started_at = time.monotonic()
        try:
            answer = self._run_task(task, policy, endpoint, key)
        except BaseException as error:  # e.g. out of memory: another worker may succeed
            cause = f"failed with {type(error).__name__}: {error}"
            answer = {"kind": "died", "how": cause, "printed": traceback.format_exc()}
            self._close_child()
        busy_s = time.monotonic() - self._started_at
        return {"body": np.empty(0, np.uint8), **answer, "busy_s": busy_s}

    def _run_task(self, task: bytes, policy: str, endpoint: str, key: str) -> Answer:
        if self._has_run_ended:
            return {"kind": "cancelled"}
        child = self._ensure_child()
        if child is None:
            return self._make_death_answer(None)
        self._started_at = time.monotonic()
        if policy not in self._policies:
            weights = _fetch_policy(endpoint, key)
            if weights is None:
                return {"kind": "no_policy"}
            child.channel.send_bytes(MessageKind.POLICY, weights)
        self._policies[policy] = None
        self._policies.move_to_end(policy)
        while len(self._policies) > _MAX_POLICIES:
            old, _ = self._policies.popitem(last=False)
            child.channel.send(MessageKind.FORGET, {"id": old})
        child.channel.send_bytes(MessageKind.TASK, task)
        return self._wait_for_answer(child)

    def _wait_for_answer(self, child: WorkerProcess) -> Answer:
        """Wait until the child answers, dies or hangs, or until the run ends."""
        position: list[int] | None = None
        moved_at = time.monotonic()
        while True:
            limit_s = max(0.0, moved_at + self._step_deadline_s - time.monotonic())
            try:
                message = child.channel.receive(min(_TICK_S, limit_s))
                if message.kind is MessageKind.RESULT:
                    body = np.frombuffer(message.payload, np.uint8)
                    return {"kind": "result", "body": body, "printed": child.read_output()}
                value = message.value
            except TimeoutError:
                pass
            except (EOFError, ProtocolError) as error:
                return self._make_death_answer(position, child.explain_loss(error))
            else:
                if message.kind is MessageKind.BROKEN:
                    return {"kind": "broken", **value, "printed": child.read_output()}
                new_position = [value["slot"], value["row"], value["seed"], value["step"]]
                if new_position != position:
                    position, moved_at = new_position, time.monotonic()
            if child.has_exited and not child.channel.poll():
                return self._make_death_answer(position)
            now = time.monotonic()
            child.trim_output()
            if now - moved_at > self._step_deadline_s:
                answer = {"kind": "hung", "position": position, "printed": child.read_output()}
                self._close_child()
                return answer
            if self._lease.is_due(now) and self._lease.is_over():
                # Only an announced end is final. A silent run may renew its lease again.
                self._has_run_ended = self._lease.closing
                self._close_child()
                return {"kind": "cancelled"}

    def _ensure_child(self) -> WorkerProcess | None:
        """Return the child, started if necessary, or None if it does not start."""
        if self._child is not None and not self._child.has_exited:
            return self._child
        self._close_child()
        child = self._child = WorkerProcess(environment=self._environment)
        deadline = time.monotonic() + _START_DEADLINE_S
        while time.monotonic() < deadline and not child.has_exited:
            try:
                self._hello = child.channel.receive(_TICK_S).value
                return child
            except TimeoutError:
                continue
            except (EOFError, ProtocolError) as error:
                child.explain_loss(error)
        return None

    def _make_death_answer(self, position: list[int] | None, cause: str = "") -> Answer:
        child = self._child
        assert child is not None
        code = child.terminate(grace_s=0.0 if not child.has_exited else 1.0)
        output = child.read_output()
        self._close_child()
        cause = cause or describe_exit(code)
        return {"kind": "died", "how": cause, "position": position, "printed": output}

    def _close_child(self) -> None:
        if self._child is not None:
            self._child.terminate()
        self._child = None
        self._policies.clear()


class _LeaseReader:
    """Reads the lease of a run, and detects the end of the run."""

    def __init__(self, reference: Mapping[str, str]) -> None:
        self._reference = reference
        self._beat: int | None = None
        self._changed_at = self._checked_at = time.monotonic()
        self.closing = False

    def is_due(self, now: float) -> bool:
        """Return whether it is time to read the lease again."""
        if now - self._checked_at < _LEASE_INTERVAL_S:
            return False
        self._checked_at = now
        return True

    def is_over(self) -> bool:
        """Return whether the run has announced its end or its lease has expired."""
        now = time.monotonic()
        contents = None
        with contextlib.suppress(Exception):  # an unreachable cache counts as no renewal
            contents = read_lease(**self._reference)
        if contents is not None:
            if contents["closing"]:
                self.closing = True
                return True
            if contents["beat"] != self._beat:
                self._beat, self._changed_at = contents["beat"], now
        return now - self._changed_at > _LEASE_DEADLINE_S


def _fetch_policy(endpoint: str, key: str) -> bytes | None:
    """Return an encoded policy from the cache, or None if it cannot be read."""
    try:
        return bytes(read_object(endpoint, key))
    except Exception:  # deleted, or the cache is unreachable: the driver retries the task
        return None


def _limit_object_cache() -> None:
    """Limit flamepy's in-process cache, which keeps 1,000 objects by default."""
    from flamepy.core import cache

    cache._CACHE_MAX_SIZE = 2
