"""The policies of a fleet on a cluster: who uses them, and where they are in the object cache."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence

from rlflame.errors import FleetError
from rlflame.fleet.base import TrafficMeter, make_policy_id
from rlflame.rollout import wire
from rlflame.rollout.task import PolicyArrays

from . import object_cache
from .object_cache import DeferredDeleter, Reference


class PolicyStore:
    """Puts each policy into the cache once, when a task first needs it."""

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
        """Count one more use of each, so that a release never takes weights from a submission."""
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
        self._delete(reference)

    def find_reference(self, policy_id: str) -> Reference:
        """Where the policy is in the cache; the first caller puts it there."""
        with self._put_lock:
            with self._lock:
                reference, content = (
                    self._references.get(policy_id),
                    self._contents.get(policy_id),
                )
            if reference is not None:
                return reference
            if content is None:
                raise FleetError("Nobody holds these weights any more.")
            reference = object_cache.put(self._prefix, content)
            self._meter.count_sent(len(content))
            with self._lock:
                is_held = policy_id in self._contents
                if is_held:
                    self._references[policy_id] = reference
            if not is_held:  # released meanwhile
                self._delete(reference)
                raise FleetError("Nobody holds these weights any more.")
            return reference

    def forget_reference(self, policy_id: str, reference: Reference | None) -> None:
        """A worker did not find the weights there; by now they may be elsewhere."""
        with self._lock:
            if self._references.get(policy_id) != reference:
                return
            self._references.pop(policy_id, None)
        self._delete(reference)  # the cache may only have been away

    def _delete(self, reference: Reference | None) -> None:
        if reference is not None:
            self.deleter.delete(reference.key)
