"""The messages of a run to its display."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from rlflame.experiment.run import RunHost


@pytest.mark.parametrize(("is_shared", "wanted"), [(False, ["too few steps"]), (True, [])])
def test_a_lone_run_shows_a_warning_and_a_seed_leaves_it_to_its_sweep(is_shared, wanted):
    shown = []
    host = RunHost(view=SimpleNamespace(show_note=shown.append), is_shared=is_shared)
    host.show_warning("too few steps")
    assert shown == wanted
