"""Time whole trainings by recipe and number of learners, and stable-baselines3."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from race_recipes import SOURCE, Variant, make_sb3_request

from rlflame.analysis.curves import smooth_values
from rlflame.analysis.plots.chart import Chart, Panels, Series
from rlflame.analysis.plots.matplotlib_backend import render_image
from rlflame.analysis.report.bench_comparison import Measurement
from rlflame.analysis.report.document import make_table
from rlflame.bench.case import Case, Clock, Stopwatch, warm_up
from rlflame.bench.learners import run_with_learners
from rlflame.bench.result import BenchResult, has_equal_digests
from rlflame.bench.runner import BenchSession
from rlflame.config.nested_dict import flatten
from rlflame.config.recipe import LearningSettings
from rlflame.errors import RlflameError
from rlflame.rollout import blas
from rlflame.rollout.search_path import make_child_path
from rlflame.rollout.task import Fragment
from rlflame.storage.safetensors_file import write_atomically
from rlflame.training.trainer import Progress, StopRequest

SB3_NAME = "stable-baselines3"
SB3_SIDE = Path(__file__).with_name("sb3_side.py")
#: A return is the mean of this number of episodes, in the table and in the curves.
EPISODES = 20
CSV_HEAD = ("learners", "recipe", "seconds", "steps", "case", "final_return", "retried")
COLUMNS = (
    "recipe",
    "learners",
    ("batch", "batch", ","),
    ("learning rate", "learning_rate", "g"),
    ("seconds", "seconds", ",.2f"),
    ("total steps", "steps", ","),
    ("speed-up", "speedup", ".2fx"),
    ("ideal", "ideal", ".3gx"),
    ("exchanging", "exchange_share", ".1%"),
    ("final return", "final_return", ",.1f"),
)


@dataclass(frozen=True, slots=True)
class RaceRun:
    """A complete training. An episode is (last step, second of its end, return)."""

    seconds: float
    learn_s: float | None
    exchange_s: float | None
    steps: int
    episodes: list[tuple[int, float, float]]
    weights: str
    #: The number of tasks that were given to a second worker, which costs time.
    retried: int = 0

    @property
    def final_return(self) -> float | None:
        newest = [episode_return for _, _, episode_return in self.episodes[-EPISODES:]]
        return sum(newest) / len(newest) if newest else None


@dataclass(slots=True)
class Runner:
    """A recipe with a number of learners, or stable-baselines3 without a variant."""

    name: str
    kind: str
    learners: int
    variant: Variant | None
    repetitions: list[RaceRun] = field(default_factory=list)
    version: str = ""
    sb3_request: dict[str, Any] = field(default_factory=dict)

    @property
    def work(self) -> dict[str, Any]:
        """The settings that determine the work of a race, without the seed."""
        if self.variant:
            return self.variant.case.work
        settings = dict(flatten(self.sb3_request, leaves=("kwargs",)))
        del settings["arguments.seed"]
        return settings

    @property
    def seconds_per_step(self) -> float:
        return median(race.seconds / race.steps for race in self.repetitions)


class EpisodeStopwatch(Stopwatch):
    """A stopwatch that records all episodes and estimates when each of them ended."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(clock)
        self.episodes: list[tuple[int, float, float]] = []
        self._start_s = self._iteration_start_s = clock()

    def record_iteration(
        self, progress: Progress, metrics: dict[str, Any], fragments: Sequence[Fragment]
    ) -> None:
        before, now = self.progress.steps, self.clock()
        episodes = []
        for fragment in fragments:
            for episode in fragment.episodes:
                share = (episode.end + 1) / len(fragment.rewards)
                steps = before + round(share * (progress.steps - before))
                end_s = self._iteration_start_s + share * (now - self._iteration_start_s)
                episodes.append((steps, end_s - self._start_s, episode.episode_return))
        self.episodes += sorted(episodes)
        self._iteration_start_s = now
        super().record_iteration(progress, metrics, fragments)


