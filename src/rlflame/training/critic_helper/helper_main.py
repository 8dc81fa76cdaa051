"""The companion's process: learns what the run learns, and has the critic's half of it.

`python -m rlflame.training.critic_helper.helper_main N` is started as a worker is. It is told the
recipe, then states and batches, and ends when the pipe from the run closes. Must not know: fleets,
files, environments.
"""

from __future__ import annotations

import os
import signal

from rlflame.config.recipe import LearningSettings
from rlflame.errors import LearningError
from rlflame.learning.factory import algorithm, blas_threads, fingerprint, in_halves
from rlflame.learning.parallel.replicated import batch_of
from rlflame.rollout import blas
from rlflame.rollout.process.worker_main import pipes
from rlflame.training.critic_helper.connection import Gone, Link


def learn(link: Link) -> None:
    told = link.hear()
    learning = LearningSettings.model_validate_json(told["learning"])
    blas.set_threads(blas_threads(learning))
    learner = in_halves(algorithm(learning, told["policy"]))
    learner.share("critic", link)
    link.tell(fingerprint(learning))
    while True:
        told = link.hear()
        if "state" in told:
            learner.load_state(told["state"])
        else:
            learner.update(batch_of(told["update"]), told["progress"])


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    requests, answers = pipes()
    try:
        learn(Link(requests.fileno(), answers))
    except (Gone, LearningError):
        os._exit(0)  # the run is over, or meets the same error and says it


if __name__ == "__main__":
    main()
