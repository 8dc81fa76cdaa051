"""Benchmark results, compared with arithmetic by hand and an exhaustive search."""

from __future__ import annotations

import dataclasses
import json
import math
import os

import numpy as np
import pytest

from rlflame import statistics
from rlflame.bench import machine_load, result
from rlflame.bench import scaling as scaling_bench
from rlflame.bench.case import Case
from rlflame.bench.result import Side
from rlflame.bench.scaling import ScalingBenchmark
from rlflame.config.recipe import Recipe
from rlflame.rollout.task import EnvSpec

ENV = EnvSpec("E-v0", {}, None, 3, "discrete", 2, 0, (), ())


def case(name="15 ms", tasks=8, episode_ms=15.0, iterations=1, rows=1):
    recipe = Recipe.model_validate(
        {
            "stop_at_iterations": iterations,
            "learning": {
                "algorithm": "reinforce",
                "rollout": {"unit": "episodes", "num_slots": tasks, "envs_per_slot": rows},
            },
        }
    )
    return Case(name, recipe, ENV, episode_ms)


def overhead(fleet, task_s, iteration_s, cells):
    return {"fleet": fleet, "task_s": task_s, "iteration_s": iteration_s, "cells": cells}


def cell(seconds, *, case="15 ms", fleet="local", workers=1, learn_s=0.0, weights="w", there=None):
    there = workers if there is None else there
    labels = {"case": case, "fleet": fleet, "workers": workers, "capacity": there,
              "answered": there, "start_s": 1.0}  # fmt: skip
    counts = {"steps": 100, "episodes": 10, "final_return": -1.0, "weights": weights, "retried": 0}
    runs = [{"seconds": s, "collect_s": s - learn_s, "learn_s": learn_s, **counts} for s in seconds]
    return Side(f"{case}, {fleet} with {workers}", labels, runs)


def scaling(cases, cells, complete=True, conditions=None):
    """Make the result of these measurements."""
    found = ScalingBenchmark(cases, ["local", "flame"], [1], 1).make_result(cells)
    return dataclasses.replace(found, conditions=conditions or {}, complete=complete)


def facts(result):
    return json.loads(result.to_json())


def test_equal_bits_are_reported_only_after_a_comparison():
    same, other = "X are bit-identical in all rows.", "X differ between rows"
    assert result.format_bits([None], "X") == []
    assert result.format_bits([True, None], "X") == [same]
    (sentence,) = result.format_bits([True, False], "X")
    assert sentence.startswith(other)


def test_speed_up_is_beside_the_fastest_with_the_fewest_workers():
    cells = [
        cell([12.0, 10.0, 9.0]),
        cell([20.0, 21.0, 22.0], fleet="flame"),
        cell([4.0, 4.0, 5.0], workers=4, learn_s=1.0),
    ]
    first, flame, wide = scaling_bench.make_rows([case(tasks=10)], cells)
    assert first["speedup"].value == 1.0
    assert flame["speedup"].value == pytest.approx(10 / 21)
    assert wide["speedup"].value == 2.5
    # Ten tasks on four workers: one worker has three tasks in a row.
    assert wide["theoretical"] == pytest.approx(10 / 3)
    assert wide["learning"] == 0.25
    # Three tasks of 15 ms in 4 s, of which a quarter is learning.
    assert wide["lost"] == pytest.approx(1 - 0.25 - 0.045 / 4)
    assert wide["speedup"].low <= 2.5 <= wide["speedup"].high
    assert wide["speedup"].low == pytest.approx(9 / 5)
    assert wide["speedup"].high == pytest.approx(12 / 4)


def test_one_repetition_each_shows_no_difference():
    found = scaling([case()], [cell([10.0]), cell([1.0], fleet="flame")])
    assert "Advice needs more repetitions: --repeat" in " ".join(found.facts["advice"])
    text = found.to_markdown()
    assert "+900.0" in text
    assert "[+900.0" not in text


def test_workers_that_did_not_come_are_not_counted_on():
    few = cell([1.0], workers=4, there=2)
    (row,) = scaling_bench.make_rows([case(tasks=8)], [few])
    assert row["lost"] == pytest.approx(1.0 - 4 * 0.015)
    assert (row["workers"], row["answered"], row["tasks"]) == (4, 2, 8)


