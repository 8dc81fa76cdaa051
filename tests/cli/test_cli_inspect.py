"""`resume`, `eval`, `inspect`, `runs`: commands that work with existing runs."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shlex
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from commands import TINY, TINY_REINFORCE, rlflame

from rlflame.fleet.base import make_policy_id
from rlflame.storage import checkpoint
from rlflame.terminal_text import format_return


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Three small runs: two that differ only in their steps, and one of REINFORCE."""
    folder = tmp_path_factory.mktemp("made")
    for name, words in {
        "short": (*TINY, "--steps", "256", "--set", "horizon_steps=512"),
        "long": (*TINY, "--steps", "512"),
        "reinforce": (*TINY_REINFORCE, "--algo", "reinforce", "--iterations", "3"),
    }.items():
        spoken = rlflame("train", *words, "--out", folder / name, "--json")
        assert spoken.code == 0, spoken.err
    return folder


@pytest.fixture
def folder(made, tmp_path, monkeypatch):
    """A copy of the runs in the current folder."""
    monkeypatch.chdir(shutil.copytree(made, tmp_path / "runs").parent)
    return tmp_path / "runs"


def policy(folder):
    return folder / "best.safetensors"


# resume


def test_resume_of_a_finished_run_says_so_and_changes_nothing(folder):
    before = {p: p.read_bytes() for p in (folder / "short").rglob("*") if p.is_file()}
    spoken = rlflame("resume", folder / "short")
    assert spoken.code == 0
    assert spoken.lines[0] == "This run already finished at step 256"
    assert f"rlflame resume {folder}/short --steps 512" in spoken.out
    assert before == {p: p.read_bytes() for p in (folder / "short").rglob("*") if p.is_file()}
    # Scripts may repeat a command, so the number of steps that the run already has is not an error.
    assert rlflame("resume", folder / "short", "--steps", "256").lines == spoken.lines


def test_resume_to_more_steps_equals_the_longer_run(folder):
    ended = rlflame("resume", folder / "short", "--steps", "512", "--json").events()[-1]
    at_once = checkpoint.load(folder / "long/latest.safetensors")
    assert ended["state_digest"] == at_once.state_digest
    for name in ("metrics.jsonl", "episodes.csv"):
        assert (folder / "short" / name).read_bytes() == (folder / "long" / name).read_bytes()


def test_a_run_whose_rate_has_fallen_to_0_is_not_taken_further(folder):
    """The weights would not change. The hint names a command that changes them."""
    refused = rlflame("resume", folder / "long", "--steps", "768")
    assert refused.code == 2
    assert "reached 0 by step 512" in refused.err
    (said,) = re.findall(r"new run from its policy: rlflame (.*)", refused.err)
    assert said == f"resume {folder / 'long'} --steps 768 --new-schedule"
    again = rlflame("resume", folder / "long")
    assert f"rlflame {said.replace('--steps 768', '--steps 1024')}" in again.out
    onward = rlflame(*shlex.split(said), "--json")
    assert onward.code == 0, onward.err
    run = folder / "long-2"
    assert not any("reaches 0" in event.get("text", "") for event in onward.events())
    rates = [
        json.loads(line)["learning_rate"]
        for line in (run / "metrics.jsonl").read_text().splitlines()
        if "learning_rate" in line
    ]
    assert len(rates) == 4
    assert min(rates) > 0
    recipe = checkpoint.load(run / "latest.safetensors").recipe
    assert (recipe.stop_at_steps, recipe.learning.horizon_steps) == (256, 256)


@pytest.mark.parametrize("unit", ["steps", "iterations"])
def test_an_end_beyond_the_end_of_learning_is_reported(tmp_path, unit):
    """The config of a shorter run may contain its horizon."""
    words = ("--set", f"stop_at_{unit}=2", "--set", f"horizon_{unit}=1", "--out", tmp_path / "run")
    if unit == "iterations":
        words = (*words, "--set", "stop_at_steps=none")
    said = rlflame("train", *TINY, *words, "--plain")
    assert f"reaches 0 after 1 {unit} (learning.horizon_{unit})" in said.err
    kept = rlflame("train", *TINY, *words[:4], "--set", "ppo.anneal_learning_rate=false",
                   *words[4:], "--plain")  # fmt: skip
    assert (kept.code, "reaches 0" in kept.err) == (0, False)


