"""The events of a run and the document of a sweep, as in docs/reference/json.md."""

from __future__ import annotations

import json
from pathlib import Path

from screens import (
    Clock,
    make_metrics,
    make_record,
    make_result,
    make_start,
    make_sweep_result,
    make_sweep_start,
    play_seeds,
)

from rlflame.console.json_lines import JsonDisplay
from rlflame.fleet.base import FleetEvent
from rlflame.training.trainer import Progress


def test_events_of_a_run(golden):
    lines: list[str] = []
    clock = Clock()
    display = JsonDisplay(lines.append, clock)
    with display.open(make_start(environment="cartpole", flags={"stop_at_steps": 2000})):
        clock.now += 2.0
        metrics = make_metrics(1, 2048, 9, loss=float("nan"), std=None)
        display.show_iteration(metrics, [3.0, 5.0])
        display.show_evaluation(2048, make_record(7.0), False)
        path = Path("runs/x/checkpoints/step-000002048.safetensors")
        display.show_checkpoint(path, Progress(1, 2048, 9))
        for kind in ("submitted", "running", "speculated"):
            display.show_fleet_event(FleetEvent(kind, "train", 1))
        display.show_fleet_event(FleetEvent("retried", "train", 1, "did not answer in time"))
        display.show_fleet_event(FleetEvent("phase", "", 0, "starting"))
        display.show_fleet_event(FleetEvent("workers", "", 0, count=2))
        display.show_note("A sentence.")
    display.show_result(make_result(2048, 9, best=None, evaluation=None))
    assert [json.loads(line)["event"] for line in lines] == [
        "start", "iteration", "evaluation", "checkpoint", "speculated", "retried", "phase", "note",
        "end",
    ]  # fmt: skip
    golden("run.jsonl", "\n".join(lines) + "\n")


def test_a_sweep_is_one_document_and_its_notes_go_to_standard_error(golden, capfd):
    clock = Clock()
    display = JsonDisplay(clock=clock, sweep=True)
    with display.open(make_sweep_start()):
        play_seeds(display, clock)
    display.show_result(make_sweep_result())
    out, err = capfd.readouterr()
    assert json.loads(out)["complete"]
    golden("sweep.json", out)
    golden("sweep_json_notes.txt", err)
    display.show_result(make_sweep_result(has_trained=False))
    document = json.loads(capfd.readouterr().out)
    assert (document["seconds"], document["steps_per_s"]) == (None, None)


def test_a_run_that_was_finished_has_an_end_and_no_start():
    lines: list[str] = []
    JsonDisplay(lines.append, Clock()).show_result(make_result(2048, 9, has_trained=False))
    (end,) = map(json.loads, lines)
    assert (end["event"], end["began"], end["steps_per_s"]) == ("end", False, 0.0)
    assert end["final_mean_reward"] is None
