"""Curves of runs: groups, axes, smoothing, and what is drawn by default."""

from __future__ import annotations

import json

import numpy as np
import pytest
from run_files import make, write_lines

from rlflame.analysis import curves
from rlflame.analysis.grouping import group_runs
from rlflame.config import resolve
from rlflame.config.recipe import RunConfig
from rlflame.errors import CheckpointError, ConfigError
from rlflame.storage import run_reader

STEPS = (100, 200, 400)


def run(folder, **given):
    return run_reader.read_run(make(folder, **given))


def test_runs_that_differ_in_the_seed_alone_are_one_group(tmp_path):
    runs = [
        run(tmp_path / "a", seed=0),
        run(tmp_path / "b", seed=0, clip=0.3),
        run(tmp_path / "c", seed=1),
        run(tmp_path / "d", seed=0, algorithm="reinforce"),
    ]
    found = group_runs(runs)
    assert [[r.folder.name for r in group.runs] for group in found] == [["a", "c"], ["b"], ["d"]]
    assert [group.label for group in found] == [
        "PPO, clip_range 0.2, 2 seeds",
        "PPO, clip_range 0.3, seed 0",
        "REINFORCE, seed 0",
    ]


@pytest.mark.parametrize("written", ["[learning.network]\nhidden = [64, 64]\n", "[evaluation]\n"])
def test_a_run_from_before_a_setting_is_one_with_its_default(tmp_path, written):
    before, since = make(tmp_path / "a", seed=0), make(tmp_path / "b", seed=1)
    with (since / "config.toml").open("a") as config:
        config.write(written)
    (found,) = group_runs([run_reader.read_run(before), run_reader.read_run(since)])
    assert found.label == "PPO, 2 seeds"


@pytest.mark.parametrize("algorithm", ["ppo", "reinforce", "sac"])
def test_each_setting_may_be_younger_than_a_run(tmp_path, algorithm):
    unit = "episodes" if algorithm == "reinforce" else "steps"
    learning = {"algorithm": algorithm, "rollout": {"unit": unit}}
    config = RunConfig.model_validate({"stop_at_steps": 1000, "learning": learning})
    whole = resolve.format_config(config).splitlines()
    run, younger = make(tmp_path / "a"), make(tmp_path / "b")
    seed = whole.index("seed = 0")
    (younger / "config.toml").write_text("\n".join([*whole[:seed], "seed = 1", *whole[seed + 1 :]]))
    settings = [i for i, line in enumerate(whole) if " = " in line]
    for i in settings:
        if whole[i].startswith(("stop_at_steps", "algorithm", "unit", "id = ")):
            continue  # these belong to the run's identity
        (run / "config.toml").write_text("\n".join(whole[:i] + whole[i + 1 :]))
        found = group_runs([run_reader.read_run(run), run_reader.read_run(younger)])
        assert len(found) == 1, whole[i]
    assert len(settings) > 40


def test_a_setting_that_only_the_other_has_is_named(tmp_path):
    plain, other = make(tmp_path / "a"), make(tmp_path / "b")
    with (other / "config.toml").open("a") as config:
        config.write("[learning.network]\nleft_out = 3\n")
    found = group_runs([run_reader.read_run(plain), run_reader.read_run(other)])
    assert [group.label for group in found] == [
        "PPO, left_out none, seed 0",
        "PPO, left_out 3, seed 0",
    ]


@pytest.mark.parametrize("line", ["hidden = [32]", "gone = 1"])
def test_what_a_setting_does_not_have_by_default_is_a_difference(tmp_path, line):
    plain, other = make(tmp_path / "a", seed=0), make(tmp_path / "b", seed=1)
    with (other / "config.toml").open("a") as config:
        config.write(f"[learning.network]\n{line}\n")
    found = group_runs([run_reader.read_run(plain), run_reader.read_run(other)])
    assert len(found) == 2
    assert "hidden" not in line or found[1].label == "PPO, hidden [32], seed 1"


def test_two_jobs_of_one_recipe_are_two_samples(tmp_path):
    runs = [
        make(tmp_path / job / f"seed-{seed}", seed=seed)
        for job in ("old", "new")
        for seed in (0, 1)
    ]
    found = group_runs([run_reader.read_run(run) for run in runs])
    assert [group.label for group in found] == ["PPO, 2 seeds (old)", "PPO, 2 seeds (new)"]
    assert [len(group.runs) for group in found] == [2, 2]
    # A seed of each job has the same folder name, so the jobs distinguish them.
    found = group_runs([run_reader.read_run(run) for run in (runs[0], runs[2])])
    assert [group.label for group in found] == [
        "PPO, seed 0 (old/seed-0)",
        "PPO, seed 0 (new/seed-0)",
    ]