def test_resume_takes_the_name_of_a_checkpoint_too(folder):
    file = folder / "short/checkpoints/step-000000256.safetensors"
    ended = rlflame("resume", file, "--steps", "320", "--json").events()[-1]
    assert (ended["steps"], ended["folder"]) == (320, str(folder / "short"))


def test_what_resume_may_change_is_the_runtime(folder):
    spoken = rlflame("resume", folder / "short", "--steps", "320", "--set", "keep_checkpoints=1")
    assert spoken.code == 0, spoken.err
    assert len(list((folder / "short/checkpoints").iterdir())) == 1
    assert "keep_checkpoints = 1" in (folder / "short/config.toml").read_text()
    refused = rlflame("resume", folder / "short", "--steps", "640", "--set", "ppo.epochs=1")
    assert refused.code == 2
    assert "learning.ppo.epochs belongs to the recipe" in refused.err
    (said,) = re.findall(r"start a new run from this policy: rlflame (.*)", refused.err)
    onward = rlflame(*shlex.split(said), "--out", "onward")
    assert onward.code == 0, onward.err
    assert "epochs = 1" in Path("onward/config.toml").read_text()
    again = rlflame("resume", "onward", "--set", "ppo.epochs=2").err
    (said,) = re.findall(r"start a new run from this policy: rlflame (.*)", again)
    further = (*shlex.split(said), "--set", "learning.init_policy=none", "--out", "further")
    assert rlflame(*further).code == 0
    ending = rlflame("resume", folder / "short", "--set", "stop_at_steps=384")
    assert (ending.code, "--steps N" in ending.err) == (2, True)


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["{}/short", "--steps", "100"], 2, ["--steps 100 is not beyond the 256", "--steps 512"]),
        (["{}/short/best.safetensors"], 1, ["only a policy", "--init-from"]),
        (["{}/absent"], 1, ["absent"]),
        (["{}"], 1, ["has no checkpoint"]),
    ],
)
def test_what_cannot_be_resumed(folder, words, code, said):
    spoken = rlflame("resume", *(word.format(folder) for word in words))
    assert spoken.code == code
    for text in said:
        assert text in spoken.err
    assert "bug" not in spoken.err


def test_a_damaged_config_is_named_and_may_be_removed(folder):
    file = folder / "short/config.toml"
    file.write_text("runtime = [")
    spoken = rlflame("resume", folder / "short", "--steps", "320")
    assert (spoken.code, f"rm {file}" in spoken.err) == (2, True)
    file.unlink()
    words = ("resume", folder / "short", "--steps", "320", "--fleet", "inline")
    assert rlflame(*words).code == 0


def test_a_policy_is_compared_with_the_checkpoint_that_it_comes_from(folder, tmp_path):
    run, file = folder / "short", tmp_path / "policy.safetensors"
    assert rlflame("export", run / "latest.safetensors", "-o", file).code == 0
    shown = rlflame("inspect", file, run)
    assert (shown.code, shown.err) == (0, "")
    assert shown.lines[-1] == f"The policies of {file} and {run} are bit-identical."
    assert rlflame("inspect", file, run, "--json").json()["equal"]
    weights = {name: array + 1 for name, array in checkpoint.load(file).policy.items()}
    save_with(file, tmp_path / "other.safetensors", policy=weights)
    shown = rlflame("inspect", run, tmp_path / "other.safetensors")
    assert (shown.code, "differ first in tensor policy." in shown.out) == (1, True)


def test_two_trainers_on_one_folder(folder):
    lock = os.open(folder / "short/.lock", os.O_RDWR)
    fcntl.flock(lock, fcntl.LOCK_EX)
    spoken = rlflame("resume", folder / "short", "--steps", "512")
    os.close(lock)
    assert spoken.code == 1
    assert "Another rlflame process is training" in spoken.err


# eval

EVAL = ("--fleet", "inline")


def test_eval_of_the_recorded_episodes_returns_what_is_recorded(folder):
    spoken = rlflame("eval", policy(folder / "short"), "--expect-recorded", *EVAL)
    assert spoken.code == 0, spoken.err
    recorded = checkpoint.load(policy(folder / "short")).evaluation
    expected = f"  check   All {recorded.episodes} returns are bit-identical to the record."
    assert spoken.lines[-1] == expected
    words = ("--episodes", str(recorded.episodes), "--seed", str(recorded.seed), "--json")
    shown = rlflame("eval", policy(folder / "short"), *words, *EVAL).json()
    assert tuple(shown["returns"]) == recorded.returns
    assert shown["mean"] == pytest.approx(np.mean(recorded.returns))


