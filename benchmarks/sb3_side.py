"""Train with stable-baselines3 in a separate process, for race.py.

The script prints one line of JSON with the seconds, the steps, and the end and return of each
episode. It prints `absent` if stable-baselines3 is not installed.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

from rlflame.rollout.process.parent_channel import die_with_parent, read_parent_pid


def train(request: dict[str, Any]) -> dict[str, Any] | None:
    """Train on the CPU. Return None if stable-baselines3 is not installed."""
    try:
        import stable_baselines3
    except ImportError:
        return None
    import gymnasium

    method = getattr(stable_baselines3, request["algorithm"])
    env = gymnasium.make(request["environment"], **request["kwargs"])
    model = method("MlpPolicy", env, device="cpu", **request["arguments"])
    episodes: list[tuple[int, float, float]] = []

    def step(local_variables: dict[str, Any], _: dict[str, Any]) -> bool:
        for info in local_variables["infos"]:
            if "episode" in info:
                ended = time.perf_counter() - start_s
                episodes.append((model.num_timesteps, ended, float(info["episode"]["r"])))
        return True

    start_s = time.perf_counter()
    model.learn(total_timesteps=request["steps"], callback=step)
    return {
        "version": stable_baselines3.__version__,
        "seconds": time.perf_counter() - start_s,
        "steps": int(model.num_timesteps),
        "episodes": episodes,
    }


def main() -> None:
    die_with_parent(read_parent_pid())
    result = train(json.loads(sys.argv[1]))
    print("absent" if result is None else json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