def test_the_same_seed_twice_is_no_second_sample(tmp_path):
    runs = [
        run(tmp_path / "a0", seed=0),
        run(tmp_path / "a1", seed=1),
        run(tmp_path / "b0", seed=0),
        run(tmp_path / "b1", seed=1),
    ]
    found = group_runs(runs)
    assert [len(group.runs) for group in found] == [1, 1, 1, 1]
    assert [group.label for group in found[:3:2]] == ["PPO, seed 0 (a0)", "PPO, seed 0 (b0)"]
    copies = group_runs([run(tmp_path / "x", seed=0), run(tmp_path / "y", seed=0)])
    assert [group.label for group in copies] == ["PPO, seed 0 (x)", "PPO, seed 0 (y)"]


def test_environments_are_named_where_there_are_several(tmp_path):
    found = group_runs([run(tmp_path / "a"), run(tmp_path / "b", environment="Hopper-v5")])
    assert [group.label for group in found] == ["PPO CartPole-v1, seed 0", "PPO Hopper-v5, seed 0"]


def test_evaluations_are_drawn_where_there_are_three_else_training(tmp_path):
    three = run(tmp_path / "a", evaluations=[(s, float(s)) for s in STEPS])
    two = run(
        tmp_path / "b",
        evaluations=[(100, 1.0), (200, 2.0)],
        iterations=[(100, None), (200, 5.0), (400, 7.0)],
    )
    (line,) = curves.make_chart([three]).series
    assert (line.x.tolist(), line.y.tolist()) == ([100, 200, 400], [100, 200, 400])
    assert line.low.tolist() == [99, 199, 399]
    assert line.high.tolist() == [102, 202, 402]
    chart = curves.make_chart([two])
    assert chart.y_label == "Training return"
    assert chart.series[0].x.tolist() == [
        200,
        400,
    ]  # an iteration without a finished episode has no point
    assert chart.series[0].low is None


def test_reinforce_without_evaluations_is_drawn_episode_by_episode(tmp_path):
    episodes = [(float(i), 2) for i in range(60)]
    chart = curves.make_chart([run(tmp_path / "a", algorithm="reinforce", episodes=episodes)])
    (line,) = chart.series
    assert line.dots[0].tolist() == list(range(1, 61))
    assert line.dots[1].tolist() == list(range(60))
    assert line.x.tolist() == list(range(1, 61))
    # The means of 0..49, 1..50, ..., 10..59; the ends are repeated beyond the ends.
    assert line.y.tolist()[25:36] == [24.5 + k for k in range(11)]
    assert line.y[-1] == (sum(range(34, 60)) + 24 * 59) / 50
    few = run(tmp_path / "b", algorithm="reinforce", episodes=episodes[:49])
    assert not len(curves.make_chart([few]).series[0].x)
    over_steps = curves.make_chart([few], "total-steps", "episode_return").series[0]
    assert over_steps.dots[0].tolist() == list(range(2, 100, 2))


def test_axes(tmp_path):
    made = run(
        tmp_path / "a",
        iterations=[(100, 1.0), (200, 2.0), (400, 3.0)],
        seconds=[(100, 10.0), (200, 20.0), (400, 40.0)],
    )

    def x(axis):
        return curves.make_chart([made], axis, "episode_return_mean").series[0].x.tolist()

    assert x("steps") == x("total-steps") == [100, 200, 400]
    assert x("wall") == [10.0, 30.0, 70.0]
    assert x("cpu") == [15.0, 45.0, 105.0]  # 1.5 times the wall-clock seconds
    assert x("episodes") == [10, 20, 30]


def test_steps_are_those_of_one_learner_and_total_steps_those_of_all(tmp_path):
    folder = make(tmp_path / "a", iterations=[(100, 1.0), (400, 2.0)])
    config = folder / "config.toml"
    config.write_text(config.read_text() + "learners = 4\n")
    found = run_reader.read_run(folder)
    chart = curves.make_chart([found], "steps")
    assert chart.series[0].x.tolist() == [25.0, 100.0]
    assert chart.x_label == "Environment steps per learner"
    assert curves.make_chart([found], "total-steps").series[0].x.tolist() == [100, 400]