def altered(file, *, record=None, fingerprint=None):
    """Change the record or the fingerprint of a policy file."""
    found = checkpoint.load(file)
    recorded = replace(found.evaluation, **(record or {}))
    made_on = {**found.fingerprint, **(fingerprint or {})}
    checkpoint.save(file, replace(found, evaluation=recorded, best=recorded, fingerprint=made_on))


def returning(returns):
    """The parts of a record that depend on its returns."""
    return {"returns": returns, "min": min(returns), "max": max(returns)}


def test_another_record_from_a_machine_like_this_one_is_not_accepted(folder):
    file = policy(folder / "short")
    before = checkpoint.load(file).evaluation.returns
    altered(file, record=returning((before[0], before[1] + 1.0, *before[2:])))
    spoken = rlflame("eval", file, "--expect-recorded", *EVAL)
    assert spoken.code == 1
    assert f"Episode 1 returned {before[1]!r}, but the record has {before[1] + 1.0!r}" in spoken.err


@pytest.mark.parametrize(
    ("shift", "code", "word"), [(0.0, 0, "overlaps"), (1e6, 1, "does not overlap")]
)
def test_from_another_machine_the_intervals_must_overlap(folder, shift, code, word):
    file = policy(folder / "short")
    found = checkpoint.load(file).evaluation
    record = returning((found.returns[0] + 1.0, *found.returns[1:]))
    record |= {"low": found.low + shift, "high": found.high + shift}
    altered(file, record=record, fingerprint={"numpy": "1.0"})
    spoken = rlflame("eval", file, "--expect-recorded", "--json", *EVAL)
    assert spoken.code == code
    (check,) = json.loads(spoken.lines[0])["checks"]
    assert check["passed"] == (code == 0)
    assert word in check["text"]
    assert "numpy: 1.0 -> " in check["text"]


def test_expect_recorded_excludes_other_episodes_and_needs_a_record(folder):
    file = policy(folder / "short")
    for words in (["--episodes", "3"], ["--seed", "0"], ["--stochastic"], ["--vs", file]):
        spoken = rlflame("eval", file, "--expect-recorded", *words)
        assert spoken.code == 2
        assert "--expect-recorded runs only the recorded episodes" in spoken.err
    checkpoint.save(file, replace(checkpoint.load(file), evaluation=None, best=None))
    spoken = rlflame("eval", file, "--expect-recorded")
    assert (spoken.code, "no recorded evaluation" in spoken.err) == (1, True)


def test_eval_seeds_and_sampling_are_different_episodes_and_repeat_themselves(folder):
    def returns(*words):
        file = policy(folder / "short")
        return rlflame("eval", file, "--episodes", "6", "--json", *EVAL, *words).json()["returns"]

    assert returns() == returns("--seed", "0")
    assert returns("--seed", "1") != returns()
    assert returns("--stochastic") == returns("--stochastic") != returns()


def test_min_return_is_an_exit_code(folder):
    file = policy(folder / "short")
    mean = rlflame("eval", file, "--episodes", "5", "--json", *EVAL).json()["mean"]
    words = ("eval", file, "--episodes", "5", *EVAL, "--min-return")
    reached, missed = rlflame(*words, mean), rlflame(*words, mean + 0.5)
    assert (reached.code, missed.code) == (0, 1)
    assert "reaches" in reached.lines[-1]
    assert "is below" in missed.err
    shown = rlflame(*words, mean + 0.5, "--json")
    assert (shown.json()["passed"], shown.code) == (False, 1)
    assert "is below" in shown.err
    none = rlflame(*words, "nan")
    assert (none.code, none.out) == (2, "")
    assert "--min-return nan" in none.err


@pytest.mark.parametrize("option", ["eval", "--vs"])
def test_the_best_policy_of_a_run_folder_is_evaluated(folder, option):
    first = () if option == "eval" else (policy(folder / "long"), option)
    by_folder, by_file = (
        rlflame("eval", *first, path, *EVAL, "--json").json()
        for path in (folder / "short", folder / "short/best.safetensors")
    )
    assert by_folder["returns"] == by_file["returns"]
    assert rlflame("eval", folder).code == 1


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("eval", "absent.safetensors"), 1),
        (("eval", "{}/short/best.safetensors", "--min-return", "nan"), 2),
        (("eval", "{}/short/best.safetensors", "--expect-recorded", "--seed", "1"), 2),
        (("inspect", "absent.safetensors"), 1),
        (("inspect", "{}/short", "--recipe"), 2),
        (("runs", "absent"), 1),
        (("resume", "absent"), 1),
    ],
)
def test_an_error_is_a_json_object_where_json_is_asked_for(folder, words, code):
    spoken = rlflame(*(word.format(folder) for word in words), "--json")
    said = spoken.json()
    assert (spoken.code, said["exit_code"], said["event"]) == (code, code, "error")
    assert f"rlflame: {said['message']}" in spoken.err
    assert said["hint"]


