"""The places where runs and seeds are stepped, as text."""

from __future__ import annotations

from dataclasses import replace

import pytest
from screens import make_start, make_sweep_start

from rlflame.console import run_text
from rlflame.console.base import SweepResources
from rlflame.console.run_progress import RunProgress


def format_start(start) -> str:
    progress = RunProgress()
    progress.start(start)
    lines = dict(run_text.format_start_lines(start, progress))
    return f"{run_text.format_headline(start)}\n{lines['algorithm']}\n{lines['rollouts']}\n"


def test_the_place_of_a_run(golden):
    both = (("local", 2), ("flame", 5))
    starts = [
        make_start(),
        make_start(workers=8),
        make_start(fleet="inline", workers=1),
        make_start(fleet="flame", workers=20),
        replace(make_start(), no_cluster=True),
        replace(make_start(fleet="auto"), candidates=both),
    ]
    golden("places_of_a_run.txt", "\n".join(map(format_start, starts)))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "each in its own process"),
        ({"resources": SweepResources(2, 4)}, "each with 4 local workers"),
        ({"fleet": "flame", "workers": 20}, "on one fleet: 20 executors at most"),
    ],
)
def test_the_place_of_a_sweep(changes, expected):
    text = format_start(make_sweep_start(**changes))
    assert f"4 seeds, 2 at a time, {expected}" in text
    assert "preset cartpole-ppo, seeds 0-3" in text