@dataclass
class RaceBenchmark:
    """Trains the variants and stable-baselines3 in turn, several times each."""

    name: str
    variants: Sequence[Variant]
    fleet: str
    repeat: int
    sides: list[Runner] = field(default_factory=list)

    @property
    def fleets(self) -> list[str]:
        return [self.fleet]

    def measure(self, session: BenchSession) -> Generator[None, None, None]:
        self.sides += [
            Runner(self._name(variant.kind, variant.learners), variant.kind, variant.learners,
                   variant)
            for variant in self.variants
        ]  # fmt: skip
        recipe = self.variants[0].case.recipe
        request = {**make_sb3_request(recipe.learning), "steps": recipe.stop_at_steps}
        sb3 = Runner(self._name(SB3_NAME, 1), SB3_NAME, 1, None, sb3_request=request)
        self.sides.append(sb3)
        for runner in session.take_turns([*self.sides], self.repeat):
            if runner.variant is not None:
                runner.repetitions.append(train_variant(session, self.fleet, runner.variant))
            elif runner in self.sides and not self._race_sb3(session, runner):
                self.sides.remove(runner)
                session.show_note(f"{SB3_NAME} is not installed, so its curve is left out.")
            yield

    def _race_sb3(self, session: BenchSession, runner: Runner) -> bool:
        answer = run_sb3(runner.sb3_request, session.stop)
        if answer is None:
            return False
        runner.version = answer["version"]
        episodes = [(int(a), float(b), float(c)) for a, b, c in answer["episodes"]]
        race = RaceRun(answer["seconds"], None, None, answer["steps"], episodes, "")
        runner.repetitions.append(race)
        return True

    def _name(self, kind: str, learners: int) -> str:
        return f"{self.name}, {kind} with {learners}"

    def make_result(self, sides: Sequence[Runner]) -> BenchResult:
        rows = [describe_runner(runner, sides[0]) for runner in sides]
        same_bits = has_same_bits(sides)
        blocks = [
            f"This set-up is from {SOURCE}. Each run has as many workers as learners. Speed-ups "
            f"compare the time per step with that of {sides[0].kind} with --learners "
            f"{sides[0].learners}. The final return is the mean of the last {EPISODES} training "
            f"episodes. All values are medians (number of runs: {len(sides[0].repetitions)}).",
            make_table(rows, COLUMNS),
            *format_weights_comparison(sides),
            *(
                f"{SB3_NAME} {runner.version} ran in one process with one thread."
                for runner in sides
                if runner.variant is None
            ),
        ]
        if make_panels(sides) is None:
            blocks.append("No episode has ended, so there are no learning curves.")
        return BenchResult(
            self.name,
            {"same_bits": same_bits, "runners": rows},
            blocks,
            [
                Measurement(
                    runner.name,
                    "lower",
                    tuple(race.seconds for race in runner.repetitions),
                    "s",
                    runner.work,
                    tuple(race.retried for race in runner.repetitions),
                )
                for runner in sides
            ],
            make_csv_rows(sides),
        )

    def draw_curves(self, file: Path) -> None:
        """Draw the returns of a race that has finished."""
        panels = make_panels(self.sides)
        if panels is not None:
            write_atomically(file, render_image(panels, file))


def train_variant(session: BenchSession, fleet_kind: str, variant: Variant) -> RaceRun:
    case, learners = variant.case, variant.learners
    with session.open_fleet(fleet_kind, learners) as fleet:
        warm_up(make_warmup_case(case), fleet, session.stop, session.clock)
        watch = EpisodeStopwatch(session.clock)
        session.take_retried()
        result = run_with_learners(case, fleet, session, learners, watch)
    exchange_s = watch.spent_s.get("exchange", 0.0)
    return RaceRun(
        result["seconds"],
        result["learn_s"],
        exchange_s,
        result["steps"],
        watch.episodes,
        result["weights"],
        session.take_retried(),
    )


def make_warmup_case(case: Case) -> Case:
    """One step of each environment on one learner, to start the workers."""
    learning = case.recipe.learning
    rollout = learning.rollout.model_copy(update={"steps": 1})
    changes = {"rollout": rollout, "gradient_shards": 1}
    recipe = case.recipe.model_copy(
        update={"learning": learning.model_copy(update=changes), "stop_at_steps": None}
    )
    return replace(case, recipe=recipe)


