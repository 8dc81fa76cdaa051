"""The log lines of runs and sweeps, with a fake clock."""

from __future__ import annotations

from screens import (
    Clock,
    make_event,
    make_metrics,
    make_record,
    make_result,
    make_start,
    make_sweep_result,
    make_sweep_start,
    play_seeds,
)

from rlflame.console.plain import PlainDisplay
from rlflame.fleet.base import FleetEvent
from rlflame.storage.sweep_folder import SeedOutcome
from rlflame.training.trainer import Progress


def test_lines_of_a_ppo_run(capfd, golden):
    clock = Clock()
    display = PlainDisplay(clock)
    with display.open(make_start(environment="cartpole", flags={"stop_at_steps": 20_000})):
        for iteration in range(1, 11):
            clock.now += 2.0
            metrics = make_metrics(iteration, 2048 * iteration, 10 * iteration)
            display.show_iteration(metrics, [float(iteration)] * 10)
            if iteration == 5:
                display.show_evaluation(10_240, make_record(100.0), True)
                display.show_fleet_event(FleetEvent("retried", "train", 3, "killed by signal 9"))
    clock.now += 10.0
    display.show_result(make_result(20_480, 100))
    out, err = capfd.readouterr()
    golden("plain_run.txt", out)
    assert err == "Slot 3 is collected again. Reason: killed by signal 9.\n"
    assert max(map(len, out.splitlines())) <= 100


def test_a_run_without_a_finished_episode_says_so_and_shows_the_last_evaluation(capfd):
    clock = Clock()
    display = PlainDisplay(clock)
    with display.open(make_start(environment="hopper", flags={"stop_at_steps": 8192})):
        for iteration in range(1, 5):
            clock.now += 1.0
            metrics = make_metrics(iteration, 2048 * iteration, 0, episode_return_mean=None)
            display.show_iteration(metrics, [])
            if iteration == 2:
                display.show_evaluation(4096, make_record(12.5), True)
    display.show_result(make_result(8192, 0))
    lines = capfd.readouterr().out.splitlines()
    progress = [line for line in lines if "steps/s" in line and "% " in line[:6]]
    assert len(progress) == 4
    assert all("no episode has ended yet" in line for line in progress)
    assert ["evaluation 12.5" in line for line in progress] == [False, False, True, True]
    assert "  return      no episode has ended yet" in lines

    start = make_start(environment="hopper", is_resume=True, progress=Progress(1, 2048, 3))
    with display.open(start):
        display.show_iteration(make_metrics(2, 1_000_000, 3, episode_return_mean=None), [])
    assert "no episode has ended since the run was resumed" in capfd.readouterr().out


def test_a_run_of_whole_episodes_has_a_line_every_ten_iterations(capfd, golden):
    clock = Clock()
    display = PlainDisplay(clock)
    start = make_start(preset="reinforce-classic", environment="hopper", workers=100, folder="r")
    with display.open(start):
        for iteration in range(1, 101):
            clock.now += 1.0
            metrics = make_metrics(
                iteration, 1000 * iteration, 100 * iteration,
                episode_return_mean=2.5 * iteration, loss=-0.5,
            )  # fmt: skip
            display.show_iteration(metrics, [2.5 * iteration] * 100)
    display.show_result(make_result(100_000, 10_000, best=None))
    out = capfd.readouterr().out
    golden("plain_whole_episodes.txt", out)
    positions = [line.split()[1] for line in out.splitlines() if line.startswith("Iteration")]
    assert positions == [f"{iteration}/100" for iteration in range(10, 101, 10)]


def test_a_long_run_has_few_lines_and_a_slow_one_some(capfd):
    clock = Clock()
    display = PlainDisplay(clock)
    with display.open(make_start(flags={"stop_at_steps": 2048 * 1000})):
        capfd.readouterr()
        for iteration in range(1, 501):
            clock.now += 0.1
            display.show_iteration(make_metrics(iteration, 2048 * iteration, 0), [])
        assert len(capfd.readouterr().out.splitlines()) == 10  # one for each part of the budget
        for iteration in range(501, 511):
            clock.now += 100.0
            display.show_iteration(make_metrics(iteration, 2048 * iteration, 0), [])
        assert len(capfd.readouterr().out.splitlines()) == 3  # and one every five minutes


def test_a_resumed_run_counts_its_own_speed(capfd, golden):
    clock = Clock()
    display = PlainDisplay(clock)
    start = make_start(
        is_resume=True, flags={"stop_at_steps": 20_000}, fleet="inline", workers=1,
        progress=Progress(5, 10_240, 44),
    )  # fmt: skip
    with display.open(start):
        clock.now += 2.0
        display.show_iteration(make_metrics(6, 12_288, 50), [1.0])
    display.show_result(make_result(12_288, 50, complete=False, best=None))
    golden("plain_resumed_run.txt", capfd.readouterr().out)


def test_a_run_that_was_finished_says_how_to_go_on(capfd, golden):
    PlainDisplay(Clock()).show_result(make_result(20_480, 100, has_trained=False))
    golden("plain_finished_run.txt", capfd.readouterr().out)


def test_lines_of_a_sweep(capfd, golden):
    clock = Clock()
    display = PlainDisplay(clock)
    with display.open(make_sweep_start(is_resume=True)):
        play_seeds(display, clock)
        display.show_fleet_event(FleetEvent("phase", "", 0, "waiting for an executor"))
        display.show_seed_event(0, make_event(7, 700))
        display.show_seed_event(0, make_event(7, 710))  # in the same part of the budget
        display.show_seed_end(0, SeedOutcome("finished"))
    clock.now += 5.0
    display.show_result(make_sweep_result())
    out, err = capfd.readouterr()
    golden("plain_sweep.txt", out)
    golden("plain_sweep_notes.txt", err)


def test_a_sweep_that_was_finished_has_no_time(capfd):
    PlainDisplay(Clock()).show_result(make_sweep_result(has_trained=False))
    lines = capfd.readouterr().out.splitlines()
    assert lines[0] == "All seeds have already finished."
    assert not any(line.startswith("  time") for line in lines)


def test_a_note_that_several_seeds_share_is_printed_once(capfd):
    display = PlainDisplay(Clock())
    with display.open(make_sweep_start()):
        seeds = [*display.progress.rows][:2]
        for text in ("the environment keeps state", "the disk is full"):
            for seed in seeds:
                display.show_seed_event(seed, {"event": "note", "text": text})
    assert capfd.readouterr().err.splitlines() == [
        f"Seed {seeds[0]}: the environment keeps state",
        f"Seed {seeds[0]}: the disk is full",
    ]