def test_two_policies_play_the_same_episodes(folder):
    one, other = policy(folder / "short"), policy(folder / "reinforce")
    words = ("--episodes", "12", "--json", *EVAL)
    shown = rlflame("eval", one, "--vs", other, *words).json()
    alone = rlflame("eval", other, *words).json()
    assert shown["versus"]["returns"] == alone["returns"]
    gaps = np.array(shown["returns"]) - np.array(alone["returns"])
    assert shown["difference"]["mean"] == pytest.approx(gaps.mean())
    assert shown["difference"]["low"] <= gaps.mean() <= shown["difference"]["high"]
    said = rlflame("eval", one, "--vs", one, "--episodes", "4", *EVAL)
    assert "difference  +0.0, 95% interval [+0.0, +0.0]" in said.out
    assert "no clear difference" in said.out


def test_policies_of_different_environments_are_not_compared(folder):
    made = rlflame("train", *TINY, "--env", "acrobot", "--steps", "64", "--out", "a")
    assert made.code == 0, made.err
    spoken = rlflame("eval", policy(folder / "short"), "--vs", "a/best.safetensors")
    assert spoken.code == 2
    assert "CartPole-v1" in spoken.err
    assert "Acrobot-v1" in spoken.err


def test_eval_in_lines(folder):
    file = policy(folder / "short")
    shown = rlflame("eval", file, "--episodes", "5", "--json", *EVAL).json()
    spoken = rlflame("eval", file, "--episodes", "5", *EVAL)
    assert spoken.err == ""
    assert spoken.lines == [
        f"  policy  {file}: CartPole-v1, PPO, step {shown['steps']:,}",
        f"  return  {shown['mean']:.1f}, 95% interval [{shown['low']:.1f}, {shown['high']:.1f}] "
        "over 5 episodes, most likely actions",
        f"  spread  std {shown['std']:.1f}, IQM {shown['iqm']:.1f}, min {shown['min']:.1f}, "
        f"max {shown['max']:.1f}",
        f"  length  {shown['length_mean']:.1f} steps on average",
    ]


def test_eval_knows_settings_of_the_runtime_and_no_others(folder):
    """Hints of fleets name such settings."""
    words = ("eval", policy(folder / "short"), "--episodes", "2", "--json")
    asked = rlflame(*words, "--set", "runtime.fleet=inline").json()
    assert asked["mean"] == rlflame(*words, *EVAL).json()["mean"]
    refused = rlflame(*words, "--set", "ppo.epochs=3")
    assert refused.code == 2
    assert "ppo.epochs belongs to the recipe" in refused.err


# inspect


def test_a_file_in_lines(folder):
    found = checkpoint.load(folder / "short/latest.safetensors")
    spoken = rlflame("inspect", folder / "short/latest.safetensors")
    assert spoken.code == 0
    words = {line.split()[0]: line for line in spoken.lines}
    assert "checkpoint" in words["file"]
    assert "CartPole-v1" in words["environment"]
    assert "step 256, iteration 4" in words["progress"]
    assert words["digest"].endswith(found.digest)
    assert words["state"].endswith(found.state_digest)
    assert f"numpy {np.__version__}" in words["made"]
    assert format_return(found.evaluation.mean) in words["evaluation"]


def test_a_file_as_json_and_its_recipe_as_a_config(folder):
    file = folder / "short/latest.safetensors"
    (shown,) = rlflame("inspect", file, "--json").json()["files"]
    found = checkpoint.load(file)
    assert (shown["digest"], shown["kind"]) == (found.digest, "checkpoint")
    assert shown["recipe"] == found.recipe.model_dump(mode="json")
    assert shown["tensors"]["policy.actor.0.weight"] == {"dtype": "float32", "shape": [4, 64]}
    (folder / "recipe.toml").write_text(rlflame("inspect", file, "--recipe").out)
    again = ("train", "--config", folder / "recipe.toml", "--fleet", "inline", "--json")
    assert rlflame(*again).events()[-1]["digest"] == found.digest