def run_sb3(request: dict[str, Any], stop: StopRequest) -> dict[str, Any] | None:
    """Train with stable-baselines3 in another process; None if it is not installed."""
    # One thread, as each learner of rlflame has. More threads slow such small networks down.
    threads = blas.make_child_environment()
    environment = {**os.environ, **threads, "PYTHONPATH": make_child_path()}
    child = subprocess.Popen(
        [sys.executable, "-P", SB3_SIDE, json.dumps(request), str(os.getpid())],
        env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        start_new_session=True,  # This process handles Ctrl-C and ends the child.
    )  # fmt: skip
    try:
        with stop.allow_interrupt():
            out, err = child.communicate()
    finally:
        child.kill()
        child.wait()
    answer = (out.strip().splitlines() or [""])[-1]
    if answer == "absent":
        return None
    if child.returncode:
        raise RlflameError(f"{SB3_NAME} could not train.", "read its output", err)
    return dict(json.loads(answer))


def describe_runner(runner: Runner, first: Runner) -> dict[str, Any]:
    """Describe a runner and compare it with the first one."""
    variant = runner.variant or first.variant  # stable-baselines3 uses the first recipe.
    returns = [race.final_return for race in runner.repetitions]
    known = [value for value in returns if value is not None]
    shares = [
        race.exchange_s / race.seconds for race in runner.repetitions if race.exchange_s is not None
    ]
    batch, rate = find_batch_and_rate(variant.case.recipe.learning) if variant else (None, None)
    return {
        "recipe": runner.kind,
        "learners": runner.learners,
        "version": runner.version,
        "batch": batch,
        "learning_rate": rate,
        "seconds": median(race.seconds for race in runner.repetitions),
        "steps": runner.repetitions[0].steps,
        "speedup": first.seconds_per_step / runner.seconds_per_step,
        "ideal": runner.learners / first.learners,
        "exchange_share": median(shares) if shares else None,
        "final_return": median(known) if known else None,
        "final_returns": returns,
        "races": runner.repetitions,
    }


def find_batch_and_rate(learning: LearningSettings) -> tuple[int, float]:
    if learning.ppo is not None:
        return learning.ppo.minibatch_size, learning.ppo.learning_rate
    assert learning.sac is not None
    return learning.sac.batch_size, learning.sac.learning_rate


def has_same_bits(runners: Sequence[Runner]) -> bool | None:
    """Check whether the exact recipe gave equal weights for each number of learners."""
    return has_equal_digests(
        [race.weights for runner in runners if runner.kind == "exact"
         for race in runner.repetitions]
    )  # fmt: skip


def format_weights_comparison(runners: Sequence[Runner]) -> list[str]:
    counts = [str(runner.learners) for runner in runners if runner.kind == "exact"]
    if len(counts) < 2:
        return []
    if not has_same_bits(runners):
        return ["The weights of the exact recipe differ between the numbers of learners."]
    text = f"The weights of the exact recipe with {', '.join(counts)} learners"
    return [f"{text} are bit-for-bit identical."]


def make_csv_rows(runners: Sequence[Runner]) -> list[tuple[object, ...]]:
    """Make the rows of the CSV file.

    The case of stable-baselines3 differs, so that speed-ups of rlflame are relative to one learner
    of rlflame.
    """
    rows: list[tuple[object, ...]] = [CSV_HEAD]
    for runner in runners:
        for race in runner.repetitions:
            case = SB3_NAME if runner.variant is None else "rlflame"
            final_return = "" if race.final_return is None else race.final_return
            rows.append((runner.learners, runner.kind, race.seconds, race.steps, case,
                         final_return, race.retried))  # fmt: skip
    return rows


def make_panels(runners: Sequence[Runner]) -> Panels | None:
    """Draw returns by total steps, steps per learner and time; None without episodes."""
    if not any(runner.repetitions[0].episodes for runner in runners):
        return None
    charts = []
    for label in ("Steps, all learners together", "Steps per learner", "Seconds"):
        lines = []
        for runner in runners:
            ends = np.array(runner.repetitions[0].episodes, np.float64).reshape(-1, 3)
            window = max(1, min(EPISODES, len(ends)))
            x = ends[window - 1 :, 1 if label == "Seconds" else 0]
            if label == "Steps per learner":
                x = x / runner.learners
            y = smooth_values(ends[:, 2], window)[window - 1 :]
            if len(y):
                lines.append(Series(f"{runner.kind}, {runner.learners}", x, y))
        charts.append(Chart("", label, "Return", tuple(lines)))
    return Panels(tuple(charts), (f"Lines are means of up to {EPISODES} episodes.",))
