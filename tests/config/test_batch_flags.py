"""The options that depend on the settings of a preset: here, `--horizon`."""

from __future__ import annotations

import pytest

from rlflame.config.flags import TrainFlags
from rlflame.config.resolve import resolve
from rlflame.errors import ConfigError


def read_horizons(**options):
    flags = TrainFlags(env="cartpole", **options)
    learning = resolve(flags, lambda config: False)[0].learning
    return learning.horizon_steps, learning.horizon_iterations


@pytest.mark.parametrize(
    ("options", "horizons"),
    [
        ({"steps": 100, "horizon": 200}, (200, None)),
        ({"horizon": 200}, (200, None)),
        ({"algo": "reinforce", "iterations": 10, "horizon": 20}, (None, 20)),
        ({"algo": "reinforce", "steps": 1000, "horizon": 2000}, (2000, None)),
        ({"steps": 100, "horizon": 200, "sets": ["horizon_iterations=7"]}, (200, None)),
        ({"steps": 100}, (None, None)),
    ],
)
def test_a_horizon_has_the_unit_of_the_budget(options, horizons):
    assert read_horizons(**options) == horizons


def test_a_horizon_of_two_possible_units_is_refused():
    with pytest.raises(ConfigError, match="steps or of iterations") as caught:
        read_horizons(algo="reinforce", steps=1000, iterations=10, horizon=20)
    assert caught.value.hint == "--set learning.horizon_steps=20"


def test_a_horizon_is_positive():
    with pytest.raises(ConfigError, match="horizon_steps"):
        read_horizons(steps=100, horizon=0)