def test_equal_files_and_folders_are_equal(folder):
    files = (folder / "short", folder / "short/latest.safetensors")
    spoken = rlflame("inspect", *files)
    assert spoken.code == 0
    assert spoken.lines[-1] == f"{files[0]} and {files[1]} are bit-identical."
    assert rlflame("inspect", *files, "--json").json()["equal"] is True


def save_with(file, copy, **changes):
    found = checkpoint.load(file)
    return checkpoint.save(copy, replace(found, **changes))


def test_the_first_number_that_differs_is_named(folder):
    file, copy = policy(folder / "short"), folder / "copy.safetensors"
    weights = {k: v.copy() for k, v in checkpoint.load(file).policy.items()}
    name = "actor.1.weight"
    weights[name][2, 3] = np.nextafter(weights[name][2, 3], np.float32(9))
    weights[name][5, 0] += 1.0
    save_with(file, copy, policy=weights)
    spoken = rlflame("inspect", file, copy)
    assert spoken.code == 1
    last = spoken.lines[-1]
    assert f"differ first in tensor policy.{name} at [2, 3]: " in last
    assert "(2 of 4,096 numbers differ)" in last


def test_a_recipe_field_and_a_counter_that_differ_are_named(folder):
    spoken = rlflame("inspect", folder / "short", folder / "long")
    assert spoken.code == 1
    assert "recipe stop_at_steps: 256 and 512" in spoken.lines[-1]
    spoken = rlflame("inspect", folder / "short", folder / "reinforce", "--json")
    assert spoken.code == 1
    (difference,) = json.loads(spoken.out)["differences"]
    assert difference.startswith("recipe ")
    file, copy = policy(folder / "short"), folder / "copy.safetensors"
    progress = checkpoint.load(file).progress
    save_with(file, copy, progress=replace(progress, episodes=progress.episodes + 1))
    spoken = rlflame("inspect", file, copy)
    said = f"progress episodes: {progress.episodes} and {progress.episodes + 1}"
    assert (spoken.code, said in spoken.lines[-1]) == (1, True)


def test_a_recipe_that_was_written_before_a_setting_is_equal(folder, monkeypatch):
    files = [folder / "short/latest.safetensors", folder / "copy.safetensors"]
    loaded = checkpoint.load(files[0])
    dumped = type(loaded.recipe).model_dump_json

    def before(recipe, **words):
        written = json.loads(dumped(recipe, **words))
        del written["learning"]["ppo"]["target_kl"]
        return json.dumps(written)

    monkeypatch.setattr(type(loaded.recipe), "model_dump_json", before)
    checkpoint.save(files[1], loaded)
    monkeypatch.undo()
    spoken = rlflame("inspect", *files)
    assert spoken.code == 0, spoken.out + spoken.err
    assert spoken.lines[-1] == f"{files[0]} and {files[1]} are bit-identical."


def test_equal_states_of_different_recipes_are_not_equal(folder):
    file, copy = policy(folder / "short"), folder / "copy.safetensors"
    found = checkpoint.load(file)
    changed = found.recipe.evaluation.model_copy(update={"episodes": 77})
    saved = save_with(file, copy, recipe=found.recipe.model_copy(update={"evaluation": changed}))
    assert saved.state_digest == found.state_digest
    spoken = rlflame("inspect", file, copy)
    assert spoken.code == 1
    assert "differ first in recipe evaluation.episodes: 2 and 77" in spoken.lines[-1]


def test_machines_that_differ_are_named_beside_the_difference(folder):
    file, copy = policy(folder / "short"), folder / "copy.safetensors"
    weights = {k: v + np.float32(1) for k, v in checkpoint.load(file).policy.items()}
    fingerprint = {**checkpoint.load(file).fingerprint, "core": "Zen9"}
    save_with(file, copy, policy=weights, fingerprint=fingerprint)
    assert "-> Zen9" in rlflame("inspect", file, copy).lines[-1]


@pytest.mark.parametrize("command", ["inspect", "eval"])
def test_a_file_that_is_none_is_a_sentence(folder, command):
    (folder / "text.safetensors").write_text("hello " * 100)
    for file in (folder / "text.safetensors", folder / "absent.safetensors"):
        spoken = rlflame(command, file)
        assert spoken.code == 1
        assert spoken.err.startswith(f"rlflame: {file} ")
        assert "bug" not in spoken.err


# runs


