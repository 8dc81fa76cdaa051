"""Each algorithm has a page with all sections, which explains all logged metrics."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from commands import TINY, TINY_REINFORCE, TINY_SAC, rlflame

from rlflame.storage.metrics import NAMES

DOCS = Path(__file__).parents[2] / "docs"
RUNS = {
    "ppo": ("--env", "cartpole", *TINY, "--steps", "256", "--set", "ppo.clip_range_value=0.2"),
    "reinforce": ("--env", "pendulum", "--algo", "reinforce", *TINY_REINFORCE, "--iterations", "2",
                  "--set", "evaluation.every_steps=64", "--set", "evaluation.episodes=2"),
    "sac": ("--env", "pendulum", "--algo", "sac", *TINY_SAC),
}  # fmt: skip


def read_section(page: str, title: str) -> str:
    text = (DOCS / page).read_text("utf-8")
    _, head, rest = text.partition(f"# {title}\n")
    assert head, f"{page} has no section {title}"
    return re.split(r"^#", rest, maxsplit=1, flags=re.MULTILINE)[0]


def list_names(section: str) -> set[str]:
    """The names in the first column of the tables."""
    cells = re.findall(r"^\|(.*?)\|", section, re.MULTILINE)
    return {name for cell in cells for name in re.findall(r"`(\w+)`", cell)}


@pytest.mark.parametrize("algorithm", RUNS)
def test_a_page_has_its_parts(algorithm: str) -> None:
    page = f"algorithms/{algorithm}.md"
    for title in (
        "Overview",
        "Metrics",
        "Details that matter",
        "Differences from other libraries",
        "Results",
    ):
        assert read_section(page, title).strip()
    assert re.search(r"^    \S.* = |^    \S+ +\S.*\(", read_section(page, "Overview"), re.MULTILINE)


@pytest.mark.parametrize("algorithm", RUNS)
def test_every_metric_that_is_logged_is_explained(algorithm: str, tmp_path: Path) -> None:
    result = rlflame("train", *RUNS[algorithm], "--out", tmp_path / "run")
    assert result.code == 0, result.err
    record = (tmp_path / "run" / "metrics.jsonl").read_text()
    logged = {name for line in record.splitlines() for name in json.loads(line)}
    assert len(logged) > 15
    common = list_names(read_section("reference/json.md", "Metrics of every run"))
    own = list_names(read_section(f"algorithms/{algorithm}.md", "Metrics"))
    assert logged - common - own == set()
    # The pages explain only logged metrics. Discrete actions have no standard deviation.
    assert own - logged <= {"std"}
    assert common | own <= {*NAMES, "steps"}
