"""Quiet output for scripts, and the status line of commands that do not train."""

from __future__ import annotations

import io

from screens import Clock, make_result, make_sweep_result, make_sweep_start, play_seeds

from rlflame.console.display import QuietDisplay, StatusLine
from rlflame.fleet.base import FleetEvent


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_folder_and_the_failures_alone(capfd):
    display = QuietDisplay()
    with display.open(make_sweep_start()):
        play_seeds(display, Clock())
    for result in (make_result(20_480, 100), make_sweep_result()):
        display.show_result(result)
    out, err = capfd.readouterr()
    assert out == "runs/x\nruns/x\n"
    assert err == "Seed 1 failed: Its process was killed.\nWhat it printed.\n"


def test_a_status_line_is_one_line_on_a_terminal_and_goes_away(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    events = [FleetEvent("submitted", "evaluate", slot) for slot in range(3)]
    events += [FleetEvent(kind, "evaluate", 1) for kind in ("running", "done")]
    terminal, pipe = Terminal(), io.StringIO()
    for stream in (terminal, pipe):
        with StatusLine(stream) as status_line:
            for event in events:
                status_line.show_fleet_event(event)
    assert pipe.getvalue() == ""
    assert "\n" not in terminal.getvalue()
    lines = terminal.getvalue().split("\r\x1b[K")
    assert lines[-2:] == ["1 of 3 groups of episodes played", ""]
    monkeypatch.setenv("TERM", "dumb")
    with StatusLine(dumb := Terminal()) as status_line:
        status_line.show_fleet_event(events[0])
    assert dumb.getvalue() == ""


def test_a_status_that_is_not_on_a_terminal_is_a_line_every_ten_seconds(capfd):
    clock = Clock()
    with StatusLine(io.StringIO(), clock) as status_line:
        for number in range(25):
            status_line.show_status(f"{number} of 25")
            clock.now += 1.0
    assert capfd.readouterr().err.splitlines() == ["10 of 25", "20 of 25"]
