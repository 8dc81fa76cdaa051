"""A `Channel` between two processes that exchange arrays thousands of times a second.

An end that waits for an array polls for a while before it sleeps, because to be woken takes as long
as the work between two exchanges.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from rlflame.rollout.process.channel import Channel, MessageKind, ProtocolError
from rlflame.rollout.task import Array

#: Longer than the halves of a small minibatch differ; beyond it one waits asleep.
_AWAKE_S = 0.002
#: Should the other end be on this very processor.
_let_others_run: Callable[[], None] = getattr(os, "sched_yield", lambda: None)


class ConnectionLost(Exception):
    """The other process is gone, or sent something else than what was expected."""


class ConnectionTimeout(ConnectionLost):
    """The other process is there and does not answer."""


class PeerConnection:
    """One end. Raises `ConnectionLost`; with a deadline also where nothing moves for so long."""

    def __init__(self, channel: Channel, deadline_s: float | None = None) -> None:
        self._channel = channel
        self._deadline_s = deadline_s

    def has_message(self, timeout_s: float = 0.0) -> bool:
        """Whether a message can be received, or the other end is closed."""
        try:
            return self._channel.poll(timeout_s)
        except ProtocolError:  # `receive_message` raises for it
            return True

    def send_message(self, value: Any) -> None:
        with _convert_errors():
            self._channel.send(MessageKind.TASK, value)
            self._channel.wait_until_sent(self._deadline_s)

    def receive_message(self) -> Any:
        """The next message, for which one waits asleep: it comes after a batch."""
        with _convert_errors():
            message = self._channel.receive(self._deadline_s)
            if message.kind is MessageKind.ARRAY:
                raise ConnectionLost
            return message.value

    def exchange(self, outgoing: Array, incoming: Array) -> None:
        """Send one array and fill the other. The other end does the same at the same time."""
        with _convert_errors():
            self._channel.send_bytes(MessageKind.ARRAY, outgoing.data.cast("B"))
            self._fill(incoming)
            self._channel.wait_until_sent(self._deadline_s)

    def send(self, outgoing: Array) -> None:
        with _convert_errors():
            self._channel.send_bytes(MessageKind.ARRAY, outgoing.data.cast("B"))
            self._channel.wait_until_sent(self._deadline_s)

    def receive(self, incoming: Array) -> None:
        with _convert_errors():
            self._fill(incoming)

    def _fill(self, incoming: Array) -> None:
        until = time.perf_counter() + _AWAKE_S
        while not self._channel.poll() and time.perf_counter() < until:
            _let_others_run()
        message = self._channel.receive(self._deadline_s)
        if message.kind is not MessageKind.ARRAY or len(message.payload) != incoming.nbytes:
            raise ConnectionLost
        incoming[...] = np.frombuffer(message.payload, incoming.dtype).reshape(incoming.shape)


@contextmanager
def _convert_errors() -> Iterator[None]:
    try:
        yield
    except TimeoutError as error:
        raise ConnectionTimeout from error
    except (EOFError, OSError, ProtocolError) as error:
        raise ConnectionLost from error
