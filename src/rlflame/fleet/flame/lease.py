"""A run's sign of life in the object cache: an object that changes while the run lives.

Who looks twice and finds it unchanged knows that the run is dead, whatever the clocks of the two
machines say. Must not know: applications, sessions, tasks.
"""

from __future__ import annotations

import os
import socket
import threading
from typing import Any

from rlflame.rollout import wire

from .raw_object import make_array, read_object
from .timed_call import call_with_timeout

BEAT_INTERVAL_S = 5.0
_WRITE_S = 4.0


def make_key(application: str) -> str:
    return f"{application}/lease/lease"


def read(endpoint: str, key: str) -> dict[str, Any] | None:
    """What the lease says now; None where there is none. Raises what `read_object` raises."""
    try:
        content = read_object(endpoint, key)
    except KeyError:
        return None
    value: dict[str, Any] = wire.decode(content)
    return value


def close_lease(endpoint: str, key: str, contents: dict[str, Any]) -> None:
    """Tell the workers of a run that is dead that nobody waits for them; its beat stays as it is.

    Raises what flamepy raises.
    """
    from flamepy.core import ObjectRef, update_object

    content = make_array(wire.encode({**contents, "closing": True}))
    update_object(ObjectRef(endpoint, key, 0), content)


class Lease:
    """Kept by the driver, from construction to `close()`."""

    def __init__(self, endpoint: str, application: str) -> None:
        self._endpoint, self._key = endpoint, make_key(application)
        #: Where executors read it: they may not reach the address that the driver is given.
        self.reference = {"endpoint": endpoint, "key": self._key}
        self._beat = 0
        self._closing = False
        self._closed = threading.Event()
        self.write()
        self._thread = threading.Thread(target=self._keep_alive, name="rlflame-lease", daemon=True)
        self._thread.start()

    def write(self) -> None:
        from flamepy.core import ObjectRef, update_object

        self._beat += 1
        value = {
            "beat": self._beat,
            "closing": self._closing,
            "host": socket.gethostname(),
            "pid": os.getpid(),
        }
        content = make_array(wire.encode(value))
        reference = ObjectRef(self._endpoint, self._key, 0)
        stored = call_with_timeout(lambda: update_object(reference, content), _WRITE_S, "lease")
        self.reference = {"endpoint": str(stored.endpoint), "key": self._key}

    def announce_closing(self) -> None:
        """Workers that look see that nobody waits for their tasks any more."""
        self._closing = True
        self.write()

    def close(self) -> None:
        self._closed.set()
        self._thread.join(timeout=_WRITE_S + 1.0)

    def _keep_alive(self) -> None:
        while not self._closed.wait(BEAT_INTERVAL_S):
            try:
                self.write()
            except Exception:  # the cache is away; the next beat may reach it
                continue
