"""Event files, read by TensorBoard: tags, numbers, and curves of resumed runs."""

from __future__ import annotations

import json
import math
import subprocess
import sys

import pytest
from commands import TINY, TINY_REINFORCE, rlflame
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.plugins.hparams import plugin_data_pb2

from rlflame.fleet.base import EventCounter, FleetEvent
from rlflame.storage.metrics import NAMES
from rlflame.storage.tracking import tensorboard
from rlflame.storage.tracking.tensorboard import EventFile

#: Common tags, which users and their scripts may expect.
WELL_KNOWN = {
    "Loss/policy_loss",
    "Loss/value_loss",
    "Loss/entropy_loss",
    "Info/learning_rate",
    "Rewards/rew_avg",
    "Game/ep_len_avg",
    "Time/step_per_second",
    "Test/cumulative_reward",
}


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def train(folder, *words):
    spoken = rlflame("train", *TINY, "--out", folder, *words)
    assert spoken.code == 0, spoken.err
    return folder


def curves(folder):
    """The curves as {tag: [(step, value)]}, loaded by TensorBoard."""
    loaded = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0})
    loaded.Reload()
    found = {
        tag: [(event.step, event.value) for event in loaded.Scalars(tag)]
        for tag in loaded.Tags()["scalars"]
    }
    assert found
    return found


def lines(folder, name="metrics.jsonl"):
    return [json.loads(line) for line in (folder / name).open()]


# The format


def test_events_are_what_tensorboard_reads(tmp_path):
    file = EventFile(tmp_path / "events.out.tfevents.1", 12.5)
    file.write_scalars(13.25, 2**40, {"A/b": -1.5, "ü": math.nan, "large": 1e300})
    file.write_session_start(14.0, {"name": "x", "on": True, "rate": 0.5, "count": 3})
    file.close()
    path = str(tmp_path / "events.out.tfevents.1")
    events = [Event.FromString(data) for data in RawEventFileLoader(path).Load()]
    version, started, scalars, begun = events
    assert (version.file_version, version.wall_time) == ("brain.Event:2", 12.5)
    assert started.session_log.status == 1
    assert (scalars.step, scalars.wall_time) == (2**40, 13.25)
    values = {value.tag: value.simple_value for value in scalars.summary.value}
    assert values["A/b"] == -1.5
    assert math.isnan(values["ü"])
    assert values["large"] == math.inf
    content = begun.summary.value[0].metadata.plugin_data
    assert content.plugin_name == "hparams"
    info = plugin_data_pb2.HParamsPluginData.FromString(content.content).session_start_info
    assert info.hparams["name"].string_value == "x"
    assert info.hparams["on"].bool_value is True
    assert (info.hparams["rate"].number_value, info.hparams["count"].number_value) == (0.5, 3.0)


# A run


def test_tags_and_numbers_are_those_of_the_record(tmp_path):
    folder = train(tmp_path / "run", "--steps", "256", "--tensorboard")
    seen = curves(folder)
    assert seen.keys() >= WELL_KNOWN
    assert seen.keys() >= {"Evaluation/return_mean", "Fleet/retried", "Time/collect_s"}
    record = lines(folder)
    for name, tag in (
        ("policy_gradient_loss", "Loss/policy_loss"),
        ("value_loss", "Loss/value_loss"),
        ("learning_rate", "Info/learning_rate"),
        ("episode_return_mean", "Rewards/rew_avg"),
        ("episode_length_mean", "Game/ep_len_avg"),
        ("eval_return_mean", "Evaluation/return_mean"),
    ):
        said = [(x["steps"], x[name]) for x in record if x.get(name) is not None]
        assert seen[tag] == [(step, pytest.approx(value)) for step, value in said], tag
    result = json.loads((folder / "result.json").read_text())
    assert seen["Test/cumulative_reward"] == [(256, pytest.approx(result["evaluation"]["mean"]))]
    laps = [lap for lap in lines(folder, "timing.jsonl") if "closing" not in lap]
    rates = [64 / lap["wall_s"] for lap in laps]
    assert [value for _, value in seen["Time/step_per_second"]] == pytest.approx(rates)


def test_every_name_of_the_record_has_a_place_of_its_own():
    actor_critics = {"actor_loss", "critic_loss"}  # names that only some algorithms use
    tags = [tensorboard.make_tag(name) for name in NAMES if name not in actor_critics]
    assert len(set(tags)) == len(tags)
    groups = {tag.partition("/")[0] for tag in tags}
    assert groups == {"Loss", "Info", "Rewards", "Game", "Evaluation"}
    assert tensorboard.make_tag("actor_loss") == "Loss/policy_loss"
    assert tensorboard.make_tag("critic_loss") == "Loss/value_loss"


