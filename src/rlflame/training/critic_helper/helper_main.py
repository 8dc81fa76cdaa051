"""The critic helper's process: learns what the run learns, and has the critic's half of it.

`python -m rlflame.training.critic_helper.helper_main N` is started as a worker is. It is told the
recipe, then states and batches, and ends when the pipe from the run closes. Must not know: fleets,
files, environments.
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
from rlflame.rollout.process.worker_main import open_pipes
from rlflame.training.critic_helper.connection import ConnectionLost, PeerConnection


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
    requests, answers = open_pipes()
    try:
        run_critic_helper(PeerConnection(requests.fileno(), answers))
    except (ConnectionLost, LearningError):
        os._exit(0)  # the run is over, or meets the same error and says it


if __name__ == "__main__":
    main()