def test_runs_lists_what_is_there(folder, monkeypatch):
    spoken = rlflame("runs")
    assert spoken.code == 0
    header, *rows = (line.split() for line in spoken.lines)
    assert header == ["run", "state", "environment", "algorithm", "progress", "best"]
    found = {row[0]: row for row in rows}
    assert found.keys() == {"runs/short", "runs/long", "runs/reinforce"}
    assert found["runs/short"][1:7] == ["finished", "CartPole-v1", "ppo", "256", "of", "256"]
    assert found["runs/reinforce"][4:7] == ["3", "of", "3"]
    shown = {run["folder"]: run for run in rlflame("runs", folder, "--json").json()}
    best = checkpoint.load(folder / "short/latest.safetensors").best.mean
    assert shown[str(folder / "short")]["best_return"] == best


def test_runs_tells_training_from_stopped(folder):
    config = (folder / "long/config.toml").read_text()
    latest = checkpoint.load(folder / "long/latest.safetensors")
    longer = replace(latest, recipe=latest.recipe.model_copy(update={"stop_at_steps": 999}))
    for file in (folder / "long").rglob("*.safetensors"):
        file.unlink()
    checkpoint.save(folder / "long/latest.safetensors", longer)
    (folder / "long/config.toml").write_text(config)
    (run,) = rlflame("runs", folder / "long", "--json").json()
    assert (run["state"], run["steps"], run["stop_at_steps"]) == ("stopped", 512, 999)
    lock = os.open(folder / "long/.lock", os.O_RDWR)
    fcntl.flock(lock, fcntl.LOCK_EX)
    with (folder / "long/metrics.jsonl").open("a") as file:
        file.write('{"steps": 640, "iteration": 10}\n{"steps": 70')
    (run,) = rlflame("runs", folder / "long", "--json").json()
    os.close(lock)
    assert (run["state"], run["steps"], run["iterations"]) == ("training", 640, 10)


def test_what_is_to_be_typed_names_no_damaged_file(folder):
    for name in ("latest", "best"):
        file = folder / f"long/{name}.safetensors"
        whole = file.read_bytes()
        file.unlink()
        file.write_bytes(whole[:-7])
    good = max((folder / "long/checkpoints").glob("*.safetensors"))
    spoken = rlflame("resume", folder / "long")
    assert spoken.code == 0
    resume, evaluate = (line.split("rlflame ")[1] for line in spoken.lines if "rlflame " in line)
    assert str(good) in evaluate
    assert resume.endswith("--new-schedule")
    onward = rlflame(*shlex.split(resume))
    assert onward.code == 0, onward.err
    recipe = checkpoint.load(folder / "long-2/latest.safetensors").recipe
    assert recipe.learning.init_policy == make_policy_id(checkpoint.load(good).policy)


def test_a_run_whose_final_evaluation_is_missing_is_not_finished(folder):
    """The disk may have been full by then. `rlflame resume` runs the evaluation."""
    (folder / "long/result.json").unlink()
    (run,) = rlflame("runs", folder / "long", "--json").json()
    assert run["state"] == "stopped"
    assert rlflame("resume", folder / "long").code == 0
    (run,) = rlflame("runs", folder / "long", "--json").json()
    assert run["state"] == "finished"


def test_what_is_no_run_or_damaged_does_not_break_the_list(folder):
    (folder / "notes").mkdir()
    (folder / "notes/config.toml").write_text("title = 'mine'")
    (folder / "file.txt").write_text("hello")
    for file in (folder / "short").rglob("*.safetensors"):
        file.write_bytes(file.read_bytes()[:-1])
    (folder / "long/metrics.jsonl").write_bytes(b"\xff\xfe")
    (folder / "dangling").symlink_to(folder / "nowhere")
    spoken = rlflame("runs", folder)
    assert spoken.code == 0
    states = {line.split()[0]: line.split()[1] for line in spoken.lines[1:]}
    assert states == {
        f"{folder}/short": "damaged",
        f"{folder}/long": "finished",
        f"{folder}/reinforce": "finished",
    }
    assert "is damaged" in spoken.err


def test_listing_writes_nothing_and_takes_no_lock(folder):
    for lock in folder.rglob(".lock"):
        lock.unlink()
    before = sorted(folder.rglob("*"))
    assert rlflame("runs", folder).code == 0
    assert sorted(folder.rglob("*")) == before


def test_no_runs_yet_is_no_error(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    spoken = rlflame("runs")
    assert (spoken.code, spoken.out) == (0, "")
    assert "rlflame train starts one" in spoken.err
    assert rlflame("runs", "elsewhere").code == 1
    assert rlflame("runs", "--json").json() == []
