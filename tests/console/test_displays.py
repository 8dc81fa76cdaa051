"""What a run says, to the letter: lines, JSON and the live view, with a clock that stands still."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import select
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from commands import TINY, finished, process
from rich.console import Console

from rlflame.config import resolve
from rlflame.console import output, quiet, run_text, views
from rlflame.console.base import RunResult, RunStart
from rlflame.console.json_lines import JsonDisplay
from rlflame.console.live import LiveDisplay
from rlflame.console.plain import PlainDisplay
from rlflame.console.recipe_summary import RecipeSummary
from rlflame.console.run_progress import RunProgress
from rlflame.errors import RlflameError
from rlflame.experiment import components
from rlflame.fleet.base import FleetEvent
from rlflame.terminal_text import format_count, format_duration
from rlflame.training.evaluation import EvaluationPlan, EvaluationRecord
from rlflame.training.trainer import Progress


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


#: Presets may change; the words about them may not.
SHAPE = {
    "learning.rollout.num_slots": 8,
    "learning.rollout.envs_per_slot": 8,
    "learning.rollout.steps": 32,
    "learning.network.hidden": (64, 64),
}


def beginning(**words):
    words.setdefault("continuous", components.has_continuous_actions)
    if words.get("preset") != "reinforce-classic":
        words["flags"] = {"stop_at_steps": 1_000_000, **SHAPE, **words.get("flags", {})}
    config, preset = resolve.resolve(**words)
    recipe = config.recipe.copy_with_horizon()
    return components.make_initial_checkpoint(
        recipe, components.make_env_spec(recipe.learning.environment)
    ), preset


def started(folder="runs/x", workers=2, fleet="local", resumed=False, **words) -> RunStart:
    checkpoint, preset = beginning(**words)
    return RunStart(Path(folder), checkpoint, fleet, workers, preset, resumed)


def test_the_first_line_says_that_there_was_no_cluster_to_choose():
    chosen = replace(started(), no_cluster=True)
    assert run_text.format_headline(chosen) == (
        "rlflame 0.1.0 on this machine: no Flame cluster is configured"
    )
    assert run_text.format_headline(started()) == "rlflame 0.1.0"


def test_the_first_line_says_that_both_sides_will_be_tried():
    both = replace(started(fleet="auto"), candidates=(("local", 2), ("flame", 5)))
    assert run_text.format_headline(both) == (
        "rlflame 0.1.0 on this machine and on Flame in turn, and then on the faster of them"
    )
    board = RunProgress()
    board.start(both)
    assert ("rollouts", "2 local workers and 5 Flame executors; at most 8 can help "
            "(learning.rollout.num_slots)") in run_text.format_start_lines(both, board)  # fmt: skip


def record(mean: float, spread: float = 10.0) -> EvaluationRecord:
    low, high = mean - spread, mean + spread
    returns = (low, mean, high)
    numbers = (mean, spread, mean, low, high, low, high, 200.0)
    return EvaluationRecord(3, 0, False, 500, *numbers, returns, (100, 200, 300))


def ended(steps: int, episodes: int, **words) -> RunResult:
    found = {
        "folder": Path("runs/x"),
        "progress": Progress(7, steps, episodes),
        "complete": True,
        "has_trained": True,
        "state_digest": "a" * 64,
        "digest": "b" * 64,
        "evaluation": record(450.0),
        "best": record(480.0),
        "resume_command": "rlflame resume runs/x --steps 40960",
        "evaluation_command": "rlflame eval runs/x/best.safetensors",
    }
    return RunResult(**{**found, **words})


def metrics(iteration: int, steps: int, episodes: int, **more):
    return {"iteration": iteration, "steps": steps, "episodes": episodes, **more}


def test_lines_of_a_ppo_run():
    said: list[str] = []
    clock = Clock()
    show = PlainDisplay(said.append, said.append, clock)
    with show.open(started(environment="cartpole", flags={"stop_at_steps": 20_000})):
        for iteration in range(1, 11):
            clock.now += 2.0
            returns = [float(iteration)] * 10
            show.show_iteration(metrics(iteration, 2048 * iteration, 10 * iteration), returns)
            if iteration == 5:
                show.show_evaluation(10_240, record(100.0), True)
                show.show_fleet_event(
                    FleetEvent("retried", "train", 3, "killed by signal 9, SIGKILL")
                )
    clock.now += 10.0
    show.show_result(ended(20_480, 100))
    assert said == [
        "rlflame 0.1.0",
        "  environment  CartPole-v1: 4 observations, 2 discrete actions",
        "  algorithm    PPO, preset cartpole-ppo, seed 0",
        "  budget       20,000 steps in 10 iterations",
        "  batch        8 slots x 8 environments x 32 steps",
        "  policy       4-64-64-2 tanh, observations normalised",
        "  learner      numpy, 1 thread",
        "  rollouts     2 local workers; at most 8 can help (learning.rollout.num_slots)",
        "  folder       runs/x",
        " 10%  step       2,048  return       1.00    1,024 steps/s  0:18 left",
        " 20%  step       4,096  return       1.50    1,024 steps/s  0:16 left",
        " 31%  step       6,144  return       2.00    1,024 steps/s  0:14 left",
        " 41%  step       8,192  return       2.50    1,024 steps/s  0:12 left",
        " 51%  step      10,240  return       3.00    1,024 steps/s  0:10 left",
        "Evaluation at step 10,240: 100.0, 95% interval [90.0, 110.0] over 3 episodes, "
        "the best so far",
        "Slot 3 is collected again; its worker: killed by signal 9, SIGKILL.",
        " 61%  step      12,288  return       3.50    1,024 steps/s  0:08 left",
        " 72%  step      14,336  return       4.00    1,024 steps/s  0:06 left",
        " 82%  step      16,384  return       4.50    1,024 steps/s  0:04 left",
        " 92%  step      18,432  return       5.00    1,024 steps/s  0:02 left",
        "100%  step      20,480  return       5.50    1,024 steps/s",
        "Finished",
        "  time        0:30, 20,480 steps (683/s), 100 episodes (3.3/s)",
        "  reward      5.50 (final mean, exploring)",
        "  evaluation  450.0, 95% interval [440.0, 460.0] over 3 episodes",
        "  best        480.0, 95% interval [470.0, 490.0] over 3 episodes",
        "  files       runs/x",
        "  next        rlflame eval runs/x/best.safetensors",
    ]
    assert max(map(len, said)) <= 100
    # What does not depend on the run's own words fits a narrow terminal.
    assert max(len(line) for line in said if not line.startswith("Eval")) <= 80


def test_lines_of_a_reinforce_run():
    said: list[str] = []
    clock = Clock()
    show = PlainDisplay(said.append, said.append, clock)
    start = started(preset="reinforce-classic", environment="hopper", workers=100, folder="r")
    with show.open(start):
        for iteration in range(1, 101):
            clock.now += 1.0
            line = metrics(
                iteration,
                1000 * iteration,
                100 * iteration,
                episode_return_mean=2.5 * iteration,
                loss=-0.5,
            )
            show.show_iteration(line, [2.5 * iteration] * 100)
    show.show_result(ended(100_000, 10_000, best=None, evaluation=record(450.0)))
    assert said[:10] == [
        "rlflame 0.1.0",
        "  environment  Hopper-v5: 11 observations, 3 continuous actions",
        "  algorithm    REINFORCE, preset reinforce-classic, seed 0",
        "  budget       100 iterations of 100 episodes (10,000 episodes)",
        "  batch        100 slots x 1 environment, whole episodes (at most 1,000 steps)",
        "  policy       11-256-256-3 relu",
        "  learner      numpy, 1 thread",
        "  rollouts     100 local workers, the most that can help (learning.rollout.num_slots)",
        "  folder       r",
        "Iteration  10/100  mean reward      25.00  loss    -0.5000  1,000 steps/s",
    ]
    assert [line.split()[1] for line in said if line.startswith("Iteration")] == [
        f"{n}/100" for n in range(10, 101, 10)
    ]
    assert said[-5:] == [
        "Finished",
        "  time        1:40, 100,000 steps (1,000/s), 10,000 episodes (100.0/s)",
        "  reward      250.00 (final mean, exploring)",
        "  evaluation  450.0, 95% interval [440.0, 460.0] over 3 episodes",
        "  files       runs/x",
    ]


def test_a_long_run_says_little_and_a_slow_one_something():
    said: list[str] = []
    clock = Clock()
    show = PlainDisplay(said.append, said.append, clock)
    with show.open(started(flags={"stop_at_steps": 2048 * 1000})):
        banner = len(said)
        for iteration in range(1, 501):
            clock.now += 0.1
            show.show_iteration(metrics(iteration, 2048 * iteration, 0), [])
        assert len(said) - banner == 10  # one for every twentieth of the budget
        for iteration in range(501, 511):
            clock.now += 100.0
            show.show_iteration(metrics(iteration, 2048 * iteration, 0), [])
        assert len(said) - banner == 13  # and one for every five minutes of silence


def test_a_resumed_run_says_where_it_stands_and_counts_its_own_speed():
    said: list[str] = []
    clock = Clock()
    show = PlainDisplay(said.append, said.append, clock)
    start = started(resumed=True, flags={"stop_at_steps": 20_000}, fleet="inline", workers=1)
    checkpoint = start.checkpoint
    from dataclasses import replace

    start = replace(
        start, checkpoint=replace(checkpoint, progress=Progress(5, 10_240, 44)), preset=""
    )
    with show.open(start):
        clock.now += 2.0
        show.show_iteration(metrics(6, 12_288, 50), [1.0])
    show.show_result(ended(12_288, 50, complete=False, best=None))
    assert said[-8:] == [
        "  rollouts     in this process",
        "  folder       runs/x",
        "  resumed      at step 10,240, after 5 iterations",
        " 61%  step      12,288  return       1.00    1,024 steps/s  0:08 left",
        "Stopped",
        "  time    0:02, 2,048 steps (1,024/s), 6 episodes (3.0/s)",
        "  reward  1.00 (final mean, exploring)",
        "  files   runs/x",
    ]


def test_a_run_that_was_finished_says_how_to_go_on():
    said: list[str] = []
    PlainDisplay(said.append, said.append, Clock()).show_result(
        ended(20_480, 100, has_trained=False)
    )
    assert said[0] == "This run was finished already, at step 20,480"
    assert "  to go on    rlflame resume runs/x --steps 40960" in said


def test_json_of_a_run():
    said: list[str] = []
    clock = Clock()
    show = JsonDisplay(said.append, clock)
    with show.open(started(environment="cartpole", flags={"stop_at_steps": 2000})):
        clock.now += 2.0
        show.show_iteration(metrics(1, 2048, 9, loss=float("nan"), std=None), [3.0, 5.0])
        show.show_evaluation(2048, record(7.0), False)
        show.show_checkpoint(
            Path("runs/x/checkpoints/step-000002048.safetensors"), Progress(1, 2048, 9)
        )
        show.show_fleet_event(FleetEvent("running", "train", 1))
        show.show_fleet_event(FleetEvent("retried", "train", 1, "did not answer in time"))
        show.show_note("a word")
    show.show_result(ended(2048, 9, best=None, evaluation=None))
    start, *rest = map(json.loads, said)
    assert start == {
        "event": "start",
        "version": "0.1.0",
        "folder": "runs/x",
        "resumed": False,
        "steps": 0,
        "fleet": "local",
        "workers": 2,
        "environment": "CartPole-v1",
        "env_kwargs": {},
        "obs_dim": 4,
        "act_dim": 2,
        "continuous": False,
        "algorithm": "ppo",
        "preset": "cartpole-ppo",
        "seed": 0,
        "layers": [4, 64, 64, 2],
        "stop_at_steps": 2000,
        "stop_at_iterations": None,
        "iterations": 1,
        "num_slots": 8,
        "envs_per_slot": 8,
        "steps_per_fragment": 32,
        "unit": "steps",
        "episodes_per_iteration": None,
        "most_workers": 8,
        "provider": "numpy",
        "threads": 1,
        "replay_bytes": None,
    }
    assert rest == [
        {
            "event": "iteration",
            "iteration": 1,
            "steps": 2048,
            "episodes": 9,
            "loss": None,
            "std": None,
        },
        {
            "event": "evaluation",
            "steps": 2048,
            "best": False,
            "episodes": 3,
            "seed": 0,
            "stochastic": False,
            "max_episode_steps": 500,
            "mean": 7.0,
            "std": 10.0,
            "iqm": 7.0,
            "low": -3.0,
            "high": 17.0,
            "min": -3.0,
            "max": 17.0,
            "length_mean": 200.0,
            "returns": [-3.0, 7.0, 17.0],
            "lengths": [100, 200, 300],
        },
        {
            "event": "checkpoint",
            "path": "runs/x/checkpoints/step-000002048.safetensors",
            "steps": 2048,
        },
        {"event": "retried", "slot": 1, "purpose": "train", "reason": "did not answer in time"},
        {"event": "note", "text": "a word"},
        {
            "event": "end",
            "folder": "runs/x",
            "complete": True,
            "began": True,
            "steps": 2048,
            "iterations": 7,
            "episodes": 9,
            "seconds": 2.0,
            "steps_per_s": 1024.0,
            "episodes_per_s": 4.5,
            "final_mean_reward": 4.0,
            "state_digest": "a" * 64,
            "digest": "b" * 64,
            "evaluation": None,
            "best": None,
        },
    ]


def pictured(show: LiveDisplay, width: int) -> list[str]:
    out = io.StringIO()
    Console(file=out, width=width, color_system=None, highlight=False).print(show.render_view())
    return [line.rstrip() for line in out.getvalue().splitlines()]


@pytest.mark.parametrize("width", [80, 140])
def test_the_live_view(width):
    clock = Clock()
    out = io.StringIO()
    console = Console(file=out, width=width, color_system=None, highlight=False)
    show = LiveDisplay(console, clock)
    notes: list[str] = []
    show.show_note = notes.append
    with show.open(started(environment="hopper")):
        for iteration in range(1, 101):
            clock.now += 0.5
            line = metrics(
                iteration,
                2048 * iteration,
                7 * iteration,
                loss=0.0012345,
                approx_kl=0.0101,
                clip_fraction=0.085,
                explained_variance=0.875,
                learning_rate=2.5e-4,
            )
            show.show_iteration(line, [12.5] * 7)
        show.show_evaluation(200_000, record(2031.25, 20.0), True)
        show.show_checkpoint(Path("x"), Progress(100, 200_000, 700))
        for slot in range(8):
            show.show_fleet_event(FleetEvent("submitted", "train", slot))
        for slot in range(5):
            show.show_fleet_event(FleetEvent("running", "train", slot))
        show.show_fleet_event(FleetEvent("done", "train", 0))
        show.show_fleet_event(FleetEvent("retried", "train", 1, "killed by signal 9, SIGKILL"))
        bar = "━" * 5 + "╸" + " " * 22  # in colours, the rest of it is drawn too
        assert pictured(show, width) == [
            "",
            f"   20%  {bar}  0:50 gone  3:14 left",
            "  progress     step 204,800, iteration 100, episode 700, 4,096 steps/s",
            "  rollouts     8 submitted, 3 running, 1 done, 1 retried (1 in all)",
            "  return       12.50 (last 100 episodes)",
            "  learning     loss 0.00123, kl 0.0101, clipped 8%, explained variance 0.88",
            "  evaluation   2,031.2 [2,011.2, 2,051.2] at step 200,000, the best so far",
            "  saved        step 200,000",
        ]
    assert notes == ["Slot 1 is collected again; its worker: killed by signal 9, SIGKILL."]


# The board: who is where


def test_however_a_process_ends_its_terminal_has_a_cursor():
    out = io.StringIO()
    show = LiveDisplay(Console(file=out, width=80, force_terminal=True), Clock())
    with show.open(started()):
        # What a terminal would have seen if the process were killed here.
        assert out.getvalue().rfind("\x1b[?25h") > out.getvalue().rfind("\x1b[?25l") >= 0


def test_a_slot_that_is_submitted_again_begins_a_new_round():
    board = RunProgress(Clock())

    def tell(*events):
        for kind, slot in events:
            board.add_fleet_event(FleetEvent(kind, "train", slot))
        fanout = board.task_counts
        return (fanout.submitted, fanout.running, fanout.finished, fanout.retried)

    assert tell(("submitted", 0), ("submitted", 1), ("submitted", 2)) == (3, 0, 0, 0)
    assert tell(("running", 0), ("running", 1)) == (3, 2, 0, 0)
    assert tell(("done", 0), ("retried", 1)) == (3, 0, 1, 1)
    assert tell(("running", 1), ("running", 2), ("lost", 2)) == (3, 1, 1, 1)
    assert tell(("done", 1), ("cancelled", 2)) == (3, 0, 2, 1)
    assert tell(("submitted", 0), ("submitted", 1)) == (2, 0, 0, 0)
    assert board.total_retried == 1
    board.add_fleet_event(FleetEvent("submitted", "evaluate", 0))
    assert board.is_evaluating
    assert board.task_counts.submitted == 1
    board.add_fleet_event(FleetEvent("running", "train", 0))
    assert not board.is_evaluating


def test_the_return_is_of_the_last_hundred_episodes():
    board = RunProgress(Clock())
    board.start(started())
    assert board.recent_return is None
    board.add_iteration(metrics(1, 100, 60), [1.0] * 60)
    board.add_iteration(metrics(2, 200, 140), [2.0] * 80)
    assert board.recent_return == (20 * 1.0 + 80 * 2.0) / 100


# Words


@pytest.mark.parametrize(
    ("words", "iterations", "budget"),
    [
        ({"flags": {"stop_at_steps": 2048}}, 1, "2,048 steps in 1 iteration"),
        ({"flags": {"stop_at_steps": 2049}}, 2, "2,049 steps in 2 iterations"),
        ({"algorithm": "reinforce", "flags": {"stop_at_steps": 5000}}, None, "5,000 steps"),
        (
            {
                "algorithm": "reinforce",
                "flags": {"stop_at_steps": 5000, "stop_at_iterations": 3},
            },
            None,
            "3 iterations of 64 episodes (192 episodes), or 5,000 steps",
        ),
        ({"flags": {"stop_at_steps": None, "stop_at_iterations": 3}}, 3, "3 iterations"),
    ],
)
def test_how_many_iterations_there_will_be(words, iterations, budget):
    checkpoint, preset = beginning(**words)
    facts = RecipeSummary(checkpoint.recipe, checkpoint.env, preset)
    assert (facts.iterations, facts.format_budget()) == (iterations, budget)


def test_numbers_in_words():
    assert [format_count(0, "step"), format_count(1, "step"), format_count(2000, "step")] == [
        "0 steps",
        "1 step",
        "2,000 steps",
    ]
    assert [format_duration(s) for s in (0.4, 59.6, 754, 11_045)] == [
        "0:00",
        "1:00",
        "12:34",
        "3:04:05",
    ]


def test_an_error_is_a_sentence_and_the_next_command(capsys):
    error = RlflameError("Seven is not prime.", "rlflame --help", "the environment's own words\n")
    output.print_error(error)
    heard = capsys.readouterr()
    assert heard.out == ""
    assert heard.err == (
        "the environment's own words\nrlflame: Seven is not prime.\n  hint: rlflame --help\n"
    )


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_tally_is_one_line_on_a_terminal_and_goes_away(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    events = [FleetEvent("submitted", "evaluate", slot) for slot in range(3)]
    events += [FleetEvent(kind, "evaluate", 1) for kind in ("running", "done")]
    terminal, pipe = Terminal(), io.StringIO()
    for stream in (terminal, pipe):
        with quiet.StatusLine(stream) as tally:
            for event in events:
                tally.show_fleet_event(event)
    assert pipe.getvalue() == ""
    assert "\n" not in terminal.getvalue()
    lines = terminal.getvalue().split("\r\x1b[K")
    assert lines[-2:] == ["1 of 3 groups of episodes played", ""]
    monkeypatch.setenv("TERM", "dumb")
    with quiet.StatusLine(dumb := Terminal()) as tally:
        tally.show_fleet_event(events[0])
    assert dumb.getvalue() == ""


def test_which_display_for_which_mode(monkeypatch):
    assert isinstance(views.make_display("json"), JsonDisplay)
    assert isinstance(views.make_display("quiet"), quiet.QuietDisplay)
    assert isinstance(views.make_display("plain"), PlainDisplay)
    assert isinstance(views.make_display("live"), LiveDisplay)
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    assert isinstance(views.make_display("auto"), PlainDisplay)
    monkeypatch.setattr(sys, "stdout", None)
    assert isinstance(views.make_display("auto"), PlainDisplay)


# The real thing


def seen_on_a_terminal(*words, environment) -> str:
    """What a command writes to a terminal of its own."""
    ours, theirs = pty.openpty()
    running = process(*words, stdout=theirs, stderr=theirs, environment=environment)
    os.close(theirs)
    seen = b""
    while select.select([ours], [], [], 60.0)[0]:
        try:
            data = os.read(ours, 65536)
        except OSError:  # Linux says so when the other side is closed
            break
        if not data:
            break
        seen += data
    os.close(ours)
    assert running.wait(60) == 0
    return seen.decode()


def plainly(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text)


@pytest.mark.parametrize(
    ("environment", "escapes", "colours"),
    [
        ({"TERM": "xterm-256color"}, True, True),
        ({"TERM": "xterm-256color", "NO_COLOR": "1"}, True, False),
        ({"TERM": "dumb"}, False, False),
    ],
)
def test_a_terminal_gets_a_view_that_leaves_it_as_it_was(tmp_path, environment, escapes, colours):
    words = ("train", *TINY, "--steps", "640", "--out", tmp_path / "x")
    environment = {"COLUMNS": "80", "LINES": "40", "NO_COLOR": "", **environment}
    seen = seen_on_a_terminal(*words, environment=environment)
    assert ("\x1b[" in seen) == escapes
    assert bool(re.search(r"\x1b\[(?:\d+;)*(?:3[0-8]|9[0-7])(?:;\d+)*m", seen)) == colours
    assert "CartPole-v1: 4 observations, 2 discrete actions" in plainly(seen)
    assert "rlflame eval" in plainly(seen)
    if escapes:
        assert "100%" in plainly(seen) or "progress" in plainly(seen)
        assert seen.rfind("\x1b[?25h") > seen.rfind("\x1b[?25l")


def test_a_pipe_gets_no_escapes(tmp_path):
    words = ("train", *TINY, "--steps", "128", "--out", tmp_path / "x")
    spoken = finished(process(*words, environment={"TERM": "xterm", "FORCE_COLOR": "1"}))
    assert spoken.code == 0
    assert "\x1b" not in spoken.out + spoken.err
    assert spoken.err == ""


def test_nobody_listening_is_no_reason_to_stop(tmp_path):
    """The reader of a run's report goes away after the first line; the run does not."""
    running = process("train", *TINY, "--steps", "6400", "--out", tmp_path / "x")
    assert running.stdout.readline() == "rlflame 0.1.0\n"
    running.stdout.close()
    assert running.wait(60) == 0
    assert running.stderr.read() == ""
    assert (tmp_path / "x/result.json").exists()


def test_a_plan_is_not_a_record():
    """Guards the fixture above: a record has a number for each field of the evaluation's list."""
    assert set(record(1.0).as_dict()) > {"mean", "low", "high"}
    assert EvaluationPlan(3).episodes == record(1.0).episodes
