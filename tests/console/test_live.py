"""The live view of runs and sweeps, with a fake clock."""

from __future__ import annotations

import io
import re
from dataclasses import replace

import pytest
from rich.console import Console
from screens import (
    Clock,
    make_metrics,
    make_record,
    make_start,
    make_sweep_result,
    make_sweep_start,
    play_seeds,
)

from rlflame.console.live import LiveDisplay
from rlflame.fleet.base import FleetEvent
from rlflame.training.trainer import Progress


def make_console(width: int, height: int = 40) -> Console:
    return Console(
        file=io.StringIO(), width=width, height=height, color_system=None, highlight=False
    )


def draw(display: LiveDisplay, width: int, height: int = 40) -> str:
    console = make_console(width, height)
    console.print(display.render_view())
    return re.sub(" +\n", "\n", console.file.getvalue())


def play_run(display: LiveDisplay, clock: Clock) -> None:
    for iteration in range(1, 101):
        clock.now += 0.5
        metrics = make_metrics(
            iteration, 2048 * iteration, 7 * iteration, loss=0.0012345, approx_kl=0.0101,
            clip_fraction=0.085, explained_variance=0.875, learning_rate=2.5e-4,
        )  # fmt: skip
        display.show_iteration(metrics, [12.5] * 7)
    display.show_evaluation(200_000, make_record(2031.25, 20.0), True)
    display.show_checkpoint("x", Progress(100, 200_000, 700))
    for slot in range(8):
        display.show_fleet_event(FleetEvent("submitted", "train", slot))
    for slot in range(5):
        display.show_fleet_event(FleetEvent("running", "train", slot))
    display.show_fleet_event(FleetEvent("done", "train", 0))
    display.show_fleet_event(FleetEvent("retried", "train", 1, "killed by signal 9"))
    display.show_fleet_event(FleetEvent("workers", "", 0, count=3))


@pytest.mark.parametrize("width", [20, 39, 59, 80, 140])
def test_the_view_of_a_run(width, golden, capfd):
    clock = Clock()
    display = LiveDisplay(make_console(width), clock)
    with display.open(make_start(environment="hopper")):
        play_run(display, clock)
        view = draw(display, width)
    golden(f"live_run_{width}.txt", view)
    assert max(map(len, view.splitlines())) <= width
    assert "…" not in view
    assert "Slot 1 is collected again. Reason: killed by signal 9." in capfd.readouterr().err


@pytest.mark.parametrize("height", [40, 11])
def test_the_view_of_a_sweep(height, golden):
    clock, console = Clock(), make_console(80, height)
    display = LiveDisplay(console, clock)
    with display.open(make_sweep_start()):
        play_seeds(display, clock)
        golden(f"live_sweep_{height}.txt", draw(display, 80, height))


@pytest.mark.parametrize("width", [60, 50, 40, 30, 20])
def test_a_narrow_terminal_has_fewer_columns_of_seeds_and_whole_ones(width, golden):
    clock, console = Clock(), make_console(width)
    display = LiveDisplay(console, clock)
    with display.open(make_sweep_start()):
        play_seeds(display, clock)
        view = draw(display, width)
    golden(f"live_sweep_narrow_{width}.txt", view)
    assert max(map(len, view.splitlines())) <= width
    assert "…" not in view


def test_the_end_of_a_sweep(golden, capfd):
    LiveDisplay(make_console(80), Clock()).show_result(make_sweep_result(has_trained=False))
    golden("live_sweep_end.txt", capfd.readouterr().out)


def test_however_a_process_ends_its_terminal_has_a_cursor():
    out = io.StringIO()
    display = LiveDisplay(Console(file=out, width=80, force_terminal=True), Clock())
    with display.open(make_start()):
        # The screen after the process is killed here.
        assert out.getvalue().rfind("\x1b[?25h") > out.getvalue().rfind("\x1b[?25l") >= 0


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        ([7], None),
        ([9, 7], "7, 9 episodes"),
        ([2000, 7, 1, 3, 4], "1 to 2,000 episodes on 5 workers"),
    ],
)
def test_the_episodes_of_each_worker(counts, expected):
    display = LiveDisplay(make_console(80), Clock())
    with display.open(make_start(environment="hopper")):
        for number, count in enumerate(counts):
            event = FleetEvent("episodes", "", 0, f"worker-{number}", count - 1)
            display.show_fleet_event(event)
            display.show_fleet_event(replace(event, count=1))
        lines = [line for line in draw(display, 80).splitlines() if "per worker" in line]
    texts = [line.split("per worker")[1].strip() for line in lines]
    assert texts == ([expected] if expected else [])
