"""`rlflame bench --recipe dppo|dsac`: which recipes run, what is counted, said and written."""

from __future__ import annotations

import contextlib
import json

import gloo
import pytest
from commands import rlflame

from rlflame.bench.published_dppo import SETUPS, make_sb3_request, make_variants
from rlflame.bench.race import RaceRun, Runner
from rlflame.bench.race_report import RaceResult, compute_final_return
from rlflame.learning.parallel.process_group import release_replicas

SMALL = tuple(
    word
    for setting in ("rollout.steps=16", "ppo.minibatch_size=32", "ppo.epochs=2")
    for word in ("--set", setting)
)


def test_the_recipes_are_those_of_the_article():
    """By hand: 32768 steps an iteration; 4096 samples a process at 0.001, times the processes."""
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
        Runner("exact", 1, None, [race(8.0), race(8.0), race(80.0)]),
        Runner("exact", 2, None, [race(8.0, steps=200)]),
        Runner("scaled", 4, None, [race(2.0)]),
    ]
    result = RaceResult("dppo", runners, None, True)
    assert [result.compute_speedup(one) for one in runners] == [1.0, 2.0, 4.0]
    said = "The exact recipe learned the same weights by 1, 2 learners, to the last bit."
    assert result.format_weights_comparison() == [said]
    assert (
        RaceResult("dppo", runners[:1], None, False).format_weights_comparison() == []
    )  # stopped before the second
    # Thirty episodes, of which the newest twenty earned 11 to 30.
    assert compute_final_return(race(1.0, returns=range(1, 31))) == pytest.approx(20.5)
    assert compute_final_return(race(1.0)) is None


#: In the place of stable-baselines3: an episode of return 7 for every eight steps.
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


def with_library(folder, monkeypatch, text):
    (folder / "stable_baselines3.py").write_text(text)
    monkeypatch.syspath_prepend(str(folder))


@contextlib.contextmanager
def forked(runtime, threads, hint, stop):
    """Learners as processes, without the seconds that each takes to load."""
    with gloo.gathered(runtime.learners) as group:
        yield group
        release_replicas(group)


def test_a_race_is_told_and_written(tmp_path, monkeypatch):
    with_library(tmp_path, monkeypatch, STAND_IN)
    monkeypatch.setattr("rlflame.experiment.learners.launcher.start_learners", forked)
    # As if two tasks had gone to a second worker in each training.
    monkeypatch.setattr("rlflame.bench.session.BenchSession.take_retried", lambda session: 2)
    spoken = rlflame(
        "bench", "--recipe", "dppo", "--learners", "1,2", "--steps", "300", *SMALL,
        "--compare", "inline", "-o", tmp_path / "new",
    )  # fmt: skip
    assert spoken.code == 0, spoken.err
    assert spoken.out.strip() == (tmp_path / "new/dppo.md").read_text().strip()
    facts = json.loads((tmp_path / "new/dppo.json").read_text())
    assert facts["same_bits"]
    assert facts["complete"]
    found = {(one["recipe"], one["learners"]): one for one in facts["runners"]}
    assert list(found) == [("exact", 1), ("exact", 2), ("scaled", 2), ("stable-baselines3", 1)]
    # Three iterations of 128 steps are the first that reach 300.
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
    assert "dppo, scaled with 2, 1 of 1 (2 tasks): measure again" in spoken.out
    assert (tmp_path / "new/dppo.curves.png").stat().st_size > 0
    table = (tmp_path / "new/dppo.csv").read_text().splitlines()
    assert table[0] == "learners,recipe,seconds,steps,case,final_return,retried"
    assert [row.split(",")[:2] for row in table[1:]] == [
        ["1", "exact"], ["2", "exact"], ["2", "scaled"], ["1", "stable-baselines3"]
    ]  # fmt: skip
    assert "Learners" in rlflame("plot", tmp_path / "new/dppo.csv", "-o", "-").out


def test_without_stable_baselines3_its_curve_is_left_out_in_a_line(tmp_path, monkeypatch):
    with_library(tmp_path, monkeypatch, "raise ImportError('not here')")
    # Files in the current folder stand in for nothing.
    trace, folder = tmp_path / "trace", tmp_path / "current"
    folder.mkdir()
    for name in ("stable_baselines3", "json", "gymnasium"):
        (folder / f"{name}.py").write_text(f"open({str(trace)!r}, 'w')")
    monkeypatch.chdir(folder)
    words = ("--set", "sac.batch_size=16", "--set", "sac.learning_starts=16")
    spoken = rlflame(
        "bench", "--recipe", "dsac", "--learners", "1", "--steps", "32", *words,
        "--set", "network.hidden=[8]", "--compare", "inline", "--json", "-o", tmp_path / "new",
    )  # fmt: skip
    assert spoken.code == 0, spoken.err
    # Pendulum's episodes have 200 steps.
    assert "No episode has ended, so there are no curves of returns." in spoken.err
    assert not (tmp_path / "new/dsac.curves.png").exists()
    assert [one["recipe"] for one in spoken.json()["runners"]] == ["exact"]
    assert "stable-baselines3 is not installed, so its curve is left out." in spoken.err
    assert not trace.exists()


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--recipe", "dppo", "--workers", "2"), "as many workers as learners"),
        (("--recipe", "dppo", "--compare", "local,inline"), "collects in one place"),
        (("--recipe", "flame-readme-ant", "--steps", "5"), "flame-readme-ant counts iterations"),
        (("--recipe", "dsac", "--learners", "0"), "--learners '0'"),
        (("--recipe", "dppo", "--learners", "3", "--set", "gradient_shards=8"), "cannot share"),
        (("--learners", "2", "scaling"), "Options before scaling"),
    ],
)
def test_what_cannot_be_raced_is_refused(words, sentence):
    spoken = rlflame("bench", *words)
    assert spoken.code == 2
    assert sentence in " ".join(spoken.err.split())
