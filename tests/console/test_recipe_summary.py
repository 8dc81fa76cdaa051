"""A recipe as numbers and text."""

from __future__ import annotations

import pytest
from screens import make_checkpoint

from rlflame.console.recipe_summary import RecipeSummary


@pytest.mark.parametrize(
    ("words", "iterations", "budget"),
    [
        ({"flags": {"stop_at_steps": 2048}}, 1, "2,048 steps in 1 iteration"),
        ({"flags": {"stop_at_steps": 2049}}, 2, "2,049 steps in 2 iterations"),
        ({"algorithm": "reinforce", "flags": {"stop_at_steps": 5000}}, None, "5,000 steps"),
        (
            {"algorithm": "reinforce", "flags": {"stop_at_steps": 5000, "stop_at_iterations": 3}},
            None,
            "3 iterations of 64 episodes (192 episodes), or 5,000 steps",
        ),
        ({"flags": {"stop_at_steps": None, "stop_at_iterations": 3}}, 3, "3 iterations"),
    ],
)
def test_how_many_iterations_there_will_be(words, iterations, budget):
    checkpoint, preset = make_checkpoint(**words)
    summary = RecipeSummary(checkpoint.recipe, checkpoint.env, preset)
    assert (summary.iterations, summary.format_budget()) == (iterations, budget)