def test_the_overhead_of_a_task_and_of_an_iteration_are_found_again():
    """The times consist of 3 ms per task, 50 ms per iteration, and some learning."""
    cases = [case("1 ms", 100, 1.0, 2), case("100 ms", 12, 100.0, 2)]
    cells = []
    for one, length in zip(cases, (0.001, 0.1), strict=True):
        for workers in (1, 4):
            turns = math.ceil(one.tasks / workers)
            seconds = 2 * (0.05 + turns * (length + 0.003)) + 0.7
            cells.append(cell([seconds], case=one.name, workers=workers, learn_s=0.7))
    (found,) = scaling_bench.fit_overheads(cases, cells)
    assert (found["fleet"], found["cells"]) == ("local", 4)
    assert found["task_s"] == pytest.approx(0.003)
    assert found["iteration_s"] == pytest.approx(0.05)


def test_an_overhead_below_nothing_is_none():
    """Losses of 1, 2 and 3 s at two, three and four tasks: the line begins at -1."""
    cases = [case("a", 2, 0.0), case("b", 3, 0.0), case("c", 4, 0.0)]
    cells = [cell([seconds], case=name) for name, seconds in (("a", 1.0), ("b", 2.0), ("c", 3.0))]
    (found,) = scaling_bench.fit_overheads(cases, cells)
    assert found["iteration_s"] == 0.0
    best = min(
        np.linspace(0, 2, 20_001),
        key=lambda o: sum((n * o - (n - 1)) ** 2 for n in (2, 3, 4)),
    )
    assert found["task_s"] == pytest.approx(best, abs=1e-4)


def test_real_environments_have_no_overhead_that_anybody_knows():
    one = case("ant", episode_ms=None)
    assert scaling_bench.fit_overheads([one], [cell([1.0], case="ant")]) == []
    (row,) = scaling_bench.make_rows([one], [cell([1.0], case="ant")])
    assert row["lost"] is None


@pytest.mark.parametrize("workers", [(1, 2), (1, 20), (2, 20), (2, 3)])
def test_break_even_is_where_a_search_finds_it(workers):
    here = overhead("local", 0.001, 0.004, 1)
    there = overhead("flame", 0.02, 0.3, 1)
    few, many = workers

    def faster(episode_s):
        def seconds(one, count):
            return one["iteration_s"] + math.ceil(100 / count) * (episode_s + one["task_s"])

        return seconds(there, many) < seconds(here, few)

    low, high = 0.0, 10.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if faster(middle) else (middle, high)
    found = scaling_bench.compute_break_even_s(here, there, workers)
    assert found == pytest.approx(high, abs=1e-9)


def test_as_many_executors_as_workers_here_never_pay():
    one = overhead("local", 0.0, 0.0, 1)
    assert scaling_bench.compute_break_even_s(one, one, (2, 2)) is None
    assert scaling_bench.compute_break_even_s(one, one, (100, 200)) is None


def test_gains_are_of_throughput_and_only_at_equal_workers():
    cells = [
        cell([10.0] * 3),
        cell([3.0] * 3, workers=4),
        cell([8.0] * 3, fleet="flame"),
        cell([1.0] * 3, fleet="flame", workers=8),
    ]
    gains = [row["gain_pct"] for row in scaling_bench.make_rows([case()], cells)]
    assert gains[:2] == [None, None]
    assert gains[2].value == pytest.approx(25.0)
    assert gains[3] is None


def test_a_median_s_interval_is_that_of_all_resamples_together():
    values = np.array([3.0, 1.0, 7.0])
    medians = [np.median([a, b, c]) for a in values for b in values for c in values]
    found = statistics.compute_median_interval(values)
    assert found.value == 3.0
    # The median is 1 in 7 of the 27 resamples and 7 in 7 others: far more than 2.5%.
    assert medians.count(1.0) == medians.count(7.0) == 7
    assert (found.low, found.high) == (1.0, 7.0)


# Advice


def _advice(cases, cells, cores=2):
    rows, overheads = (
        scaling_bench.make_rows(cases, cells),
        scaling_bench.fit_overheads(cases, cells),
    )
    return " ".join(scaling_bench.make_advice(rows, overheads, cores))


