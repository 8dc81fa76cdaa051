"""Counters, speeds and times of running seeds."""

from __future__ import annotations

import pytest
from screens import Clock, make_event, make_start, make_sweep_start, play_seeds

from rlflame.console.display import Display
from rlflame.console.run_progress import FleetProgress, RunProgress
from rlflame.console.run_text import format_interquartile_mean
from rlflame.fleet.base import FleetEvent
from rlflame.storage.sweep_folder import SeedOutcome


def test_a_slot_that_is_submitted_again_begins_a_new_round():
    fleet = FleetProgress()

    def play(*events):
        for kind, slot in events:
            fleet.add_event(FleetEvent(kind, "train", slot))
        return (*map(fleet.count_tasks, ("", "running", "done")), fleet.retries)

    assert play(("submitted", 0), ("submitted", 1), ("submitted", 2)) == (3, 0, 0, 0)
    assert play(("running", 0), ("running", 1), ("done", 0), ("retried", 1)) == (3, 0, 1, 1)
    assert play(("running", 1), ("running", 2), ("lost", 2)) == (3, 1, 1, 1)
    assert play(("done", 1), ("cancelled", 2)) == (3, 0, 2, 1)
    assert play(("submitted", 0), ("done", 2), ("submitted", 1), ("submitted", 2)) == (3, 0, 0, 1)
    fleet.add_event(FleetEvent("submitted", "evaluate", 0))
    assert (fleet.purpose, fleet.count_tasks()) == ("evaluate", 1)
    fleet.add_event(FleetEvent("running", "train", 0))
    assert (fleet.purpose, fleet.count_tasks("running")) == ("train", 1)


def test_the_return_is_of_the_newest_hundred_episodes():
    progress = RunProgress(Clock())
    progress.start(make_start())
    assert progress.row.recent_return is None
    progress.add_returns([1.0] * 60)
    progress.add_returns([2.0] * 80)
    assert progress.row.recent_return == (20 * 1.0 + 80 * 2.0) / 100


def test_the_seeds_add_up():
    clock = Clock()
    display = Display(clock)
    progress = display.progress
    with display.open(make_sweep_start()):
        play_seeds(display, clock)
        assert progress.steps == 1500
        assert progress.steps_since_start == 500
        assert progress.fraction_done == (0.5 + 0.0 + 1.0 + 0.0) / 4
        assert progress.steps_per_s == 100.0
        # Of 10 and 30: the middle half of two values is half of each.
        assert format_interquartile_mean(progress) == "20.0 over 2 seeds"
        # 500 steps of seed 0 and 1,000 of seed 3 at 100 steps/s.
        assert progress.remaining_s == pytest.approx(15.0)
        end = {"event": "end", "complete": True, "steps": 1000, "evaluation": {"mean": 50.0}}
        display.show_seed_event(0, end)
        display.show_seed_end(0, SeedOutcome("finished"))
        assert progress.rows[0].score == 50.0
        assert progress.steps_per_s == 0.0
        # One seed took 5 s in all, and one waits.
        assert progress.remaining_s == pytest.approx(5.0)
        display.show_seed_end(3, SeedOutcome("stopped"))
        assert progress.remaining_s is None
    clock.now += 60.0
    assert progress.elapsed_s == 5.0


def test_a_seed_runs_as_soon_as_its_process_starts():
    display = Display(Clock())
    with display.open(make_sweep_start()):
        display.show_seed_start(3)
        assert [row.state for row in display.progress.rows.values()] == [
            *("waiting", "waiting", "finished", "running")
        ]


def test_a_budget_of_iterations_has_a_remaining_time_too():
    clock = Clock()
    progress = RunProgress(clock)
    progress.start(make_start(flags={"stop_at_steps": None, "stop_at_iterations": 10}))
    clock.now += 8.0
    progress.add_event(make_event(4, 400))
    assert progress.remaining_s == pytest.approx(12.0)
