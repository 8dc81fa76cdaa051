"""A run's lease: an object in the cache that changes while the run lives.

A reader that finds it unchanged twice knows that the run is dead, whatever the clocks of the two
machines say. Shipped to workers.
"""

from __future__ import annotations

import os
import socket
import threading
from typing import Any

from rlflame.rollout import wire

from .object_cache import make_array, read_object
from .timed_call import call_with_timeout

BEAT_INTERVAL_S = 5.0
_WRITE_S = 4.0


def make_key(application: str) -> str:
    return f"{application}/lease/lease"


def read(endpoint: str, key: str) -> dict[str, Any] | None:
    """The content of a lease; None if there is none. Raises what `read_object` raises."""
    try:
        content = read_object(endpoint, key)
    except KeyError:
        return None
    value: dict[str, Any] = wire.decode(content)
    return value


def write(endpoint: str, key: str, content: dict[str, Any]) -> str:
    """Store the content; returns the address where executors read it. Raises what flamepy does."""
    from flamepy.core import ObjectRef, update_object

    stored = update_object(ObjectRef(endpoint, key, 0), make_array(wire.encode(content)))
    return str(stored.endpoint)


class Lease:
    """Kept by the driver, from construction to `close()`."""

    def __init__(self, endpoint: str, application: str) -> None:
        self._endpoint, self._key = endpoint, make_key(application)
        #: Where executors read it: they may not reach the address that the driver is given.
        self.reference = {"endpoint": endpoint, "key": self._key}
        self._beat = 0
        self._closing = False
        self._closed = threading.Event()
        self._write()
        self._thread = threading.Thread(target=self._keep_alive, name="rlflame-lease", daemon=True)
        self._thread.start()

    def announce_closing(self) -> None:
        """Tell the workers that their tasks are no longer needed."""
        self._closing = True
        self._write()

    def close(self) -> None:
        self._closed.set()
        self._thread.join(timeout=_WRITE_S + 1.0)

    def _write(self) -> None:
        self._beat += 1
        content = {
            "beat": self._beat,
            "closing": self._closing,
            "host": socket.gethostname(),
            "pid": os.getpid(),
        }
        self.reference["endpoint"] = call_with_timeout(
            lambda: write(self._endpoint, self._key, content), _WRITE_S, "lease"
        )

    def _keep_alive(self) -> None:
        while not self._closed.wait(BEAT_INTERVAL_S):
            try:
                self._write()
            except Exception:  # the cache is away; the next beat may reach it
                continue