@pytest.mark.parametrize(
    ("seconds", "unit", "x"), [(100.0, "s", 100.0), (600.0, "min", 10.0), (9000.0, "h", 2.5)]
)
def test_time_has_a_suitable_unit(tmp_path, seconds, unit, x):
    made = run(tmp_path / "a", iterations=[(100, 1.0)], seconds=[(100, seconds)])
    chart = curves.make_chart([made], "wall")
    assert chart.x_label == f"Wall-clock time ({unit})"
    assert chart.series[0].x.tolist() == [x]


def test_work_done_twice_after_a_crash_counts_once(tmp_path):
    folder = make(tmp_path / "a", iterations=[(100, 1.0), (200, 2.0), (300, 3.0)])
    # The run died after 300, went back to 100, and repeated 200 and 300.
    laps = [(100, 1.0), (200, 10.0), (300, 10.0), (200, 2.0), (300, 3.0)]
    write_lines(folder / "timing.jsonl", [{"steps": s, "wall_s": t} for s, t in laps])
    chart = curves.make_chart([run_reader.read_run(folder)], "wall")
    assert chart.series[0].x.tolist() == [1.0, 3.0, 6.0]


def test_what_follows_the_last_iteration_counts_with_it(tmp_path):
    folder = make(tmp_path / "a", iterations=[(100, 1.0), (200, 2.0), (300, 3.0)])
    # The run was interrupted after 200 and resumed.
    laps = [(100, 1.0), (200, 1.0), (200, 0.5, 1), (300, 1.0), (300, 2.0, 1)]
    named = [{"steps": s, "wall_s": t, **({"closing": 1} if x else {})} for s, t, *x in laps]
    write_lines(folder / "timing.jsonl", named)
    chart = curves.make_chart([run_reader.read_run(folder)], "wall")
    assert chart.series[0].x.tolist() == [1.0, 2.5, 5.5]
    # The repeated lines replace the lost ones, and their closing line too.
    write_lines(folder / "timing.jsonl", [*named, {"steps": 200, "wall_s": 4.0}])
    assert run_reader.read_run(folder).compute_elapsed_s("wall_s")[1].tolist() == [1.0, 5.0]


def test_half_a_line_of_timing_from_a_crash_is_passed_over(tmp_path):
    folder = make(tmp_path / "a", iterations=[(100, 1.0), (200, 2.0)])
    laps = ['{"steps": 100, "wall_s": 5}', '{"steps": 20{"steps": 200, "wall_s": 7}', "[]"]
    laps += ['{"steps": 300, "wall_s": 7}']
    (folder / "timing.jsonl").write_text("\n".join(laps) + "\n")
    chart = curves.make_chart([run_reader.read_run(folder)], "wall")
    assert chart.series[0].x.tolist() == [5.0, 8.5]


def test_no_processor_time_where_executors_do_not_tell_theirs(tmp_path):
    given = {"iterations": [(100, 1.0)], "seconds": [(100, 8.0)]}
    with pytest.raises(CheckpointError, match="no record of its workers' processor time"):
        curves.make_chart([run(tmp_path / "a", fleet="flame", **given)], "cpu")
    alone = run(tmp_path / "b", fleet="inline", **given)
    assert curves.make_chart([alone], "cpu").series[0].x.tolist() == [4.0]


def test_smoothing_is_a_mean_of_the_points_around_each_point(tmp_path):
    values = np.array([1.0, 2.0, 6.0, 4.0])
    assert curves.smooth_values(values, 1).tolist() == values.tolist()
    assert curves.smooth_values(values, 2).tolist() == [1.0, 1.5, 4.0, 5.0]
    by_hand = [4 / 3, 3.0, 4.0, 14 / 3]  # of 1 1 2 6 4 4: the ends are repeated
    assert curves.smooth_values(values, 3).tolist() == pytest.approx(by_hand)
    assert curves.smooth_values(values, 99)[0] == pytest.approx((49 * 1 + 13 + 46 * 4) / 99)
    made = run(tmp_path / "a", evaluations=list(zip((1, 2, 3, 4), values, strict=True)))
    chart = curves.make_chart([made], smooth=3)
    assert chart.series[0].y.tolist() == pytest.approx(by_hand)
    assert chart.series[0].low is None
    assert chart.y_label == "Evaluation return, mean of 3"


