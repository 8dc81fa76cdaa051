"""The messages of a run to its display, and the end of its logs."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
from commands import TINY
from configs import make_config

from rlflame import api
from rlflame.experiment.run import RunHost
from rlflame.rendering.clip_recorder import ClipRecorder


@pytest.mark.parametrize(("is_shared", "wanted"), [(False, ["too few steps"]), (True, [])])
def test_a_lone_run_shows_a_warning_and_a_seed_leaves_it_to_its_sweep(is_shared, wanted):
    shown = []
    host = RunHost(view=SimpleNamespace(show_note=shown.append), is_shared=is_shared)
    host.show_warning("too few steps")
    assert shown == wanted


def test_the_logs_are_closed_even_if_waiting_for_the_last_clip_is_interrupted(
    tmp_path, monkeypatch
):
    def close(self, hurry):
        raise KeyboardInterrupt

    monkeypatch.setattr(ClipRecorder, "close", close)
    settings = [word for word in TINY if word != "--set"]
    limits = {"fleet": "inline", "stop_at_steps": 64, "out": str(tmp_path / "run")}
    with pytest.raises(KeyboardInterrupt):
        api.train(make_config("cartpole", None, settings, limits))
    lines = (tmp_path / "run" / "timing.jsonl").read_text().splitlines()
    assert [json.loads(line).get("closing", 0) for line in lines] == [0, 1]
