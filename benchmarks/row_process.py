"""Measures the rows of a table in a second process, which is replaced if a row fails or hangs.

A failed kernel or capture can break every later use of the GPU by the same process.
"""

from __future__ import annotations

import multiprocessing
import subprocess
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

#: A process that uses a broken GPU may not end at all.
_EXIT_S = 10.0


class RowProcess:
    """Calls functions in a process that has called `prepare` first."""

    def __init__(self, prepare: Callable[[], object]) -> None:
        self._prepare = prepare
        self._process: Any = None
        self._connection: Any = None

    def call(self, function: Callable[[], Any], limit_s: float) -> Any:
        """Return the result; the function and its result must be picklable.

        Raises TimeoutExpired after `limit_s` seconds, and RuntimeError if the function fails.
        """
        if self._process is None:
            self._start()
        try:
            self._connection.send(function)
            if not self._connection.poll(limit_s):
                raise subprocess.TimeoutExpired(str(function), limit_s)
            is_complete, result = self._connection.recv()
            if not is_complete:
                raise RuntimeError(result)
            return result
        except (EOFError, ConnectionError) as error:
            self._process.join(_EXIT_S)
            text = f"the process ended with exit code {self._process.exitcode}"
            self.close()
            raise RuntimeError(text) from error
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.join(_EXIT_S)
            self._connection.close()
            self._process = None

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, other = context.Pipe()
        self._process = context.Process(target=_serve, args=(other, self._prepare), daemon=True)
        self._process.start()
        other.close()


def _serve(connection: Connection, prepare: Callable[[], object]) -> None:
    prepare()
    while True:
        try:
            function = connection.recv()
        except EOFError:
            return
        try:
            reply = True, function()
        except Exception:
            reply = False, traceback.format_exc()
        connection.send(reply)