def test_seeds_at_unequal_steps_meet_on_a_grid_that_all_cover(tmp_path):
    a = run(tmp_path / "a", seed=0, evaluations=[(0, 0.0), (10, 10.0), (20, 20.0)])
    b = run(tmp_path / "b", seed=1, evaluations=[(5, 10.0), (15, 20.0), (25, 30.0)])
    (line,) = curves.make_chart([a, b]).series
    assert line.x.tolist() == [5, 10, 15, 20]
    # a is x and b is x + 5. The interquartile mean of two values is their mean.
    assert line.y.tolist() == [7.5, 12.5, 17.5, 22.5]
    assert (line.low <= line.y).all()
    assert (line.y <= line.high).all()
    assert line.low[0] == 5.0


def test_seeds_without_common_steps_are_drawn_separately_with_a_note(tmp_path):
    spans = ((100, 200, 300), (400, 500, 600), (550, 650, 700))
    runs = [
        run(tmp_path / str(seed), seed=seed, evaluations=[(s, float(s + seed)) for s in span])
        for seed, span in enumerate(spans)
    ]
    other = [
        run(tmp_path / f"r{seed}", seed=seed, algorithm="reinforce",
            evaluations=[(s, 1.0) for s in STEPS])
        for seed in range(2)
    ]  # fmt: skip
    chart = curves.make_chart([*runs, *other])
    assert [line.label for line in chart.series] == [
        "PPO, seed 0", "PPO, seed 1", "PPO, seed 2", "REINFORCE, 2 seeds",
    ]  # fmt: skip
    for seed, (line, span) in enumerate(zip(chart.series[:3], spans, strict=True)):
        assert line.x.tolist() == list(span)
        assert line.y.tolist() == [s + seed for s in span]
        # For a single run, the interval is over its evaluation episodes.
        assert line.low.tolist() == [s + seed - 1 for s in span]
    assert "evaluation episodes of a single run" in " ".join(chart.notes)


def test_seeds_that_meet_in_a_point_have_no_line_of_it(tmp_path):
    a = run(tmp_path / "a", seed=0, evaluations=[(1, 1.0), (2, 2.0), (3, 3.0)])
    b = run(tmp_path / "b", seed=1, evaluations=[(3, 3.0), (4, 4.0), (5, 5.0)])
    assert [line.x.tolist() for line in curves.make_chart([a, b]).series] == [[1, 2, 3], [3, 4, 5]]
    # Each run has one point, at the same place, which is all there is.
    c, d = (
        run(tmp_path / name, seed=seed, iterations=[(3, 4.0 * seed)])
        for seed, name in enumerate("cd")
    )
    (line,) = curves.make_chart([c, d]).series
    assert (line.x.tolist(), line.y.tolist()) == ([3], [2])


def test_episodes_of_seeds_that_never_meet_keep_their_dots(tmp_path):
    runs = [
        run(tmp_path / str(seed), seed=seed, algorithm="reinforce",
            episodes=[(1.0, length)] * 60)
        for seed, length in enumerate((1, 100))
    ]  # fmt: skip
    chart = curves.make_chart(runs, "total-steps")
    # The first run has 60 steps, and the first episode of the second run ends at step 100.
    assert [line.label for line in chart.series] == ["REINFORCE, seed 0", "REINFORCE, seed 1"]
    assert [len(line.dots[0]) for line in chart.series] == [60, 60]
    assert [len(line.x) for line in chart.series] == [60, 60]


def test_a_run_without_what_the_others_have_is_left_out_and_named(tmp_path):
    runs = [
        run(tmp_path / str(seed), seed=seed, evaluations=[(s, 1.0) for s in STEPS],
            iterations=[(100, 5.0)])
        for seed in range(2)
    ]  # fmt: skip
    begun = run(tmp_path / "begun", seed=2, iterations=[(100, 5.0)])
    chart = curves.make_chart([*runs, begun], metric="eval_return_mean")
    assert [line.label for line in chart.series] == ["PPO, 2 seeds"]
    assert f"{begun.folder} has no eval_return_mean yet. This run is skipped." in " ".join(
        chart.notes
    )
    other = run(tmp_path / "hopper", environment="Hopper-v5", iterations=[(100, 5.0)])
    panels = curves.make_figure([*runs, other], metric="eval_return_mean")
    assert [panel.title for panel in panels.parts] == ["CartPole-v1"]
    assert f"{other.folder} has no eval_return_mean yet. This run is skipped." in panels.notes