def test_of_reinforce_the_loss_is_the_policy_s(tmp_path):
    words = (*TINY_REINFORCE, "--algo", "reinforce", "--iterations", "2", "--out", "run")
    assert rlflame("train", *words, "--tensorboard").code == 0
    losses = [(line["steps"], pytest.approx(line["loss"])) for line in lines(tmp_path / "run")]
    assert curves(tmp_path / "run")["Loss/policy_loss"] == losses


def test_hyperparameters_stand_beside_the_final_score(tmp_path):
    folder = train(tmp_path / "run", "--steps", "128", "--tensorboard", "--seed", "7")
    loaded = EventAccumulator(str(folder / "tensorboard" / "hparams"))
    loaded.Reload()
    # TensorBoard's table has a column for each number in the file of the hyperparameters.
    assert loaded.Tags()["scalars"] == ["Test/cumulative_reward"]
    (score,) = loaded.Scalars("Test/cumulative_reward")
    result = json.loads((folder / "result.json").read_text())
    assert score.value == pytest.approx(result["evaluation"]["mean"])
    found = loaded.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    info = plugin_data_pb2.HParamsPluginData.FromString(found).session_start_info
    assert info.hparams["learning.seed"].number_value == 7
    assert info.hparams["learning.environment.id"].string_value == "CartPole-v1"
    assert "learning.ppo.clip_range" in info.hparams


def without_time(seen):
    found = {tag: points for tag, points in seen.items() if not tag.startswith("Time/")}
    assert found.keys() >= WELL_KNOWN - {"Time/step_per_second"}
    return found


def test_a_resumed_run_goes_on_without_a_gap_or_a_doubling(tmp_path):
    whole = train(tmp_path / "whole", "--steps", "512", "--tensorboard")
    parts = train(tmp_path / "parts", "--steps", "256", "--tensorboard",
                  "--set", "horizon_steps=512")  # fmt: skip
    # The run's config contains the option.
    assert rlflame("resume", parts, "--steps", "512").code == 0
    assert without_time(curves(parts)) == without_time(curves(whole))
    times = [step for step, _ in curves(parts)["Time/step_per_second"]]
    assert times == list(range(64, 513, 64))
    for inside in ("tensorboard", "tensorboard/hparams"):
        assert len([*(parts / inside).glob("events.*")]) == 1


def test_a_run_that_goes_back_takes_its_curves_back(tmp_path):
    run = train(tmp_path / "run", "--steps", "512", "--tensorboard",
                "--set", "runtime.checkpoint_every_steps=64")  # fmt: skip
    whole = curves(run)
    earlier = sorted((run / "checkpoints").iterdir())[0]
    assert "512" not in earlier.name
    assert rlflame("resume", earlier).code == 0
    assert without_time(curves(run)) == without_time(whole)


def test_a_run_that_began_without_has_its_beginning_too(tmp_path):
    run = train(tmp_path / "run", "--steps", "256", "--set", "horizon_steps=512")
    assert not (run / "tensorboard").exists()
    assert rlflame("resume", run, "--steps", "512", "--tensorboard").code == 0
    assert [step for step, _ in curves(run)["Loss/value_loss"]] == list(range(64, 513, 64))


def test_it_changes_no_bit_of_the_run(tmp_path):
    for name, words in (("with", ["--tensorboard"]), ("without", [])):
        train(tmp_path / name, "--steps", "256", *words)
    a, b = ((tmp_path / name / "metrics.jsonl").read_bytes() for name in ("with", "without"))
    assert a == b
    assert rlflame("inspect", tmp_path / "with", tmp_path / "without").code == 0


def test_without_the_package_a_run_does_not_begin(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    spoken = rlflame("train", *TINY, "--out", tmp_path / "run", "--tensorboard")
    assert spoken.code == 2
    assert "pip install 'rlflame[tensorboard]'" in spoken.err
    assert not (tmp_path / "run").exists()


def test_the_writer_loads_neither_torch_nor_tensorflow(tmp_path):
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "from rlflame.storage.tracking.tensorboard import EventFile\n"
        f"file = EventFile(Path({str(tmp_path / 'events')!r}), 1.0)\n"
        "file.write_scalars(1.0, 1, {'a': 1.0})\n"
        "file.write_session_start(1.0, {'b': 1})\n"
        "assert not {'torch', 'tensorflow'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_retries_are_counted_on_their_way(tmp_path):
    passed = []
    counts = EventCounter(passed.append)
    for kind in ("submitted", "retried", "done", "retried", "speculated"):
        counts(FleetEvent(kind, "train", 0))
    assert len(passed) == 5
    assert counts.take() == {"retried": 2, "speculated": 1}
    assert counts.take() == {"retried": 0, "speculated": 0}
