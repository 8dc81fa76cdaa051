"""`benchmarks/published.py`: recipes, counts, printed output and files."""

from __future__ import annotations

import contextlib
import json

import gloo
import pytest
from commands import rlflame
from published import FLAME, RACES, main
from published_figures import COMPARISONS, find_benefit, make_section
from race import RaceRun, Runner, describe_runner, format_weights_comparison
from race_recipes import SETUPS, make_sb3_request, make_variants

from rlflame.errors import ConfigError
from rlflame.learning.parallel.process_group import release_replicas
from rlflame.rollout.machine import describe_machine

SMALL = tuple(
    word
    for setting in ("rollout.steps=16", "ppo.minibatch_size=32", "ppo.epochs=2")
    for word in ("--set", setting)
)


def test_the_recipes_are_those_of_the_article():
    """32768 steps per iteration; samples (4096) and rate (0.001) times the processes."""
    found = make_variants(SETUPS["dppo"], [1, 2, 8])
    assert [(one.kind, one.learners) for one in found] == [
        ("exact", 1), ("exact", 2), ("exact", 8), ("scaled", 2), ("scaled", 8),
    ]  # fmt: skip
    learnings = [one.case.recipe.learning for one in found]
    assert {one.rollout.columns * one.rollout.steps for one in learnings} == {32_768}
    assert [one.ppo.minibatch_size for one in learnings] == [4096] * 3 + [8192, 32_768]
    assert [one.ppo.learning_rate for one in learnings] == [0.001] * 3 + [0.002, 0.008]
    assert learnings[0] == learnings[1] == learnings[2]

    exact, _, scaled = make_variants(SETUPS["dsac"], [1, 4])
    one, four = exact.case.recipe.learning.sac, scaled.case.recipe.learning.sac
    assert (one.batch_size, one.learning_rate, one.updates_per_step) == (2048, 0.001, 1.0)
    assert (four.batch_size, four.learning_rate, four.updates_per_step) == (8192, 0.004, 0.25)
    assert (four.buffer_size, four.learning_starts) == (32_768, 2048)


def test_theirs_has_the_numbers_of_the_single_process():
    asked = make_sb3_request(make_variants(SETUPS["dppo"], [1])[0].case.recipe.learning)
    assert (asked["algorithm"], asked["environment"]) == ("PPO", "CartPole-v1")
    numbers = asked["arguments"]
    assert (numbers["n_steps"], numbers["batch_size"]) == (32_768, 4096)
    assert (numbers["learning_rate"], numbers["n_epochs"], numbers["vf_coef"]) == (0.001, 10, 0.5)


def race(seconds, steps=100, returns=()):
    episodes = [(n, float(n), float(earned)) for n, earned in enumerate(returns)]
    return RaceRun(seconds, seconds, 0.0, steps, episodes, "w")


def test_a_speed_up_is_of_the_time_for_as_many_steps_and_a_return_of_the_newest_episodes():
    runners = [
        Runner("a", "exact", 1, None, [race(8.0), race(8.0), race(80.0)]),
        Runner("b", "exact", 2, None, [race(8.0, steps=200)]),
        Runner("c", "scaled", 4, None, [race(2.0)]),
    ]
    facts = [describe_runner(one, runners[0]) for one in runners]
    assert [one["speedup"] for one in facts] == [1.0, 2.0, 4.0]
    (said,) = format_weights_comparison(runners)
    assert "with 1, 2 learners" in said
    assert format_weights_comparison(runners[:1]) == []  # stopped before the second
    # Of thirty episodes, the last twenty have returns from 11 to 30.
    assert race(1.0, returns=range(1, 31)).final_return == pytest.approx(20.5)
    assert race(1.0).final_return is None


#: A substitute for stable-baselines3, with an episode of return 7 every eight steps.
STAND_IN = """
__version__ = "0.0"
class PPO:
    def __init__(self, policy, env, device, **arguments):
        self.n_steps, self.num_timesteps = arguments["n_steps"], 0
    def learn(self, total_timesteps, callback):
        while self.num_timesteps < total_timesteps:
            for _ in range(self.n_steps):
                self.num_timesteps += 1
                ended = self.num_timesteps % 8 == 0
                callback({"infos": [{"episode": {"r": 7.0}} if ended else {}]}, {})
"""


def published(capsys, *words):
    """The results and the notes that a command prints."""
    main([str(word) for word in words])
    return capsys.readouterr()