def test_the_fewest_workers_among_the_fastest_are_recommended():
    cases = [case(name, 8, float(name)) for name in ("1", "50", "1000")]
    cells = []
    for name, here, there in (
        ("1", [1.0, 1.1, 1.2], [3.0, 3.1, 3.2]),
        ("50", [5.0, 6.0, 7.0], [5.5, 6.5, 5.0]),
        ("1000", [90.0, 91.0, 92.0], [20.0, 21.0, 22.0]),
    ):
        cells += [cell(there, case=name, fleet="flame", workers=8), cell(here, case=name)]
    said = _advice(cases, cells)
    assert "1: local with 1; 50: local with 1; 1000: flame with 8." in said
    assert "overheads" not in said  # with one number of workers, no overhead can be fitted


@pytest.mark.parametrize(
    ("lost", "times", "told"),
    [((3, 5, 9), 3, True), ((3, 5, 9), 2, False), ((9, 5, 3), 3, False)],
)
def test_the_break_even_of_executors_is_reported_only_if_measured(lost, times, told):
    """A fit that had to be bounded, or one or two repetitions, give no advice."""
    cases = [case(str(tasks), tasks, 15.0) for tasks in (1, 2, 4)]
    cells = []
    for fleet, workers, beside in (("local", 1, 0.0), ("flame", 1, 0.1), ("flame", 8, 0.1)):
        for one, ms in zip(cases, lost, strict=True):
            turns = math.ceil(one.tasks / workers)
            seconds = 0.015 * turns + beside + 0.001 * (ms if workers == 1 else lost[0])
            cells.append(cell([seconds] * times, case=one.name, fleet=fleet, workers=workers))
    said = _advice(cases, cells)
    assert ("8 executors are faster than 2 local workers for episodes of" in said) == told


def test_executors_that_are_no_more_than_the_cores_here_cannot_win():
    here, there = (overhead(name, 0.1, 0.1, 3) for name in ("local", "flame"))
    row = {"case": "a", "fleet": "flame", "workers": 2, "times": 3}
    row["seconds"] = statistics.Interval(1.0, 1.0, 1.0)
    said = " ".join(scaling_bench.make_advice([row], [here, there], 2))
    assert "2 executors are not faster than 2 local workers at any episode length" in said


def test_different_weights_are_reported():
    same = scaling([case()], [cell([1.0]), cell([1.0], fleet="flame")])
    assert "weights are bit-identical in all rows" in same.to_markdown()
    other = scaling([case()], [cell([1.0]), cell([1.0], fleet="flame", weights="x")])
    assert "weights differ between rows" in other.to_markdown()


def test_a_single_measurement_gives_no_statement_about_bits():
    """The benchmark may have been interrupted before the second repetition."""
    cases = [case(), case("100 ms", episode_ms=100.0)]
    for seconds, same_bits in (([1.0], None), ([1.0, 1.1], True)):
        found = scaling(cases, [cell(seconds)], complete=False)
        assert ("weights are bit-identical" in found.to_markdown()) == bool(same_bits)
        assert [each["same_bits"] for each in facts(found)["cases"]] == [same_bits, None]


@pytest.mark.parametrize(
    ("workers", "shown"),
    [((1, 2), False), ((1, 2, 4), True), ((8, 9, 10), False)],  # the last have equal turns
)
def test_a_line_is_fitted_if_both_its_numbers_can_be_determined(workers, shown):
    """The table, the data and the advice agree."""
    fleets = ("local", "flame")
    tasks = 8 if workers[0] == 8 else 100
    cells = [
        cell([0.1 + 0.02 * math.ceil(tasks / n)] * 3, workers=n, fleet=fleet)
        for n in workers
        for fleet in fleets
    ]
    found = scaling([case(tasks=tasks)], cells)
    assert ("ms per task" in found.to_markdown()) == shown
    assert bool(facts(found)["overheads"]) == shown
    assert any("Given these overheads" in said for said in facts(found)["advice"]) == shown


