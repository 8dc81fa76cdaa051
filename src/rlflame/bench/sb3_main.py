"""A process that trains by stable-baselines3, where it is installed, and does nothing else.

    python -m rlflame.bench.sb3_main '{"algorithm": "PPO", "environment": "CartPole-v1", ...}'

It says one line of JSON: the seconds, the steps, and each episode's end and return; or `absent`.
Must not know: how anything of ours trains.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

from rlflame.rollout.process.worker_main import die_with_parent, parent_named


def trained(asked: dict[str, Any]) -> dict[str, Any] | None:
    """One training on the processor; None where it is not installed."""
    try:
        import stable_baselines3
    except ImportError:
        return None
    import gymnasium

    method = getattr(stable_baselines3, asked["algorithm"])
    env = gymnasium.make(asked["environment"], **asked["kwargs"])
    model = method("MlpPolicy", env, device="cpu", **asked["arguments"])
    episodes: list[tuple[int, float, float]] = []

    def step(found: dict[str, Any], _: dict[str, Any]) -> bool:
        for info in found["infos"]:
            if "episode" in info:
                ended = time.perf_counter() - began
                episodes.append((model.num_timesteps, ended, float(info["episode"]["r"])))
        return True

    began = time.perf_counter()
    model.learn(total_timesteps=asked["steps"], callback=step)
    return {
        "version": stable_baselines3.__version__,
        "seconds": time.perf_counter() - began,
        "steps": int(model.num_timesteps),
        "episodes": episodes,
    }


def main() -> None:
    die_with_parent(parent_named())
    found = trained(json.loads(sys.argv[1]))
    print("absent" if found is None else json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