def with_library(folder, monkeypatch, text):
    (folder / "stable_baselines3.py").write_text(text)
    monkeypatch.syspath_prepend(str(folder))


@contextlib.contextmanager
def forked(runtime, threads, hint, stop):
    """Start the learners by forking, which saves the seconds that each needs to load."""
    with gloo.gathered(runtime.learners) as group:
        yield group
        release_replicas(group)


def test_a_race_is_printed_and_written(tmp_path, monkeypatch, capsys):
    with_library(tmp_path, monkeypatch, STAND_IN)
    monkeypatch.setattr("rlflame.experiment.learners.launcher.start_learners", forked)
    # As if two tasks of each training had been given to a second worker.
    monkeypatch.setattr("rlflame.bench.runner.BenchSession.take_retried", lambda session: 2)
    spoken = published(
        capsys, "race", "dppo", "--learners", "1,2", "--steps", "300", *SMALL,
        "--compare", "inline", "-o", tmp_path / "new",
    )  # fmt: skip
    assert spoken.out.strip() == (tmp_path / "new/dppo.md").read_text().strip()
    facts = json.loads((tmp_path / "new/dppo.json").read_text())
    assert facts["same_bits"]
    assert facts["complete"]
    found = {(one["recipe"], one["learners"]): one for one in facts["runners"]}
    assert list(found) == [("exact", 1), ("exact", 2), ("scaled", 2), ("stable-baselines3", 1)]
    # Three iterations of 128 steps are the first that reach 300 steps.
    assert {one["races"][0]["steps"] for one in found.values()} == {384}
    alone, shared = (found["exact", n]["races"][0] for n in (1, 2))
    earned = [[(step, value) for step, _, value in one["episodes"]] for one in (alone, shared)]
    assert earned[0] == earned[1]
    assert alone["exchange_s"] == 0.0 < shared["exchange_s"]
    ends = [steps for steps, _, _ in alone["episodes"]]
    assert ends == sorted(ends)
    assert 0 < ends[0] <= ends[-1] <= 384
    assert found["stable-baselines3", 1]["final_returns"] == [7.0]
    assert len(found["stable-baselines3", 1]["races"][0]["episodes"]) == 384 // 8
    work = [one["work"] for one in facts["measurements"]]
    assert [one.get("ppo.minibatch_size") for one in work] == [32, 32, 64, None]
    assert (work[3]["steps"], work[3]["arguments.n_steps"]) == (300, 8 * 16)
    assert not any("seed" in name for one in work for name in one)
    assert [one["retried"] for one in facts["measurements"]] == [[2], [2], [2], [0]]
    assert "dppo, scaled with 2." in spoken.out
    assert (tmp_path / "new/dppo.curves.png").stat().st_size > 0
    table = (tmp_path / "new/dppo.csv").read_text().splitlines()
    assert table[0] == "learners,recipe,seconds,steps,case,final_return,retried"
    assert [row.split(",")[:2] for row in table[1:]] == [
        ["1", "exact"], ["2", "exact"], ["2", "scaled"], ["1", "stable-baselines3"]
    ]  # fmt: skip
    assert "Learners" in rlflame("plot", tmp_path / "new/dppo.csv", "-o", "-").out


def test_without_stable_baselines3_its_curve_is_left_out(tmp_path, monkeypatch, capsys):
    with_library(tmp_path, monkeypatch, "raise ImportError('not here')")
    # Files in the current folder do not replace modules.
    trace, folder = tmp_path / "trace", tmp_path / "current"
    folder.mkdir()
    for name in ("stable_baselines3", "json", "gymnasium"):
        (folder / f"{name}.py").write_text(f"open({str(trace)!r}, 'w')")
    monkeypatch.chdir(folder)
    words = ("--set", "sac.batch_size=16", "--set", "sac.learning_starts=16")
    spoken = published(
        capsys, "race", "dsac", "--learners", "1", "--steps", "32", *words,
        "--set", "network.hidden=[8]", "--compare", "inline", "--json", "-o", tmp_path / "new",
    )  # fmt: skip
    # Pendulum's episodes have 200 steps.
    assert "No episode has ended" in (tmp_path / "new/dsac.md").read_text()
    assert not (tmp_path / "new/dsac.curves.png").exists()
    assert [one["recipe"] for one in json.loads(spoken.out)["runners"]] == ["exact"]
    assert "stable-baselines3 is not installed, so its curve is left out." in spoken.err
    assert not trace.exists()


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("dppo", "--compare", "local,inline"), "runs on one fleet only"),
        (("dsac", "--learners", "0"), "--learners '0'"),
        (("dppo", "--learners", "5", "--set", "gradient_shards=8"), "cannot share"),
        (("dppo", "-o", "-"), "is not a folder."),
    ],
)
def test_what_cannot_be_raced_is_refused(words, sentence):
    with pytest.raises(ConfigError, match=sentence):
        main(["race", *words])


