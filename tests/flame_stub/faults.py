"""Switches for the stub's faults, which can change while the stub runs.

The code that causes a fault reads its switch here.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

#: True: always. A number: this number of times. False or 0: never.
Times = bool | int

_taking = threading.Lock()


@dataclass
class Faults:
    """The switches. All of them are off by default."""

    #: The executor of a dead worker keeps taking tasks and failing them, then hangs in Unbinding.
    black_hole: bool = False
    #: No executor is ever created.
    no_executors: bool = False
    #: New executors stay Void. Each of them uses one turn of a session.
    stuck_void: bool = False
    #: Each binding of a session fails with this text (event 1001; after five times, 1002).
    bind_failure: str = ""
    #: The seconds that an executor is in Binding before its worker process starts.
    cold_start_s: float = 0.0
    #: Tasks fail instead of running.
    fail_tasks: Times = False
    #: The text in the failed event of such a task.
    fail_text: str = "failed on demand"
    #: Tasks are cancelled (state 4) instead of running.
    cancel_tasks: Times = False
    #: WatchTask ends without an error after Running, without a final state.
    watch_ends: Times = False
    #: WatchTask ends without an error and without a message.
    watch_empty: Times = False
    #: GetTask answers INTERNAL.
    get_task_errors: Times = False
    #: CloseSession is refused, as if tasks were running.
    close_refused: Times = False
    #: The template application `flmrun` does not exist.
    flmrun_missing: bool = False
    #: The name of a node of a former container, listed as NotReady.
    ghost_node: str = ""
    #: Reading an existing key of the cache returns NOT_FOUND.
    cache_missing: Times = False
    #: `cache_missing` is limited to keys that begin with this text.
    cache_missing_prefix: str = ""
    #: The address in references instead of the cache's own, such as grpc://192.0.2.1:9090.
    reference_endpoint: str = ""
    #: A malicious worker: makes a task's output from its key prefix APP/SESSION and real output.
    forge_output: Callable[[str, bytes], bytes] | None = None

    def __setattr__(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)
        for wake in self.__dict__.get("_listeners", ()):
            wake()

    def listen(self, wake: Callable[[], None]) -> None:
        """Register a function that is called when a switch changes."""
        self.__dict__.setdefault("_listeners", []).append(wake)

    def take(self, name: str) -> bool:
        """Whether the fault `name` is due now. A counted fault is counted down."""
        with _taking:
            times = getattr(self, name)
            if times is True or not times:
                return bool(times)
            self.__dict__[name] = times - 1
            return True
