"""Keeps the policies of a fleet in the object cache while they are in use."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections import Counter
from collections.abc import Sequence

from rlflame.errors import FleetError
from rlflame.fleet.base import TrafficMeter, make_policy_id
from rlflame.rollout import wire
from rlflame.rollout.task import PolicyArrays

from . import object_cache
from .object_cache import Reference


class PolicyStore:
    """Stores each policy in the object cache when a task first needs the policy."""

    def __init__(self, prefix: str, meter: TrafficMeter) -> None:
        self.deleter = DeferredDeleter()
        self._prefix = prefix
        self._meter = meter
        self._lock = threading.Lock()
        self._put_lock = threading.Lock()
        self._contents: dict[str, bytes] = {}
        self._references: dict[str, Reference] = {}
        self._uses: Counter[str] = Counter()

    def put(self, policy: PolicyArrays) -> str:
        policy_id = make_policy_id(policy)
        with self._lock:
            if policy_id not in self._contents:
                self._contents[policy_id] = wire.encode({"id": policy_id, "arrays": dict(policy)})
            self._uses[policy_id] += 1
        return policy_id

    def keep(self, policy_ids: Sequence[str]) -> None:
        """Count another use of each policy, so that its weights are not released."""
        with self._lock:
            for policy_id in policy_ids:
                if policy_id not in self._contents:
                    raise KeyError(policy_id)
            self._uses.update(policy_ids)

    def release(self, policy_id: str) -> None:
        with self._lock:
            self._uses[policy_id] -= 1
            if self._uses[policy_id] > 0:
                return
            del self._uses[policy_id]
            self._contents.pop(policy_id, None)
            reference = self._references.pop(policy_id, None)
        if reference is not None:
            self.deleter.delete(reference.key)

    def find_reference(self, policy_id: str) -> Reference:
        """Return a policy's location; store the policy in the cache if necessary."""
        with self._put_lock:
            with self._lock:
                reference = self._references.get(policy_id)
                content = self._contents.get(policy_id)
            if reference is not None:
                return reference
            if content is not None:
                reference = object_cache.put(self._prefix, content)
                self._meter.count_sent(len(content))
                with self._lock:
                    if policy_id in self._contents:
                        self._references[policy_id] = reference
                        return reference
                self.deleter.delete(reference.key)  # the policy was released in the meantime
            raise FleetError("The weights of this task were released.")

    def forget_reference(self, policy_id: str, reference: Reference | None) -> None:
        """Forget the location of a policy, because a worker found no weights there.

        This has no effect if `reference` is no longer the policy's current location.
        """
        with self._lock:
            if reference is None or self._references.get(policy_id) != reference:
                return
            del self._references[policy_id]
        self.deleter.delete(reference.key)  # the object exists if the cache was only unreachable


class DeferredDeleter:
    """Deletes objects from the cache in a thread, so that callers need not wait."""

    def __init__(self) -> None:
        self._keys: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="rlflame-sweep", daemon=True)
        self._thread.start()

    def delete(self, key: str) -> None:
        self._keys.put(key)

    def close(self) -> None:
        self._keys.put(None)
        self._thread.join(timeout=5.0)

    def _run(self) -> None:
        while (key := self._keys.get()) is not None:
            with contextlib.suppress(Exception):  # remaining objects are deleted with the run
                object_cache.delete(key)
