"""A rollout worker process, which receives tasks and sends fragments and heartbeats.

Environments print to the standard output of the process, which is separate from the messages.
"""

from __future__ import annotations

import os
import select
import signal
import threading
from typing import Any

from .channel import Message, MessageKind
from .parent_channel import BEAT_S, ParentChannel, exit_with_group


class WorkerServer:
    """Answers the parent's messages one after another."""

    def __init__(self, channel: ParentChannel) -> None:
        from ..worker import RolloutWorker

        self._channel = channel
        self._worker = RolloutWorker()
        self._policies: dict[str, Any] = {}
        self._parent = os.getppid()
        self._task_count = 0

    def serve(self) -> None:
        """Answer messages until the parent closes the channel."""
        from ..envs.vector_env import preload_env
        from ..machine import read_versions

        self._channel.send(MessageKind.HELLO, read_versions())
        threading.Thread(target=self._send_heartbeats, daemon=True).start()
        for message in self._channel:
            if message.kind is MessageKind.POLICY:
                policy = message.value
                self._policies[policy["id"]] = policy["arrays"]
            elif message.kind is MessageKind.FORGET:
                self._policies.pop(message.value["id"], None)
            elif message.kind is MessageKind.PREPARE:
                preload_env(message.value["id"])
            else:
                self._answer(message)
        self._worker.close()

    def _answer(self, message: Message) -> None:
        import traceback

        from .. import wire

        self._task_count += 1
        try:
            task = wire.decode(message.payload)
            result = wire.encode(self._worker.run(task, lambda: self._policies[task.policy_id]))
        except BaseException:  # the answer reports the bug
            self._channel.send(MessageKind.BROKEN, {"traceback": traceback.format_exc()})
        else:
            self._channel.send_bytes(MessageKind.RESULT, result)

    def _send_heartbeats(self) -> None:
        """Report the position of the task when it has changed; exit if the parent is gone."""
        latest = None
        poll = select.poll()
        poll.register(self._channel.pipes[1], 0)  # reports only that the parent closed its end
        while not poll.poll(1000.0 * BEAT_S) and os.getppid() == self._parent:
            state = self._task_count, self._worker.position
            if state[1] is not None and state != latest:
                fields = dict(zip(("slot", "row", "seed", "step"), state[1], strict=True))
                self._channel.send(MessageKind.BEAT, fields)
                latest = state
        exit_with_group()


def main() -> None:
    """Run as `python -m rlflame.rollout.process.worker_main DESCRIPTOR PARENT`."""
    from ..envs import user_code

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    channel = ParentChannel.open()
    server = WorkerServer(channel)
    user_code.load_from_environment()
    server.serve()


if __name__ == "__main__":
    main()
