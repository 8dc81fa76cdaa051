"""What goes wrong on demand: one switch per failure, all of them changeable while the stub runs.

Must not know: how a failure is brought about; whoever causes it asks here whether it is due.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

#: True: every time. A number: that many times more, counted down. False or 0: never.
Times = bool | int

_taking = threading.Lock()


@dataclass
class Faults:
    """Everything is off by default, and then workers, cache and scheduler behave."""

    #: A dead worker's executor goes on taking tasks and failing them, then sticks in Unbinding.
    black_hole: bool = False
    #: No executor is ever created.
    no_executors: bool = False
    #: New executors stay Void, and each of them takes up one session's turn.
    stuck_void: bool = False
    #: Every binding of a session fails with this text (event 1001, after five of them 1002).
    bind_failure: str = ""
    #: An executor takes this long in Binding before its worker process is started.
    cold_start_s: float = 0.0
    #: Tasks fail instead of running.
    fail_tasks: Times = False
    #: What the failed event of such a task says.
    fail_text: str = "failed on demand"
    #: Tasks are cancelled (state 4) instead of running.
    cancel_tasks: Times = False
    #: WatchTask ends well after Running, without a terminal state.
    watch_ends: Times = False
    #: WatchTask ends well without a single message.
    watch_empty: Times = False
    #: GetTask answers INTERNAL.
    get_task_errors: Times = False
    #: CloseSession is refused as if tasks were running.
    close_refused: Times = False
    #: The template application `flmrun` is not there.
    flmrun_missing: bool = False
    #: The name of a node of a former container, listed as NotReady.
    ghost_node: str = ""
    #: Reading a live key of the cache says NOT_FOUND.
    cache_missing: Times = False
    #: Only keys that begin so are hit by `cache_missing`.
    cache_missing_prefix: str = ""
    #: The address that references carry instead of the cache's own, such as grpc://192.0.2.1:9090.
    reference_endpoint: str = ""
    #: A hostile worker: makes a task's output from its key prefix APP/SESSION and honest output.
    forge_output: Callable[[str, bytes], bytes] | None = None

    def __setattr__(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)
        for wake in self.__dict__.get("_listeners", ()):
            wake()

    def listen(self, wake: Callable[[], None]) -> None:
        """Have `wake` called whenever a switch is thrown."""
        self.__dict__.setdefault("_listeners", []).append(wake)

    def take(self, name: str) -> bool:
        """Whether the counted fault `name` is due now; counts it down if it is."""
        with _taking:
            times = getattr(self, name)
            if times is True or not times:
                return bool(times)
            self.__dict__[name] = times - 1
            return True
