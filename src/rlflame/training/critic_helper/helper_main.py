"""The critic's helper process: learns from the run's batches, and computes the critic's half.

It receives the recipe, then states and batches, and ends when the pipe from the run closes.
"""

from __future__ import annotations

import os
import signal

from rlflame.config.recipe import LearningSettings
from rlflame.errors import LearningError
from rlflame.learning.factory import (
    as_split_algorithm,
    compute_fingerprint,
    count_blas_threads,
    make_algorithm,
)
from rlflame.learning.parallel.process_group import from_message
from rlflame.rollout import blas
from rlflame.rollout.process.parent_channel import ParentChannel
from rlflame.training.critic_helper.connection import LostConnection, PeerConnection


def run_critic_helper(connection: PeerConnection) -> None:
    message = connection.receive_message()
    learning = LearningSettings.model_validate_json(message["learning"])
    blas.set_threads(count_blas_threads(learning))
    learner = as_split_algorithm(make_algorithm(learning, message["policy"]))
    learner.start_split("critic", connection)
    connection.send_message(compute_fingerprint(learning))
    while True:
        message = connection.receive_message()
        if "state" in message:
            learner.load_state(message["state"])
        else:
            learner.update(from_message(message["update"]), message["progress"])


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    channel = ParentChannel.open()
    try:
        run_critic_helper(PeerConnection(channel))
    except (LostConnection, LearningError):
        os._exit(0)  # the run is over, or meets the same error and says it


if __name__ == "__main__":
    main()