def test_the_commands_name_what_there_is():
    assert (tuple(COMPARISONS), tuple(SETUPS)) == (FLAME, RACES)


@pytest.mark.parametrize(
    ("name", "percent"),
    [("flame-readme-ant", 25.0), ("flame-report-ant", 43.3), ("flame-report-cartpole", 138.3)],
)
def test_what_others_published_agrees_with_itself(name, percent):
    """The published percentages are gains in episodes per second, rounded to a tenth."""
    theirs = COMPARISONS[name]
    rates = [round(theirs.episodes / side.seconds, 1) for side in (theirs.flame, theirs.local)]
    assert 100 * (rates[0] / rates[1] - 1) == pytest.approx(percent, abs=0.05)


def test_what_their_readme_says_of_episode_times():
    said = [find_benefit(ms) for ms in (1, 15, 20, 50, 99, 100, 1000)]
    assert said == [
        "overhead dominates", "marginal", "marginal", "from 50 episodes on",
        "from 50 episodes on", "near-linear", "essential",
    ]  # fmt: skip


def test_a_published_comparison_again(capsys):
    spoken = published(
        capsys, "flame", "flame-report-cartpole", "--iterations", "1", "--compare", "inline",
        "--set", "rollout.steps=5", "--workers", "1",
    )  # fmt: skip
    theirs = COMPARISONS["flame-report-cartpole"]
    assert f"{theirs.local.seconds:,.2f}" in spoken.out
    assert theirs.hardware in spoken.out
    assert "rlflame ran 1 iteration only." in spoken.out


def test_a_result_is_compared_with_flame_s_readmes(tmp_path, capsys):
    """The published rates are in a table with the rates of 2 workers on both fleets."""
    fills = [{"transitions": 100, "transitions_per_s": rate} for rate in (50.0, 100.0, 25.0)]
    facts = {
        "benchmark": "replay",
        "environment": "Pendulum-v1",
        "machine": describe_machine(),
        "fillings": [
            {"fleet": fleet, "workers": 2, "fills": [{**f, "transitions": n} for f in fills]}
            for fleet, n in (("local", 100), ("flame", 200))
        ],
    }
    (tmp_path / "replay.json").write_text(json.dumps(facts))
    spoken = published(capsys, "compare", tmp_path / "replay.json")
    for theirs in ("223,376", "76,016", "6,960", "0.34 of its local rate", "not stated"):
        assert theirs in spoken.out
    # Twice as many transitions at the same rate take twice as long.
    assert "rlflame with 2 workers: 0.50 " in spoken.out


def test_a_result_is_compared_with_other_readmes_too():
    rows = [{"case": "15 ms", "fleet": "flame", "workers": n, "speedup": {"value": 3.0}}
            for n in (5, 6)]  # fmt: skip
    cases = [{"name": "15 ms", "episode_ms": 15.0}, {"name": "ant", "episode_ms": None}]
    overheads = [{"fleet": "flame", "task_s": 0.002}]
    scaling = {"benchmark": "scaling", "rows": rows, "cases": cases, "overheads": overheads}
    _, speedups, _, benefits, cost = make_section(scaling).blocks
    assert speedups.rows == (("15 ms", "flame", "5", "3.00x", "~4x"),)
    assert benefits.rows == (("15 ms", "marginal"),)
    assert "2.00 ms on flame" in cost
    rates = [{"fleet": "local", "workers": 1, "ms_per_episode": 2.5}]
    rollouts = {"benchmark": "rollouts", "environment": "Hopper-v5", "rates": rates}
    assert make_section(rollouts).blocks[1].rows == (("local", "1", "2.50", "15"),)
    with pytest.raises(ConfigError, match="learners"):
        make_section({"benchmark": "learners"})
