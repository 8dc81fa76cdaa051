"""`rlflame eval` as a gate, and commands on run folders and on machines that differ."""

from __future__ import annotations

from dataclasses import replace

import pytest
from commands import TINY, rlflame

from rlflame.experiment.comparison import check_difference, check_evaluation
from rlflame.storage import checkpoint

STEPS = ("--steps", "64")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A finished run. Tests must not change its folder."""
    folder = tmp_path_factory.mktemp("eval") / "run"
    words = (*TINY, *STEPS, "--set", "ppo.anneal_learning_rate=false")
    trained = rlflame("train", *words, "--out", folder)
    assert trained.code == 0, trained.err
    return folder


@pytest.fixture
def foreign(run, tmp_path):
    """The policy of the run as if it came from a machine with another processor."""
    source = checkpoint.load(run / "best.safetensors")
    file = tmp_path / "foreign.safetensors"
    checkpoint.save(file, replace(source, fingerprint={**source.fingerprint, "core": "Z80"}))
    return file, source.evaluation


@pytest.mark.parametrize("command", ["eval", "render", "export"])
def test_a_run_folder_means_its_best_policy_and_says_so(run, tmp_path, monkeypatch, command):
    monkeypatch.chdir(tmp_path)
    words = {"eval": ("--fleet", "inline", "--episodes", "2"), "render": ("--width", "32")}
    shown = rlflame(command, run, *words.get(command, ()))
    assert shown.code == 0, shown.err
    best = run / "best.safetensors"
    assert str(best) in shown.err
    assert "best policy" in shown.err
    named = rlflame(command, best, *words.get(command, ()))
    assert (named.out, named.err) == (shown.out, "")


def test_the_folder_of_a_sweep_is_answered_with_a_seed(run, tmp_path):
    (tmp_path / "seed-0").mkdir()
    refused = rlflame("eval", tmp_path)
    assert (refused.code, refused.out) == (1, "")
    assert str(tmp_path / "seed-0") in refused.err


def evaluate(file, *words):
    shown = rlflame("eval", file, "--fleet", "inline", "--episodes", "5", *words)
    assert shown.code == 0, shown.err
    return shown.err


def test_another_machine_is_mentioned_only_if_returns_differ(foreign, tmp_path):
    file, record = foreign
    assert record is not None
    assert evaluate(file) == ""
    source = checkpoint.load(file)
    other = replace(record, returns=(record.returns[0] + 1.0, *record.returns[1:]))
    checkpoint.save(tmp_path / "other.safetensors", replace(source, evaluation=other))
    drawn = rlflame("render", tmp_path / "other.safetensors", "-o", tmp_path / "x.png")
    assert "core: Z80 -> " in drawn.err
    assert rlflame("render", file, "-o", tmp_path / "x.png").err == ""
    note = evaluate(tmp_path / "other.safetensors")
    assert "core: Z80 -> " in note
    assert len(note.splitlines()) == 1
    # Other episodes cannot be compared with the recorded ones.
    assert evaluate(tmp_path / "other.safetensors", "--seed", "7") == ""
    assert evaluate(tmp_path / "other.safetensors", "--stochastic") == ""


def test_inspect_lists_how_this_machine_differs(foreign, run):
    file, _ = foreign
    (line,) = (x for x in rlflame("inspect", file).lines if x.startswith("  differs here"))
    assert "core: Z80 -> " in line
    (content,) = rlflame("inspect", file, "--json").json()["files"]
    assert [text.partition(":")[0] for text in content["machine_differences"]] == ["core"]
    assert not any("differs here" in line for line in rlflame("inspect", run).lines)


def test_a_run_from_another_machine_resumes_with_one_note(run, tmp_path):
    import shutil

    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    latest = next((copy / "checkpoints").glob("step-*"))
    source = checkpoint.load(latest)
    fingerprint = {**source.fingerprint, "core": "Z80", "numpy": "0.1"}
    checkpoint.save(latest, replace(source, fingerprint=fingerprint))
    resumed = rlflame("resume", copy, "--steps", "128", "--fleet", "inline")
    assert resumed.code == 0, resumed.err
    (note,) = (line for line in resumed.err.splitlines() if "differs" in line)
    assert "core: Z80 -> " in note
    assert "numpy: 0.1 -> " in note


def compare_with_itself(run, *words):
    file = run / "best.safetensors"
    return rlflame("eval", file, "--vs", file, "--episodes", "4", *words)


def test_the_gate_opens_only_above_the_limit(run):
    """Every difference between a policy and itself is 0, so the interval is [0, 0]."""
    passed = compare_with_itself(run, "--fleet", "inline", "--better-than", "-0.5")
    assert passed.code == 0, passed.err
    assert "[+0.0, +0.0]" in passed.lines[-1]
    refused = compare_with_itself(run, "--fleet", "inline", "--better-than", "0")
    assert refused.code == 1
    assert "[+0.0, +0.0]" in refused.err
    assert "not above 0" in refused.err


@pytest.mark.parametrize(("limit", "code"), [("-0.5", 0), ("0", 1)])
def test_the_gate_in_json(run, limit, code):
    shown = compare_with_itself(run, "--fleet", "inline", "--better-than", limit, "--json")
    document = shown.json()
    (check,) = document["checks"]
    assert (shown.code, check["check"], check["passed"]) == (code, "better_than", not code)
    assert document["passed"] is not bool(code)
    assert document["difference"] == {"mean": 0.0, "low": 0.0, "high": 0.0}


@pytest.mark.parametrize("limit", ["0.5", "nan"])
def test_a_gate_needs_another_policy_and_a_number(run, limit):
    file = run / "best.safetensors"
    other = () if limit == "0.5" else ("--vs", file)
    refused = rlflame("eval", file, "--better-than", limit, *other)
    assert (refused.code, refused.out) == (2, "")
    assert "--better-than" in refused.err
    assert ("--vs OTHER --better-than 0.5" in refused.err) == (limit == "0.5")


def test_one_episode_has_no_interval(run, tmp_path):
    one = ("--fleet", "inline", "--episodes", "1")
    refused = compare_with_itself(run, *one, "--better-than", "-1")
    assert (refused.code, refused.out) == (2, "")
    assert "at least 2 episodes" in refused.err
    assert "--episodes 100" in refused.err
    shown = compare_with_itself(run, *one)
    assert shown.code == 0, shown.err
    assert "one episode is too few" in " ".join(shown.out.split())


def test_checks_show_the_digits_that_they_depend_on(run):
    record = checkpoint.load(run / "best.safetensors").evaluation
    other = replace(record, returns=tuple(value - 0.016 for value in record.returns))
    check = check_difference(record, other, 0.02)
    assert not check.passed
    assert "[+0.016, +0.016]" in check.text
    check = check_difference(record, other, 0.01)
    assert "is above 0.01" in check.text
    (check,) = check_evaluation(None, replace(record, mean=0.0612), 0.06, None)
    assert check.text == "The mean return 0.0612 reaches 0.06."


def test_any_number_of_workers_gives_the_same_json(run):
    words = ("--stochastic", "--better-than", "0", "--json")
    shown = [
        compare_with_itself(run, *words, "--fleet", fleet, "--workers", count)
        for fleet, count in (("inline", "1"), ("local", "1"), ("local", "2"))
    ]
    assert len({item.out for item in shown}) == 1
    assert {item.code for item in shown} == {1}
    assert len(set(shown[0].json()["returns"])) > 1
