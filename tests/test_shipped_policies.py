"""The policies in checkpoints/: small, evaluated, and equal to their table."""

from __future__ import annotations

import itertools
import runpy
from pathlib import Path

import numpy as np
import pytest
from commands import rlflame
from configs import make_config

from rlflame.api import load_policy
from rlflame.config.preset_catalog import resolve_env_id
from rlflame.storage import checkpoint

ROOT = Path(__file__).parent.parent
FILES = sorted((ROOT / "checkpoints").glob("*.safetensors"))
SCRIPT = runpy.run_path(str(ROOT / "benchmarks" / "policies.py"))


def test_each_that_is_promised_is_there() -> None:
    assert {path.stem for path in FILES} == SCRIPT["POLICIES"].keys()


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_policy_is_small_and_says_how_it_came_about(path: Path) -> None:
    found = checkpoint.load(path)
    assert path.stat().st_size < 300_000
    assert not found.resumable
    assert found.evaluation is not None
    assert found.evaluation.episodes == len(found.evaluation.returns) == 100
    assert found.evaluation.mean == pytest.approx(np.mean(found.evaluation.returns))
    told = SCRIPT["POLICIES"][path.stem]
    learning = found.recipe.learning
    assert learning.environment.id == resolve_env_id(told[told.index("--env") + 1])
    assert learning.seed == int(told[told.index("--seed") + 1])
    wanted = told[told.index("--algo") + 1] if "--algo" in told else "ppo"
    assert learning.algorithm == wanted
    command = SCRIPT["command"](path.stem)
    sets = [value for word, value in itertools.pairwise(command) if word == "--set"]
    config = make_config(
        told[told.index("--env") + 1], wanted, sets, {"learning.seed": learning.seed}
    )
    # Otherwise, `rlflame inspect` would find a difference in the policy that the command trains.
    assert config.recipe.copy_with_horizon() == found.recipe


def test_the_table_is_made_from_the_files() -> None:
    assert (ROOT / "checkpoints" / "README.md").read_text("utf-8") == SCRIPT["table"]()


def test_a_policy_acts_right_after_cloning() -> None:
    policy = load_policy(ROOT / "checkpoints" / "hopper.safetensors")
    action = policy(np.zeros(11))
    assert action.shape == (3,)
    assert np.abs(action).max() <= 1.0


def test_recorded_returns_come_again() -> None:
    """Equal fingerprints give equal returns. Otherwise, intervals overlap."""
    spoken = rlflame("eval", ROOT / "checkpoints" / "cartpole.safetensors", "--expect-recorded")
    assert spoken.code == 0, spoken.out + spoken.err
