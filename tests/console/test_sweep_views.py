"""What is said of a job of seeds while it runs and when it has ended, with times made up."""

from __future__ import annotations

import io
import re
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from rlflame import statistics
from rlflame.config.recipe import Recipe
from rlflame.console import sweep_displays
from rlflame.console.recipe_summary import RecipeSummary
from rlflame.console.sweep_base import SweepResult, SweepStart
from rlflame.console.sweep_live import LiveSweepDisplay
from rlflame.console.sweep_progress import SeedProgress, SweepProgress
from rlflame.console.sweep_views import make_sweep_display
from rlflame.errors import RlflameError
from rlflame.experiment import components
from rlflame.experiment.sweep.resources import SweepResources
from rlflame.storage.sweep_result import SeedOutcome, SeedResult, SweepSummary


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def board(clock: Clock) -> SweepProgress:
    """Seed 0 at half of 1,000 steps after 5 s, seed 1 failed, seed 2 finished before, 3 waiting."""
    found = SweepProgress([0, 1, 2, 3], stop_at_steps=1000, stop_at_iterations=None, clock=clock)
    found.restore_seed(2, 1000, "finished", 30.0)
    found.mark_running(0)
    found.add_event(0, {"event": "start", "steps": 0})
    found.add_event(0, {"event": "evaluation", "steps": 250, "mean": 10.0})
    clock.now += 5.0
    found.add_event(0, {"event": "iteration", "steps": 500, "iteration": 5})
    found.mark_running(1)
    found.add_outcome(1, SeedOutcome("failed", RlflameError("Its process was killed.")))
    return found


def start(board: SweepProgress, **changes) -> SweepStart:
    recipe = Recipe(stop_at_steps=1000)
    facts = RecipeSummary(
        recipe, components.make_env_spec(recipe.learning.environment), "cartpole-ppo"
    )
    given = {
        "fleet": "here",
        "workers": 2,
        "resources": SweepResources(2, 0),
        "resumed": False,
        **changes,
    }
    return SweepStart(Path("runs/x"), facts, tuple(board.rows), **given)


def result(**changes) -> SweepResult:
    def seed(number: int, mean: float) -> SeedResult:
        scored = {"mean": mean, "low": mean - 1, "high": mean + 1, "std": 1.0, "episodes": 20}
        return SeedResult(number, Path(f"runs/x/seed-{number}"), "finished", 1000, 10, 20, scored)

    finals = np.array([10.0, 20.0, 30.0])
    summary = SweepSummary(
        "CartPole-v1", "ppo", tuple(seed(i, mean) for i, mean in enumerate(finals)),
        statistics.summarise(finals), 0, (750, statistics.MeanStd(21.0, 2.0)),
        statistics.MeanStd(19.5, 3.0),
    )  # fmt: skip
    return SweepResult(
        Path("runs/x"), summary, {}, **{"has_trained": True, "plot": None, **changes}
    )


def test_the_board_adds_up(board: SweepProgress, clock: Clock) -> None:
    assert board.steps == 1500
    assert board.steps_since_start == 500
    assert board.fraction_done == (0.5 + 0.0 + 1.0 + 0.0) / 4
    assert board.steps_per_s == 100.0
    # Of 10 and 30; the middle half of two is half of each.
    assert board.iqm == (20.0, 2)
    # 500 steps of seed 0 and 1,000 of seed 3 at 100 steps/s.
    assert board.remaining_s == pytest.approx(15.0)
    board.add_event(
        0, {"event": "end", "complete": True, "steps": 1000, "evaluation": {"mean": 50.0}}
    )
    board.add_outcome(0, SeedOutcome("finished"))
    assert board.rows[0].evaluation == 50.0
    assert board.steps_per_s == 0.0


