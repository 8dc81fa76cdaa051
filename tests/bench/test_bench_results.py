"""What a benchmark makes of its timings: against hand arithmetic and a search by brute force."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re

import numpy as np
import pytest

from rlflame import statistics
from rlflame.bench import machine_load, result, scaling_model
from rlflame.bench.case import Case
from rlflame.bench.machine_load import read_conditions
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


def cell(seconds, *, case="15 ms", fleet="local", workers=1, learn_s=0.0, weights="w", there=None):
    there = workers if there is None else there
    labels = {"case": case, "fleet": fleet, "workers": workers, "capacity": there,
              "answered": there, "start_s": 1.0}  # fmt: skip
    counts = {"steps": 100, "episodes": 10, "final_return": -1.0, "weights": weights, "retried": 0}
    runs = [{"seconds": s, "collect_s": s - learn_s, "learn_s": learn_s, **counts} for s in seconds]
    return Side(f"{case}, {fleet} with {workers}", labels, runs)


def scaling(cases, cells, complete=True, conditions=None):
    """The result of what was measured."""
    found = ScalingBenchmark(cases, ["local", "flame"], [1], 1).make_result(cells)
    return dataclasses.replace(found, conditions=conditions, complete=complete)


def facts(result):
    return json.loads(result.to_json())


def test_weights_that_differ_may_be_other_machines_where_there_are_some():
    assert result.format_bits([None], "same", "Other.") == []
    assert result.format_bits([True, None], "same", "Other.", ["flame"]) == ["same"]
    assert result.format_bits([True, False], "same", "Other.") == ["Other."]
    why = "Other. Executors on other machines may be why."
    assert result.format_bits([False], "same", "Other.", ["local", "flame"]) == [why]


def test_speed_up_is_beside_the_fastest_with_the_fewest_workers():
    cells = [
        cell([12.0, 10.0, 9.0]),
        cell([20.0, 21.0, 22.0], fleet="flame"),
        cell([4.0, 4.0, 5.0], workers=4, learn_s=1.0),
    ]
    first, flame, wide = scaling_model.make_rows([case(tasks=10)], cells)
    assert first["speedup"].value == 1.0
    assert flame["speedup"].value == pytest.approx(10 / 21)
    assert wide["speedup"].value == 2.5
    # Ten tasks on four workers: one of them has three in a row.
    assert wide["theoretical"] == pytest.approx(10 / 3)
    assert wide["efficiency"] == pytest.approx(0.75)
    assert wide["learning"] == 0.25
    # Three of 15 ms in 4 s, a quarter of which is learning.
    assert wide["lost"] == pytest.approx(1 - 0.25 - 0.045 / 4)
    assert wide["speedup"].low <= 2.5 <= wide["speedup"].high
    assert wide["speedup"].low == pytest.approx(9 / 5)
    assert wide["speedup"].high == pytest.approx(12 / 4)


def test_one_repetition_each_shows_no_difference():
    found = scaling([case()], [cell([10.0]), cell([1.0], fleet="flame")])
    assert "No difference was shown for 15 ms" in " ".join(found.facts["advice"])
    text = found.to_markdown()
    assert "+900.0" in text
    assert "[+900.0" not in text


def test_workers_that_did_not_come_are_not_counted_on():
    few = cell([1.0], workers=4, there=2)
    assert scaling_model._compute_lost_s(case(tasks=8), few) == (4, pytest.approx(1.0 - 4 * 0.015))
    text = scaling([case()], [few]).to_markdown()
    assert "local had 2 of 4 workers." in text


def test_the_overhead_of_a_task_and_of_an_iteration_are_found_again():
    """Times made of 3 ms a task, 50 ms an iteration, some learning, and nothing else."""
    cases = [case("1 ms", 100, 1.0, 2), case("100 ms", 12, 100.0, 2)]
    cells = []
    for one, length in zip(cases, (0.001, 0.1), strict=True):
        for workers in (1, 4):
            turns = math.ceil(one.tasks / workers)
            seconds = 2 * (0.05 + turns * (length + 0.003)) + 0.7
            cells.append(cell([seconds], case=one.name, workers=workers, learn_s=0.7))
    (found,) = scaling_model.fit_overheads(cases, cells)
    assert (found.fleet, found.cells) == ("local", 4)
    assert found.task_s == pytest.approx(0.003)
    assert found.iteration_s == pytest.approx(0.05)


def test_how_far_rows_lie_beside_the_line_is_known():
    cases = [case(str(tasks), tasks, 15.0) for tasks in (1, 2, 3)]
    # Beside work of 15 ms a task: 10 ms an iteration, 2 ms a task; the second is 3 ms off.
    cells = [
        cell([0.015 * n + 0.010 + 0.002 * n + off], case=str(n))
        for n, off in ((1, 0.0), (2, 0.003), (3, 0.0))
    ]
    (found,) = scaling_model.fit_overheads(cases, cells)
    assert (found.task_s, found.iteration_s) == pytest.approx((0.002, 0.011))
    assert found.misses_s == pytest.approx(0.002)


def test_an_overhead_below_nothing_is_none():
    """Losses of 1, 2 and 3 s at two, three and four tasks lie on a line that begins at -1."""
    cases = [case("a", 2, 0.0), case("b", 3, 0.0), case("c", 4, 0.0)]
    cells = [cell([seconds], case=name) for name, seconds in (("a", 1.0), ("b", 2.0), ("c", 3.0))]
    (found,) = scaling_model.fit_overheads(cases, cells)
    assert found.iteration_s == 0.0
    best = min(
        np.linspace(0, 2, 20_001),
        key=lambda o: sum((n * o - (n - 1)) ** 2 for n in (2, 3, 4)),
    )
    assert found.task_s == pytest.approx(best, abs=1e-4)


def test_real_environments_have_no_overhead_that_anybody_knows():
    one = case("ant", episode_ms=None)
    assert scaling_model.fit_overheads([one], [cell([1.0], case="ant")]) == []
    (row,) = scaling_model.make_rows([one], [cell([1.0], case="ant")])
    assert row["lost"] is None


@pytest.mark.parametrize("workers", [(1, 2), (1, 20), (2, 20), (2, 3)])
def test_break_even_is_where_a_search_finds_it(workers):
    here = scaling_model.FleetOverhead("local", 0.001, 0.004, 1)
    there = scaling_model.FleetOverhead("flame", 0.02, 0.3, 1)
    few, many = workers

    def faster(episode_s):
        def seconds(one, count):
            return one.iteration_s + math.ceil(100 / count) * (episode_s + one.task_s)

        return seconds(there, many) < seconds(here, few)

    low, high = 0.0, 10.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if faster(middle) else (middle, high)
    found = scaling_model.compute_break_even_s(here, there, workers, 100)
    assert (found.value, found.low, found.high) == pytest.approx([high] * 3, abs=1e-9)
    # By as much as a row misses its line, the turning point may be elsewhere.
    rough = scaling_model.compute_break_even_s(
        here, dataclasses.replace(there, misses_s=0.06), workers, 100
    )
    fewer = math.ceil(100 / few) - math.ceil(100 / many)
    assert rough.value == found.value
    assert rough.high - rough.value == pytest.approx(0.06 / fewer)
    assert rough.low == pytest.approx(max(0.0, rough.value - 0.06 / fewer))


def test_as_many_executors_as_workers_here_never_pay():
    one = scaling_model.FleetOverhead("local", 0.0, 0.0, 1)
    assert scaling_model.compute_break_even_s(one, one, (2, 2), 100) is None
    assert scaling_model.compute_break_even_s(one, one, (100, 200), 100) is None


def test_gains_are_of_throughput_and_only_at_equal_workers():
    cells = [
        cell([10.0] * 3),
        cell([3.0] * 3, workers=4),
        cell([8.0] * 3, fleet="flame"),
        cell([1.0] * 3, fleet="flame", workers=8),
    ]
    (found,) = scaling_model.compute_gains(cells)
    assert (found["workers"], found["local_s"], found["flame_s"]) == (1, 10.0, 8.0)
    assert found["gain_pct"] == pytest.approx(25.0)


def test_a_median_s_interval_is_that_of_all_resamples_together():
    values = np.array([3.0, 1.0, 7.0])
    medians = [np.median([a, b, c]) for a in values for b in values for c in values]
    found = statistics.compute_median_interval(values)
    assert found.value == 3.0
    # 7 of the 27 resamples have the median 1, as many have 7: far more than 2.5%.
    assert medians.count(1.0) == medians.count(7.0) == 7
    assert (found.low, found.high) == (1.0, 7.0)


# What is said


def _advice(cases, cells, cores=2):
    return " ".join(
        scaling_model.make_advice(
            cases,
            cells,
            scaling_model.make_rows(cases, cells),
            scaling_model.fit_overheads(cases, cells),
            cores,
        )
    )


def test_each_case_has_its_winner_and_a_draw_is_a_draw():
    cases = [case(name, 8, float(name)) for name in ("1", "50", "1000")]
    cells = []
    for name, here, there in (
        ("1", [1.0, 1.1, 1.2], [3.0, 3.1, 3.2]),
        ("50", [5.0, 6.0, 7.0], [5.5, 6.5, 5.0]),
        ("1000", [90.0, 91.0, 92.0], [20.0, 21.0, 22.0]),
    ):
        cells += [cell(here, case=name), cell(there, case=name, fleet="flame", workers=8)]
    said = _advice(cases, cells)
    assert "Flame was faster for 1000: --fleet flame" in said
    assert "This machine was faster for 1: --local" in said
    assert "No difference was shown for 50" in said
    assert "executors" not in said  # with one number of workers nobody knows from when on


@pytest.mark.parametrize(
    ("lost", "times", "told"),
    [((3, 5, 9), 3, True), ((3, 5, 9), 2, False), ((9, 5, 3), 3, False)],
)
def test_from_when_executors_pay_is_said_only_where_it_was_seen(lost, times, told):
    """Not from a line that had to be bent, nor from one or two of each."""
    cases = [case(str(tasks), tasks, 15.0) for tasks in (1, 2, 4)]
    cells = []
    for fleet, workers, beside in (("local", 1, 0.0), ("flame", 1, 0.1), ("flame", 8, 0.1)):
        for one, ms in zip(cases, lost, strict=True):
            turns = math.ceil(one.tasks / workers)
            seconds = 0.015 * turns + beside + 0.001 * (ms if workers == 1 else lost[0])
            cells.append(cell([seconds] * times, case=one.name, fleet=fleet, workers=workers))
    said = _advice(cases, cells)
    for workers in ("1 worker", "2 workers"):
        assert (f"8 executors against {workers} here win from" in said) == told
    assert "the rows allow anything" not in said
    assert ("is unknown from when executors pay" in said) != told


def test_a_turning_point_that_nobody_knows_well_is_said_with_how_far_it_may_lie():
    cases = [case(str(tasks), tasks, 15.0) for tasks in (1, 2, 4)]
    cells = []
    for fleet, workers, beside in (("local", 1, 0.0), ("flame", 1, 0.1), ("flame", 8, 0.1)):
        for one, ms in zip(cases, (3, 8, 9), strict=True):
            turns = math.ceil(one.tasks / workers)
            seconds = 0.015 * turns + beside + 0.001 * (ms if workers == 1 else 3)
            cells.append(cell([seconds] * 3, case=one.name, fleet=fleet, workers=workers))
    said = _advice(cases, cells)
    told = r"2 workers here win from (\S+) ms .* anything from (\S+) to (\S+) ms\."
    found = re.search(told, said)
    value, low, high = map(float, found.groups())
    assert low < value < high


def test_executors_that_are_no_more_than_the_cores_here_cannot_win():
    fleets = (("local", 1.0), ("flame", 1.5))
    cells = [cell([s * 2 / n] * 3, workers=n, fleet=f) for n in (1, 2) for f, s in fleets]
    cases = [case(), case("30 ms", episode_ms=30.0)]
    cells += [cell([2 * s] * 3, case="30 ms", workers=2, fleet=f) for f, s in fleets]
    said = _advice(cases, cells)
    assert "2 executors against 2 workers here cannot win" in said


def test_what_keeps_workers_from_helping_is_named():
    learning = [cell([10.0] * 3, learn_s=6.0), cell([8.0] * 3, workers=4, learn_s=6.0)]
    assert "Learning takes 75%" in _advice([case(tasks=100)], learning)
    short = [cell([1.0] * 3), cell([0.9] * 3, workers=4)]
    assert "More workers gain little for 15 ms on local" in _advice([case(tasks=100)], short)
    assert "Fewer than 4 tasks" not in _advice([case(tasks=100)], short)
    assert "Fewer than 4 tasks" in _advice([case(tasks=8)], short)
    fine = [cell([1.0] * 3), cell([0.26] * 3, workers=4)]
    assert _advice([case(tasks=100)], fine) == "4 workers do at least 96% of what they could."
    # 100 tasks of 15 ms take 1.5 s, so of 6 s three quarters are spent between driver and workers.
    waiting = [cell([6.0] * 3), cell([1.5] * 3, workers=4)]
    said = _advice([case(tasks=100)], waiting)
    assert "Latency and dispatch take up to 75% of 15 ms on local" in said
    assert "One number of workers does not say" in _advice([case(tasks=100)], waiting[:1])


def test_other_weights_somewhere_are_said():
    same = scaling([case()], [cell([1.0]), cell([1.0], fleet="flame")])
    assert "the same weights, to the last bit" in same.to_markdown()
    other = scaling([case()], [cell([1.0]), cell([1.0], fleet="flame", weights="x")])
    assert "did not learn the same weights" in other.to_markdown()


def test_of_what_was_not_measured_twice_nothing_is_said():
    """As where it was interrupted before there was a second."""
    cases = [case(), case("100 ms", episode_ms=100.0)]
    for seconds, same_bits in (([1.0], None), ([1.0, 1.1], True)):
        found = scaling(cases, [cell(seconds)], complete=False)
        assert ("the same weights" in found.to_markdown()) == bool(same_bits)
        assert [each["same_bits"] for each in facts(found)["cases"]] == [same_bits, None]


@pytest.mark.parametrize(
    ("workers", "shown"),
    [((1, 2), False), ((1, 2, 4), True), ((8, 9, 10), False)],  # the last have as many turns
)
def test_a_line_is_fitted_where_both_its_numbers_can_be_told(workers, shown):
    """In the table, in the data and in the advice alike."""
    fleets = ("local", "flame")
    tasks = 8 if workers[0] == 8 else 100
    cells = [
        cell([0.1 + 0.02 * math.ceil(tasks / n)] * 3, workers=n, fleet=fleet)
        for n in workers
        for fleet in fleets
    ]
    found = scaling([case(tasks=tasks)], cells)
    assert ("ms a task" in found.to_markdown()) == shown
    assert bool(facts(found)["overheads"]) == shown
    assert any("executors against" in said for said in facts(found)["advice"]) == shown


def test_losses_that_fall_with_tasks_are_those_of_an_iteration():
    cases = [case("a", 1, 0.0), case("b", 2, 0.0), case("c", 3, 0.0)]
    cells = [cell([seconds], case=name) for name, seconds in (("a", 0.3), ("b", 0.2), ("c", 0.1))]
    (found,) = scaling_model.fit_overheads(cases, cells)
    assert (found.task_s, found.iteration_s) == (0.0, pytest.approx(0.2))


def test_a_task_of_several_episodes_sleeps_for_each():
    one = case(tasks=4, rows=4)
    (row,) = scaling_model.make_rows([one], [cell([0.3])])
    assert row["lost"] == pytest.approx(1.0 - 4 * 4 * 0.015 / 0.3)


@pytest.mark.parametrize(
    ("load", "at_work", "busy"),
    [
        ((0.1, 9.0, 9.0), 2.0, True),
        ((0.1, 9.0, 9.0), None, False),
        ((9.0, 0.1, 0.1), 2.0, True),
        ((9.0, 0.1, 0.1), 0.04, False),
        ((9.0, 0.1, 0.1), None, True),
    ],
)
def test_a_busy_machine_is_called_busy(load, at_work, busy):
    found = read_conditions(lambda: load, lambda: at_work)
    assert found.busy == busy
    text = scaling([case()], [cell([1.0])], conditions=found).to_markdown()
    assert ("busy with other work" in text) == busy
    assert " ".join(f"{value:.2f}" for value in load) in text
    assert found.at_work == at_work
    assert ("processors at work when it began" in text) == (at_work is not None)


@pytest.mark.parametrize(("spent", "others", "busy"), [(300, 0.25, False), (0, 1.0, True)])
def test_work_of_others_that_begins_later_is_seen_too(tmp_path, monkeypatch, spent, others, busy):
    """All processors spent 4 s in 4 s, and this process and its children as many as is said."""
    stat, now = tmp_path / "stat", [0.0]
    monkeypatch.setattr(machine_load, "_STAT", stat)
    monkeypatch.setattr(machine_load.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(machine_load.os, "sysconf", lambda name: 100)
    times = [os.times_result((0, 0, 0, 0, 0)), os.times_result((0.01 * spent - 1, 0, 1, 0, 0))]
    monkeypatch.setattr(machine_load.os, "times", lambda: times[now[0] > 0])
    stat.write_text("cpu 100 0 0 900 0 0 0 0\n")
    begun = read_conditions(lambda: (0.0, 0.0, 0.0), lambda: 0.0)
    watch, beside = (machine_load.LoadMonitor(fleets, begun) for fleets in (["local"], ["flame"]))
    assert watch.finish() == begun, "no time has passed"
    now[0] = 4.0
    stat.write_text("cpu 400 0 100 1300 0 0 0 0\n")
    found = watch.finish()
    assert beside.finish() == begun, "executors are nobody's children here"
    assert (found.others, found.busy) == (pytest.approx(others), busy)
    text = scaling([case()], [cell([1.0])], conditions=found).to_markdown()
    assert f"{others:.1f} at work for others meanwhile." in text
    assert ("busy with other work" in text) == busy
    stat.unlink()
    assert watch.finish() == begun


def test_a_system_without_a_load_is_not_called_busy():
    def absent():
        raise OSError

    found = read_conditions(absent, lambda: None)
    assert not found.busy
    assert found.load_before is None


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
