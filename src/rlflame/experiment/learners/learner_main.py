"""A local learner process that repeats the updates of the first learner.

The first learner starts this process. The process ends when the pipe from the first learner closes.
"""

from __future__ import annotations

import os
import signal
import traceback
from typing import Any

from rlflame.config.recipe import LearningSettings
from rlflame.errors import LearnerFailure, LearningError
from rlflame.experiment.learners.launcher import LOST_EXIT_CODE
from rlflame.learning.factory import (
    compute_fingerprint,
    count_blas_threads,
    make_algorithm,
    resolve_device,
)
from rlflame.learning.parallel.process_group import Shards, run_replica
from rlflame.learning.parallel.shared_memory_group import GroupDescriptors, SharedMemoryGroup
from rlflame.rollout import blas
from rlflame.rollout.process.channel import MessageKind
from rlflame.rollout.process.parent_channel import ParentChannel


def run_learner(channel: ParentChannel, order: dict[str, Any]) -> None:
    learning = LearningSettings.model_validate_json(order["learning"])
    blas.set_threads(count_blas_threads(learning))
    memory, inboxes, outboxes = order["descriptors"]
    descriptors = GroupDescriptors(memory, tuple(inboxes), tuple(outboxes))
    group = SharedMemoryGroup(order["rank"], descriptors)
    resolve_device(learning, group.rank)
    shards = Shards(learning.gradient_shards, group)
    algorithm = make_algorithm(learning, order["policy"], shards=shards)
    if order["compare_every"]:
        shards.compare_every(order["compare_every"], algorithm.get_state)
    channel.send(MessageKind.HELLO, compute_fingerprint(learning))
    run_replica(algorithm, group)


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the first learner decides when this process ends
    channel = ParentChannel.open()
    order = channel.receive_order()
    channel.start_listening()
    try:
        run_learner(channel, order)
    except LearnerFailure:
        os._exit(LOST_EXIT_CODE)
    except LearningError:
        os._exit(1)  # the first learner sees the same error and reports it
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


if __name__ == "__main__":
    main()