def test_lines_of_a_log(board: SweepProgress) -> None:
    said: list[str] = []
    show = sweep_displays.PlainSweepDisplay(said.append, said.append)
    with show.open(start(board, resumed=True), board):
        assert any("0-3 (4 runs), 2 side by side, each in a process of its own" in x for x in said)
        assert any("1 of 4 finished before" in line for line in said)
        said.clear()
        board.add_event(0, {"event": "iteration", "steps": 700, "iteration": 7})
        show.show_event(0, {"event": "iteration"})
        (line,) = said
        assert line.startswith(" 42%  step 1,700, ")
        assert "1 running, 1 finished, 1 failed; IQM so far 20.0 of 2 seeds" in line
        show.show_event(0, {"event": "iteration"})
        assert len(said) == 1
        show.show_outcome(1, SeedOutcome("failed", RlflameError("It broke.", detail="Traceback\n")))
        assert said[-1] == "Seed 1 failed: It broke.\nTraceback"
    said.clear()
    show.show_result(result())
    assert said[0] == "Finished"
    words = {line.split()[0]: " ".join(line.split()[1:]) for line in said if line.strip()}
    # Of three, the middle half is a quarter of the ends and the whole of the middle.
    assert words["IQM"].startswith("20.0, 95% interval [")
    assert words["IQM"].endswith("of 3 seeds, final evaluations")
    assert words["mean"] == "20.0 ± 10.0"
    assert words["worst"] == "10.0, seed 0"
    assert words["P2"] == "21.0 ± 2.0, the best mean over seeds, at step 750"
    assert words["P4"] == "19.5 ± 3.0, the last 5% of the evaluations"
    assert words["next"] == "rlflame report runs/x"


def test_where_seeds_run_is_said(board: SweepProgress) -> None:
    for changes, words in (
        ({"resources": SweepResources(2, 4)}, "2 side by side, each with 4 local workers"),
        (
            {"fleet": "flame", "workers": 20, "resources": SweepResources(4, 0)},
            "4 side by side, on one fleet: 20 executors at most",
        ),
    ):
        assert (
            words
            in dict(sweep_displays.format_start_lines(start(board, **changes), board))["seeds"]
        )


@pytest.mark.parametrize("height", [40, 9])
def test_a_line_a_seed_on_a_terminal(board: SweepProgress, height: int) -> None:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=100, height=height, highlight=False)
    show = LiveSweepDisplay(console)
    with show.open(start(board), board):
        console.print(show.render_view())
    lines = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", stream.getvalue()).splitlines()

    def rows(word: str) -> list[str]:
        return [line for line in lines if f"  {word} " in line]

    assert any("500" in line and "10.0" in line and "100" in line for line in rows("running"))
    assert any("IQM so far 20.0 of 2 seeds" in line for line in lines)
    assert any("0:05 gone, 0:15 left" in line for line in lines)
    assert bool(rows("waiting")) == (height == 40)
    assert any("and 2 more" in line for line in lines) == (height == 9)
    assert "\x1b[?25h" in stream.getvalue()


@pytest.mark.parametrize(
    ("width", "columns"),
    [
        (60, "seed steps evaluation steps/s"),
        (50, "seed steps evaluation steps/s"),
        (40, "seed steps evaluation"),
        (30, "seed evaluation"),
        (20, "seed"),
    ],
)
def test_a_narrow_terminal_has_fewer_columns_and_whole_ones(
    board: SweepProgress, width: int, columns: str
) -> None:
    stream = io.StringIO()
    console = Console(file=stream, width=width, height=40, highlight=False)
    show = LiveSweepDisplay(console)
    show._progress = board
    console.print(show.render_view())
    lines = stream.getvalue().splitlines()
    assert "…" not in stream.getvalue()
    assert " ".join(lines[1].split()) == columns
    assert any("running" in line for line in lines)
    assert max(map(len, lines)) <= width


def test_those_that_run_are_shown_first() -> None:
    states = ["finished", "running", "waiting", "failed", "running"]
    rows = [SeedProgress(seed, state) for seed, state in enumerate(states)]
    kept, left = sweep_displays.select_rows(rows, 4)
    assert ([row.seed for row in kept], left) == ([1, 3, 4], 2)
    assert sweep_displays.select_rows(rows, 5) == (rows, 0)


def test_which_way_it_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = {
        mode: type(make_sweep_display(mode)).__name__ for mode in ("json", "quiet", "plain", "live")
    }
    assert kinds == {
        "json": "JsonSweepDisplay", "quiet": "QuietSweepDisplay",
        "plain": "PlainSweepDisplay", "live": "LiveSweepDisplay",
    }  # fmt: skip
    assert type(make_sweep_display("auto")).__name__ == "PlainSweepDisplay"
