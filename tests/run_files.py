"""Small run folders for tests of code that reads runs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

CONFIG = """
stop_at_steps = {stop}

[learning]
algorithm = "{algorithm}"
seed = {seed}

[learning.environment]
id = "{environment}"

[learning.ppo]
clip_range = {clip}

[runtime]
fleet = "local"
"""


def make(
    folder: Path,
    *,
    seed: int = 0,
    algorithm: str = "ppo",
    environment: str = "CartPole-v1",
    clip: float = 0.2,
    evaluations: Sequence[tuple[int, float]] = (),
    iterations: Sequence[tuple[int, float | None]] = (),
    seconds: Sequence[tuple[int, float]] = (),
    episodes: Sequence[tuple[float, int]] = (),
    final: float | None = None,
    fleet: str = "local",
    capacity: int = 2,
    stop: int = 1000,
) -> Path:
    """Write a run folder.

    `seconds` are wall-clock seconds. The driver's processor time is half of them, and the processor
    time of the workers is equal to them.
    """
    folder.mkdir(parents=True)
    config = CONFIG.format(
        stop=stop, algorithm=algorithm, seed=seed, environment=environment, clip=clip
    )
    (folder / "config.toml").write_text(config)
    lines: list[dict[str, Any]] = [
        {"steps": steps, "iteration": i + 1, "episodes": 10 * (i + 1), "episode_return_mean": value}
        for i, (steps, value) in enumerate(iterations)
    ]
    lines += [
        {"steps": steps, "eval_return_mean": value, "eval_return_low": value - 1.0,
         "eval_return_high": value + 2.0}
        for steps, value in evaluations
    ]  # fmt: skip
    lines.sort(key=lambda line: line["steps"])
    write_lines(folder / "metrics.jsonl", lines)
    write_lines(
        folder / "timing.jsonl",
        [
            {"steps": steps, "wall_s": s, "driver_cpu_s": s / 2, "workers_cpu_s": s,
             "collect_s": s / 4, "learn_s": s / 8}
            for steps, s in seconds
        ],
    )  # fmt: skip
    rows = "".join(f"{r!r},{length}\n" for r, length in episodes)
    (folder / "episodes.csv").write_text("r,l\n" + rows)
    machine = {"processor": "A Processor", "cores": 4, "usable_cores": 2, "memory_bytes": 2 << 30,
               "system": "linux", "python": "3.11.7", "host": "here",
               "packages": {"numpy": "2.0"}}  # fmt: skip
    entry = {"steps": 0, "fleet": fleet, "capacity": capacity, "machine": machine, "workers": []}
    (folder / "machines.json").write_text(json.dumps([entry]))
    if final is not None:
        record = {"mean": final, "low": final - 5.0, "high": final + 5.0, "episodes": 20}
        result = {"steps": stop, "evaluation": record}
        (folder / "result.json").write_text(json.dumps(result))
    return folder


def write_lines(path: Path, lines: Sequence[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