def test_losses_that_fall_with_tasks_are_those_of_an_iteration():
    cases = [case("a", 1, 0.0), case("b", 2, 0.0), case("c", 3, 0.0)]
    cells = [cell([seconds], case=name) for name, seconds in (("a", 0.3), ("b", 0.2), ("c", 0.1))]
    (found,) = scaling_bench.fit_overheads(cases, cells)
    assert (found["task_s"], found["iteration_s"]) == (0.0, pytest.approx(0.2))


def test_a_task_of_several_episodes_sleeps_for_each():
    one = case(tasks=4, rows=4)
    (row,) = scaling_bench.make_rows([one], [cell([0.3])])
    assert row["lost"] == pytest.approx(1.0 - 4 * 4 * 0.015 / 0.3)


@pytest.mark.parametrize(("at_work", "busy"), [(2.0, True), (0.04, False), (None, False)])
def test_a_busy_machine_is_called_busy(at_work, busy, monkeypatch):
    monkeypatch.setattr(machine_load, "count_busy_processors", lambda: at_work)
    found = machine_load.LoadMonitor(["flame"]).describe()
    assert (found["at_work"], found["others"], found["busy"]) == (at_work, None, busy)
    text = scaling([case()], [cell([1.0])], conditions=found).to_markdown()
    assert ("busy with other work" in text) == busy
    before = "unknown" if at_work is None else f"{at_work:.1f}"
    assert f"before the benchmark: {before}; busy with other programs during it: unknown." in text


@pytest.mark.parametrize(("spent", "others", "busy"), [(300, 0.25, False), (0, 1.0, True)])
def test_work_of_others_that_begins_later_is_seen_too(tmp_path, monkeypatch, spent, others, busy):
    """All processors worked 4 s in 4 s; this process and its children worked `spent`."""
    stat, now = tmp_path / "stat", [0.0]
    monkeypatch.setattr(machine_load, "_STAT", stat)
    monkeypatch.setattr(machine_load, "count_busy_processors", lambda: 0.0)
    monkeypatch.setattr(machine_load, "count_usable_cores", lambda: 2)
    monkeypatch.setattr(machine_load.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(machine_load.os, "sysconf", lambda name: 100)
    times = [os.times_result((0, 0, 0, 0, 0)), os.times_result((0.01 * spent - 1, 0, 1, 0, 0))]
    monkeypatch.setattr(machine_load.os, "times", lambda: times[now[0] > 0])
    stat.write_text("cpu 100 0 0 900 0 0 0 0\n")
    watch, beside = (machine_load.LoadMonitor(fleets) for fleets in (["local"], ["flame"]))
    assert watch.describe()["others"] is None, "no time has passed"
    now[0] = 4.0
    stat.write_text("cpu 400 0 100 1300 0 0 0 0\n")
    found = watch.describe()
    assert beside.describe()["others"] is None, "executors are nobody's children here"
    assert (found["others"], found["busy"]) == (pytest.approx(others), busy)
    text = scaling([case()], [cell([1.0])], conditions=found).to_markdown()
    assert f"busy with other programs during it: {others:.1f}." in text
    assert ("busy with other work" in text) == busy
    stat.unlink()
    assert watch.describe()["others"] is None


def test_processors_at_work_are_counted_between_two_looks(tmp_path, monkeypatch):
    first = "cpu  100 10 50 1000 40 5 5 0 0 0\ncpu0 1 1 1 1\n"
    then = "cpu  130 10 60 1040 60 5 5 0 30 0\ncpu0 1 1 1 1\n"
    stat, now = tmp_path / "stat", [0.0]
    stat.write_text(first)

    def sleep(seconds):
        now[0] += seconds
        stat.write_text(then)

    monkeypatch.setattr(machine_load, "_STAT", stat)
    monkeypatch.setattr(machine_load.os, "sysconf", lambda name: 100)
    monkeypatch.setattr(machine_load.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(machine_load.time, "sleep", sleep)
    # 40 ticks of a hundredth of a second in half a second.
    assert machine_load.count_busy_processors() == pytest.approx(0.4 / 0.5)
    monkeypatch.setattr(machine_load.time, "sleep", lambda _: None)
    assert machine_load.count_busy_processors() is None, "no time has passed"
    stat.write_text("nothing of the kind")
    assert machine_load.count_busy_processors() is None
    stat.unlink()
    assert machine_load.count_busy_processors() is None