def test_a_fine_grid_is_thinned():
    grid = curves.make_common_grid([np.arange(0.0, 1000.0), np.arange(0.5, 900.0)])
    assert (len(grid), grid[0], grid[-1]) == (200, 0.5, 899.5)


def test_what_cannot_be_drawn_is_a_sentence(tmp_path):
    made = run(tmp_path / "a", evaluations=[(s, 1.0) for s in STEPS])
    with pytest.raises(ConfigError, match="no metric 'los'") as caught:
        curves.make_chart([made], metric="los")
    assert caught.value.hint.startswith("--metric loss")
    with pytest.raises(ConfigError, match="no metric 'xyz'") as caught:
        curves.make_chart([made], metric="xyz")
    assert "eval_return_mean" in caught.value.hint
    with pytest.raises(ConfigError, match="no x axis 'time'"):
        curves.make_chart([made], "time")
    with pytest.raises(ConfigError, match="--smooth is 0"):
        curves.make_chart([made], smooth=0)
    with pytest.raises(CheckpointError, match="a has no loss yet"):
        curves.make_chart([made], metric="loss")
    with pytest.raises(CheckpointError, match="no record of its wall-clock time"):
        curves.make_chart([made], "wall")
    with pytest.raises(CheckpointError, match="not finished an episode yet"):
        curves.make_chart([made], metric="episode_return")


# Overviews of runs.


def test_a_line_that_is_being_written_is_left_alone(tmp_path):
    folder = make(tmp_path / "a", evaluations=[(s, 1.0) for s in STEPS], episodes=[(1.0, 2)])
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"steps": 500, "eval_ret')
    with (folder / "episodes.csv").open("a") as file:
        file.write("3.")
    found = run_reader.read_run(folder)
    assert len(found.metrics) == 3
    assert found.read_episodes()[0].tolist() == [1.0]


@pytest.mark.parametrize(
    ("file", "text", "sentence"),
    [
        ("metrics.jsonl", '{"steps": 1}\nrubbish\n', "metrics.jsonl is damaged: line 2"),
        ("metrics.jsonl", "[1]\n", "metrics.jsonl is damaged: line 1"),
        ("result.json", "{}", "result.json is damaged"),
        ("config.toml", "= 1", "config.toml is not valid TOML"),
        ("config.toml", "a = 1", "config.toml is not the config of a run"),
    ],
)
def test_damage_is_named(tmp_path, file, text, sentence):
    folder = make(tmp_path / "a", final=1.0)
    (folder / file).write_text(text)
    with pytest.raises(CheckpointError, match=sentence):
        run_reader.read_run(folder)


def test_damaged_episodes_are_named(tmp_path):
    folder = make(tmp_path / "a")
    (folder / "episodes.csv").write_text("r,l\n1.0\n")
    with pytest.raises(CheckpointError, match=r"episodes\.csv is damaged"):
        run_reader.read_run(folder).read_episodes()


def test_a_folder_of_runs_stands_for_those_in_it_but_the_damaged(tmp_path):
    make(tmp_path / "runs/a", iterations=[(100, 1.0)])
    make(tmp_path / "runs/b")
    make(tmp_path / "runs/begun")
    (tmp_path / "runs/b/config.toml").write_text("=")
    found, notes = run_reader.read_runs([tmp_path / "runs", tmp_path / "runs/a"])
    assert [one.folder.name for one in found] == ["a"]
    assert "b/config.toml is not valid TOML" in notes[0]
    assert "begun has no metrics yet and is skipped." in notes[1]
    with pytest.raises(CheckpointError, match="There is no run with metrics"):
        run_reader.read_runs([make(tmp_path / "other/b").parent])
    with pytest.raises(CheckpointError):
        run_reader.read_runs([tmp_path / "runs/b"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="is not a run folder"):
        run_reader.read_runs([tmp_path / "empty"])
    with pytest.raises(CheckpointError, match="does not exist"):
        run_reader.read_runs([tmp_path / "absent"])


def test_machines_that_cannot_be_read_are_unknown(tmp_path):
    folder = make(tmp_path / "a")
    assert run_reader.read_run(folder).machines[0]["machine"]["processor"] == "A Processor"
    (folder / "machines.json").write_text(json.dumps({"not": "a list"}))
    assert run_reader.read_run(folder).machines == ()
