"""Several seeds as one job: each of them is identical to a single run.

The expected values of a run come from a single run of the same recipe and seed. Those of a
statistic are computed by hand.
"""

from __future__ import annotations

import csv
import errno
import json
import math
import os
import re
import resource
import shlex
import shutil
import signal
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from commands import TINY, TINY_REINFORCE, finished, is_alive, process, rlflame, wait_until
from configs import make_config
from test_cli_app import children_of

from rlflame import api, statistics
from rlflame.analysis.plots import matplotlib_backend
from rlflame.console.base import SweepResources
from rlflame.errors import CheckpointError, ConfigError, DiskError
from rlflame.experiment.sweep import seed_main, sweep_run
from rlflame.experiment.sweep import sweep as jobs
from rlflame.experiment.sweep.sweep import Sweep
from rlflame.experiment.sweep.sweep_run import split_resources
from rlflame.rollout.process.channel import MessageKind
from rlflame.rollout.seeding import Role, make_reset_seed
from rlflame.storage import checkpoint, run_folder
from rlflame.storage.available_memory import PROCESS_BYTES
from rlflame.storage.run_folder import RunFolder
from rlflame.storage.sweep_folder import MAX_SEEDS, format_folder_name, format_seeds, parse_seeds

SAME = ("metrics.jsonl", "episodes.csv", "result.json")


def digest(folder: Path) -> str:
    return checkpoint.load(folder / "latest.safetensors").digest


def assert_as_alone(folder: Path, alone: Path) -> None:
    assert digest(folder) == digest(alone)
    for name in SAME:
        assert (folder / name).read_bytes() == (alone / name).read_bytes(), name


def config(*more: str, env: str = "cartpole", **settings):
    sets = [*(word for word in TINY if word != "--set"), *more]
    return make_config(env, sets=sets, settings={"stop_at_steps": 256, **settings})


# Selecting seeds.


@pytest.mark.parametrize(
    ("text", "seeds", "again"),
    [
        ("0-9", tuple(range(10)), "0-9"),
        ("0,3,7", (0, 3, 7), "0,3,7"),
        ("7", (7,), "7"),
        (" 5, 1-3 ", (5, 1, 2, 3), "5,1-3"),
        ("4-4", (4,), "4"),
    ],
)
def test_a_list_of_seeds_is_read_and_written(text, seeds, again):
    assert parse_seeds(text) == seeds
    assert format_seeds(seeds) == again
    assert parse_seeds(again) == seeds


@pytest.mark.parametrize(
    "text",
    [
        *("", "a-b", "1,,2", "-3", "1.5", "9-0", "0-4,3", "3,3", "0-1000", "0-999,1000"),
        *("0-999999999999", "9223372036854775808"),
    ],
)
def test_a_list_that_means_nothing_is_refused(text, tmp_path):
    spoken = rlflame("train", "--seeds", text, "--out", tmp_path / "x")
    assert spoken.code == 2
    assert f"{text!r} is not a list of up to {MAX_SEEDS} distinct seeds" in spoken.err
    assert "hint: " in spoken.err
    assert not (tmp_path / "x").exists()


def test_options_that_make_no_sense_beside_seeds_are_refused(tmp_path):
    for more in (("--seed", "3"), ("--set", "learning.seed=3"), ("--plot",)):
        spoken = rlflame("train", *TINY, "--seeds", "0-1", *more, "--out", tmp_path / "x")
        assert spoken.code == 2
        assert "with --seed, --set learning.seed or --plot" in spoken.err
    spoken = rlflame("train", "--env", "no-such-thing", "--seeds", "0-1", "--out", tmp_path / "x")
    assert (spoken.code, "no-such-thing" in spoken.err) == (2, True)
    assert not (tmp_path / "x").exists()


def test_a_long_list_does_not_become_a_long_name():
    assert format_folder_name(range(10)) == "seeds-0-9"
    assert format_folder_name(range(0, 200, 2)) == "100-seeds"


# Sharing a machine.


@pytest.mark.parametrize(
    ("seeds", "machine", "expected"),
    [
        (10, {"cores": 2}, SweepResources(2, 0)),
        (1, {"cores": 2}, SweepResources(1, 2)),
        (3, {"cores": 16}, SweepResources(3, 5)),
        (3, {"cores": 16, "split": False}, SweepResources(3, 0)),
        (10, {"cores": 8, "threads": 4}, SweepResources(2, 0)),
        (10, {"cores": 1, "threads": 4}, SweepResources(1, 0)),
        # There is memory for two replay buffers of 1 GB with their processes, but not for a third.
        (
            10,
            {"cores": 8, "replay_bytes": 10**9, "available_bytes": 3 * 10**9},
            SweepResources(2, 4, True),
        ),
        (2, {"cores": 8, "available_bytes": PROCESS_BYTES // 2}, SweepResources(1, 8, True)),
    ],
)
def test_as_many_run_side_by_side_as_there_are_cores(seeds, machine, expected):
    assert split_resources(seeds, **machine) == expected


# Summaries.


def test_the_best_mean_over_seeds_and_the_last_evaluations_by_hand():
    steps = np.array([10.0, 20.0, 30.0])
    curves = [(steps, np.array(returns)) for returns in ([1.0, 8.0, 3.0], [3.0, 4.0, 9.0])]
    # The means over seeds are 2, 6, 6: the first of the highest counts. The seeds have 8 and 4
    # there.
    at, over = statistics.find_best_mean(curves)
    assert (at, over.mean) == (20, 6.0)
    assert over.std == pytest.approx(((8 - 6) ** 2 + (4 - 6) ** 2) ** 0.5)
    # One seed ended early. All seeds have the points at 10 and 20.
    assert statistics.find_best_mean([*curves, (steps[:2], np.array([30.0, 0.0]))])[0] == 10
    assert statistics.find_best_mean([]) is None
    assert statistics.find_best_mean([*curves, (steps[:0], steps[:0])]) is None

    forty = np.arange(40.0)
    assert statistics.compute_tail_mean(forty) == (38 + 39) / 2
    assert statistics.compute_tail_mean(forty[:20]) == 19.0
    assert statistics.compute_tail_mean(forty[:21]) == (19 + 20) / 2
    assert statistics.compute_tail_mean(forty[:1]) == 0.0


def test_means_over_seeds_agree_with_an_enumeration_of_every_resample():
    """Three seeds have 27 equally likely resamples, whose quantiles are the interval."""
    values = np.array([1.0, 5.0, 6.0])
    found = statistics.summarise(values)

    def iqm(three):
        # The middle half of three is from 0.75 to 2.25: a quarter, one, and a quarter.
        low, middle, high = sorted(three)
        return (0.25 * low + middle + 0.25 * high) / 1.5

    everything = sorted(iqm((a, b, c)) for a in values for b in values for c in values)
    assert found.iqm.value == pytest.approx(iqm(values))
    assert found.iqm.low == pytest.approx(everything[math.ceil(0.025 * 27) - 1])
    assert found.iqm.high == pytest.approx(everything[math.ceil(0.975 * 27) - 1])
    assert (found.mean, found.worst) == (4.0, 1.0)
    assert found.std == pytest.approx((((1 - 4) ** 2 + (5 - 4) ** 2 + (6 - 4) ** 2) / 2) ** 0.5)


# Identical results.


def test_ten_seeds_are_ten_lone_runs(tmp_path):
    out = tmp_path / "ten"
    words = ("train", *TINY, "--steps", "256", "--seeds", "0-9", "--out", out, "--json")
    spoken = rlflame(*words)
    assert spoken.code == 0, spoken.err
    document = spoken.json()
    assert document["complete"]
    assert [one["seed"] for one in document["seeds"]] == list(range(10))
    finals = []
    for seed in range(10):
        alone = tmp_path / f"alone-{seed}"
        result = api.train(config(**{"learning.seed": seed, "runtime.out": str(alone)}))
        assert_as_alone(out / f"seed-{seed}", alone)
        assert document["seeds"][seed]["digest"] == result.digest
        finals.append(json.loads((alone / "result.json").read_text())["evaluation"]["mean"])

    # The middle half of ten is from 2.5 to 7.5: half, four, half.
    ordered = sorted(finals)
    middle = (0.5 * ordered[2] + sum(ordered[3:7]) + 0.5 * ordered[7]) / 5.0
    final = document["final"]
    assert final["iqm"]["value"] == pytest.approx(middle)
    assert final["iqm"]["low"] <= middle <= final["iqm"]["high"]
    assert final["mean"] == pytest.approx(sum(finals) / 10)
    assert final["worst"] == min(finals)
    assert finals[final["worst_seed"]] == min(finals)

    with (out / "seeds.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [float(row["return_mean"]) for row in rows] == finals
    assert [row["digest"] for row in rows] == [one["digest"] for one in document["seeds"]]
    assert {**json.loads((out / "summary.json").read_text())}.items() <= document.items()
    assert (out / "plot.png").exists()

    # All other commands accept the job.
    (line,) = rlflame("runs", tmp_path, "--json").json()[-1:] or [None]
    listed = {Path(one["folder"]).name: one for one in rlflame("runs", tmp_path, "--json").json()}
    assert listed["ten"]["seeds"] == listed["ten"]["seeds_finished"] == 10
    assert listed["ten"]["state"] == "finished"
    assert "10 of 10 seeds" in rlflame("runs", tmp_path).out
    assert len(rlflame("runs", out, "--json").json()) == 10
    assert rlflame("plot", out).out.strip() == str(out / "plot.png")
    assert "PPO, 10 seeds" in rlflame("report", out).out
    looked = rlflame("inspect", out)
    assert all(one["digest"][:16] in looked.out for one in document["seeds"])
    assert line is not None

    # A finished job repeats its summary, runs nothing, and continues with --steps.
    again = rlflame("resume", out, "--json").json()
    assert (again["began"], again["final"]) == (False, final)
    assert "already finished" in rlflame("resume", out, "--plain").out


def test_a_job_is_taken_further_as_one(tmp_path):
    out = tmp_path / "job"
    words = ("train", *TINY, "--set", "horizon_steps=512")
    assert rlflame(*words, "--steps", "256", "--seeds", "3,5", "--out", out).code == 0
    spoken = rlflame("resume", out, "--steps", "100")
    assert (spoken.code, "Seed 3: --steps 100 is not beyond the 256" in spoken.err) == (2, True)
    spoken = rlflame("resume", out, "--fresh-replay")
    assert (spoken.code, "--fresh-replay is for a single run" in spoken.err) == (2, True)
    assert rlflame("resume", out, "--steps", "512").code == 0
    spoken = rlflame("resume", out, "--steps", "1024")
    assert (spoken.code, "reached 0 by step 512" in spoken.err) == (2, True)
    (said,) = re.findall(r"start again: rlflame (.*)", spoken.err)
    assert rlflame(*shlex.split(said), "--dry-run").code == 0
    assert f"--seeds 3,5 --set learning.horizon_steps=none --steps 1024 --out {out}-longer" in said
    for seed in (3, 5):
        alone = tmp_path / f"alone-{seed}"
        assert rlflame(*words, "--steps", "512", "--seed", str(seed), "--out", alone).code == 0
        assert_as_alone(out / f"seed-{seed}", alone)
    # Two jobs are compared seed by seed.
    assert (
        rlflame("train", *TINY, "--steps", "256", "--seeds", "3", "--out", tmp_path / "b").code == 0
    )
    spoken = rlflame("inspect", out, tmp_path / "b")
    assert spoken.code == 1
    assert "differ first in recipe stop_at_steps" in spoken.out
    assert f"seed-5, which exists only in {out}" in spoken.out


def test_a_job_is_taken_further_in_iterations(tmp_path):
    out, alone = tmp_path / "job", tmp_path / "alone"
    words = ("train", "--algo", "reinforce", *TINY_REINFORCE, "--horizon", "4")
    assert rlflame(*words, "--iterations", "2", "--seeds", "3", "--out", out).code == 0
    refused = rlflame("resume", out, "--iterations", "1")
    assert (refused.code, "--iterations 4" in refused.err) == (2, True)
    resumed = rlflame("resume", out, "--iterations", "4")
    assert resumed.code == 0, resumed.err
    assert rlflame(*words, "--iterations", "4", "--seed", "3", "--out", alone).code == 0
    assert_as_alone(out / "seed-3", alone)


def test_a_folder_is_never_overwritten(tmp_path):
    words = ("train", *TINY, "--steps", "64", "--seeds", "1", "--out", tmp_path / "job", "-q")
    first, second = rlflame(*words), rlflame(*words)
    assert [Path(s.out.strip()).name for s in (first, second)] == ["job", "job-2"]
    assert digest(tmp_path / "job/seed-1") == digest(tmp_path / "job-2/seed-1")


# Failures. Seed 1 waits in a step until a file exists; the other seeds never wait.

STEPS = 320


@pytest.fixture
def held(tmp_path):
    """Options of a recipe whose seed 1 waits in the middle, and the awaited file."""
    marker = tmp_path / "go"
    wait_in = make_reset_seed(1, Role.RESET, 0, 0, 5)
    words = [*TINY, "--env", "fakes:Fake-v0", "--steps", str(STEPS)]
    for pair in ("fault=wait", f"marker={marker}", f"seed={wait_in}"):
        words += ["--env-kwargs", pair]
    words += ["--set", "runtime.checkpoint_every_steps=128", "--workers", "2"]
    return words, marker


def assert_resumed_as_alone(out: Path, words: list[str], marker: Path, seeds: str) -> None:
    """Resume the job, and check that each seed is identical to a single run."""
    marker.touch()
    spoken = rlflame("resume", out, "--json")
    assert spoken.code == 0, spoken.err
    assert [one["seed"] for one in spoken.json()["seeds"]] == list(parse_seeds(seeds))
    for seed in parse_seeds(seeds):
        alone = out.parent / f"alone-{seed}"
        assert rlflame("train", *words, "--seed", str(seed), "--out", alone).code == 0
        assert_as_alone(out / f"seed-{seed}", alone)


def processes_of_seeds(pid: int, number: int) -> list[int]:
    wait_until(lambda: len(children_of(pid)) >= number)
    return children_of(pid)


def the_one_of(folder: Path, pids: list[int]) -> int:
    """The process that holds the lock of a run folder."""
    lock = str((folder / ".lock").resolve())
    for pid in pids:
        with suppress(OSError):  # the process has ended
            if any(os.path.realpath(link) == lock for link in Path(f"/proc/{pid}/fd").iterdir()):
                return pid
    raise AssertionError("nobody holds it")


def test_a_killed_seed_is_reported_and_the_others_continue(tmp_path, held):
    words, marker = held
    out = tmp_path / "job"
    running_ = process("train", *words, "--seeds", "0-3", "--out", out, "--plain")
    wait_until(marker.with_suffix(".here").exists)
    os.kill(the_one_of(out / "seed-1", children_of(running_.pid)), signal.SIGKILL)
    spoken = finished(running_)
    assert spoken.code == 1
    assert "Seed 1 failed: Its process was killed by signal 9, SIGKILL." in spoken.err
    assert "1 of 4 seeds failed; seed 1" in spoken.err
    assert f"hint: rlflame resume {out}" in spoken.err
    assert "over 3 of 4 seeds" in spoken.out
    states = [one["state"] for one in json.loads((out / "summary.json").read_text())["seeds"]]
    assert states == ["finished", "failed", "finished", "finished"]
    assert_resumed_as_alone(out, words, marker, "0-3")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_all_seeds_and_the_job_goes_on(tmp_path, held, number):
    words, marker = held
    out = tmp_path / "job"
    running_ = process("train", *words, "--seeds", "1,0,2", "--out", out, "--json")
    wait_until(marker.with_suffix(".here").exists)
    children = children_of(running_.pid)
    running_.send_signal(number)
    spoken = finished(running_)
    assert spoken.code == 128 + number
    assert not any(map(is_alive, children))
    assert not spoken.json()["complete"]
    assert "everything is saved" in spoken.err
    assert f"hint: rlflame resume {out}" in spoken.err
    assert_resumed_as_alone(out, words, marker, "1,0,2")


def test_a_job_that_is_killed_leaves_no_process_and_goes_on(tmp_path, held):
    words, marker = held
    out = tmp_path / "job"
    running_ = process("train", *words, "--seeds", "1-3", "--out", out, "--json")
    wait_until(marker.with_suffix(".here").exists)
    children = children_of(running_.pid)
    assert children
    running_.kill()
    finished(running_)
    wait_until(lambda: not any(map(is_alive, children)))
    assert_resumed_as_alone(out, words, marker, "1-3")


def test_a_seed_whose_environment_never_answers_is_ended_and_named(tmp_path, held):
    words, marker = held
    out = tmp_path / "job"
    words = [*words, "--set", "runtime.step_deadline_s=2"]
    spoken = rlflame("train", *words, "--seeds", "0-1", "--out", out)
    assert spoken.code == 1
    assert "Seed 1 failed: The environment did not answer within 2 s" in spoken.err
    assert_resumed_as_alone(out, words, marker, "0-1")


def test_an_environment_that_fails_fails_its_seed_alone(tmp_path):
    wrong = make_reset_seed(1, Role.RESET, 0, 0, 3)
    words = [*TINY, "--env", "fakes:Fake-v0", "--steps", "256", "--env-kwargs", "fault=raise"]
    words += ["--env-kwargs", f"seed={wrong}"]
    spoken = rlflame("train", *words, "--seeds", "0-2", "--out", tmp_path / "x", "--json")
    assert spoken.code == 1
    document = spoken.json()
    assert [one["state"] for one in document["seeds"]] == ["finished", "failed", "finished"]
    assert f"seed {wrong}" in document["seeds"][1]["error"]
    assert "Seed 1 failed" in spoken.err
    assert "the moon is wrong" in spoken.err


def test_what_died_before_its_first_checkpoint_is_begun_anew(tmp_path):
    out = tmp_path / "job"
    words = ("train", *TINY, "--steps", "128", "--seeds", "0-1")
    assert rlflame(*words, "--out", out).code == 0
    expected = digest(out / "seed-1")
    husk = out / "seed-1"
    for path in sorted(husk.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    (husk / ".lock").touch()
    (husk / "metrics.jsonl").write_text('{"steps": 64')
    assert rlflame("resume", out).code == 0
    assert digest(out / "seed-1") == expected
    assert not (out / "seed-1-2").exists()


def test_what_another_process_has_just_begun_is_not_cleared_away(tmp_path):
    config = make_config("cartpole")
    begun = RunFolder.create(tmp_path / "seed-3")
    (begun.path / "config.toml").touch()
    job = jobs.Sweep(config, (3,))
    assert jobs.read_seed_status(tmp_path, job, 3).is_started
    assert (begun.path / "config.toml").exists()
    begun.release()
    assert not jobs.read_seed_status(tmp_path, job, 3).is_started
    assert not begun.path.exists()


def test_a_damaged_checkpoint_is_that_seeds_trouble_alone(tmp_path):
    out = tmp_path / "job"
    assert rlflame("train", *TINY, "--steps", "128", "--seeds", "0-1", "--out", out).code == 0
    for path in (out / "seed-0").rglob("*.safetensors"):
        path.write_bytes(b"no")
    spoken = rlflame("resume", out)
    assert spoken.code == 1
    assert "Seed 0 failed" in spoken.err
    assert (out / "seed-0/latest.safetensors").read_bytes() == b"no"
    said = " ".join(spoken.err.split())
    assert f"or start the seed again: rm -r {out}/seed-0; then rlflame resume {out}" in said

    shutil.rmtree(out / "seed-0")
    assert rlflame("resume", out).code == 0


def test_after_a_full_disk_one_command_is_for_all_seeds(tmp_path):
    def little():
        resource.setrlimit(resource.RLIMIT_FSIZE, (8192, resource.RLIM_INFINITY))

    out = tmp_path / "my job"
    words = ("train", *TINY, "--steps", "128", "--seeds", "0-1", "--out", out)
    spoken = finished(process(*words, preexec_fn=little))
    assert spoken.code == 1
    said = " ".join(spoken.err.split())
    assert "could not be written: File too large" in said
    assert said.endswith(f"; then rlflame resume '{out}'")
    assert rlflame("resume", out).code == 0


def test_two_processes_do_not_run_one_job(tmp_path):
    out = tmp_path / "job"
    assert rlflame("train", *TINY, "--steps", "64", "--seeds", "0", "--out", out).code == 0
    lock = jobs.open_sweep_folder(out)
    try:
        spoken = rlflame("resume", out, "--steps", "128")
        assert (spoken.code, "Another rlflame process is training" in spoken.err) == (1, True)
    finally:
        lock.release()


@pytest.mark.parametrize("moment", ["begun", "result"])
def test_seeds_whose_folder_was_moved_write_nothing_at_its_path(moment, tmp_path, monkeypatch):
    out = tmp_path / "job"

    class Moving:
        """A fake during which the folder is moved and another job begins."""

        def __init__(self, orders, config, folder, *_):
            self._folder = folder

        def run(self, at_once):
            out.rename(tmp_path / "old")
            self.second = RunFolder.create(out)
            if moment == "begun":
                self._folder.check()
            return {}

    monkeypatch.setattr(sweep_run, "SeedProcesses", Moving)
    spoken = rlflame("train", *TINY, "--steps", "64", "--seeds", "0", "--out", out)
    assert spoken.code == 1
    assert "rlflame resume FOLDER" in " ".join(spoken.err.split())
    assert [entry.name for entry in out.iterdir()] == [".lock"]


def test_a_seed_s_folder_that_is_a_link_is_refused(tmp_path):
    out = tmp_path / "job"
    assert rlflame("train", *TINY, "--steps", "64", "--seeds", "0", "--out", out).code == 0
    (out / "seed-0").rename(tmp_path / "elsewhere")
    (out / "seed-0").symlink_to(tmp_path / "elsewhere")
    spoken = rlflame("resume", out, "--steps", "128")
    assert spoken.code == 1
    assert "rm " in spoken.err


def test_who_trains_in_a_seed_s_folder_is_waited_for_and_named(tmp_path, monkeypatch):
    out = tmp_path / "job"
    words = ("--steps", "64", "--set", "horizon_steps=128", "--seeds", "0", "--out", out)
    assert rlflame("train", *TINY, *words).code == 0
    monkeypatch.setattr(sweep_run, "_WAIT_S", 0.2)
    held = RunFolder.open(out / "seed-0")
    try:
        spoken = rlflame("resume", out, "--steps", "128")
    finally:
        held.release()
    said = " ".join(spoken.err.split())
    assert f"Another rlflame process is training in {out}/seed-0." in said


@pytest.mark.parametrize("what", ["job", "job/seed-0"])
def test_what_may_not_be_written_is_not_resumed_into_another_folder(tmp_path, what):
    """`resume` has no --out."""
    words = ("train", *TINY, "--steps", "64", "--seeds", "0", "--out", tmp_path / "job")
    assert rlflame(*words).code == 0
    folder = tmp_path / what
    (folder / ".lock").unlink()
    (folder / ".lock").mkdir()  # nobody, including root, can open this for writing
    spoken = rlflame("resume", folder, "--steps", "128")
    said = " ".join(spoken.err.split())
    assert f"{folder} cannot be written: Is a directory." in said
    assert f"cp -r {folder} COPY; rlflame resume COPY" in said


@pytest.mark.parametrize("text", ["", "[job]\nseeds = []\n", "stop_at_steps = 5\n", "\x00"])
def test_a_damaged_job_file_is_a_sentence(tmp_path, text):
    (tmp_path / "job.toml").write_text(text)
    with pytest.raises(CheckpointError):
        jobs.read_sweep(tmp_path)
    spoken = rlflame("resume", tmp_path)
    assert spoken.code in (1, 2)
    assert "Traceback" not in spoken.err
    assert "damaged" in rlflame("runs", tmp_path.parent).out


@pytest.mark.parametrize(
    ("seeds", "said"),
    [
        ("[0, 0]", "is not a list of up to"),
        ("[9223372036854775808]", "is not a list of up to"),
        ("[-1]", "is not a list of up to"),
        ("[true]", "is not a list of up to"),
        ('"0-3"', "is not a list of up to"),
        ("[]", "is not a list of up to"),
    ],
)
def test_seeds_that_train_would_refuse_are_refused_in_a_job_file(seeds, said, tmp_path):
    """A seed that occurs twice would be two processes in one folder."""
    jobs.write_sweep(tmp_path, Sweep(config(), (0, 1)))
    file = tmp_path / "job.toml"
    file.write_text(file.read_text().replace("seeds = [0, 1]", f"seeds = {seeds}"))
    with pytest.raises(CheckpointError) as refused:
        jobs.read_sweep(tmp_path)
    assert said in refused.value.message


def test_a_job_file_that_cannot_be_read_is_not_one_to_remove(tmp_path):
    (tmp_path / "job.toml").write_text("[job\n")
    said = " ".join(rlflame("resume", tmp_path).err.split())
    assert "resume each seed folder by itself" in said
    assert "rm " not in said


def test_seeds_without_their_job_file_are_an_error(tmp_path):
    (tmp_path / "job/seed-3").mkdir(parents=True)
    spoken = rlflame("resume", tmp_path / "job")
    said = " ".join(spoken.err.split())
    assert spoken.code == 2
    assert f"{tmp_path}/job has seed folders but no job.toml." in said
    assert "resume each seed folder by itself" in said


def test_a_full_disk_advises_to_resume_the_job_and_not_its_seed(tmp_path):
    sent = []
    channel = SimpleNamespace(send=lambda kind, values: sent.append((kind, values["hint"])))
    with pytest.raises(DiskError) as full, run_folder.report_disk_errors(tmp_path / "seed-0"):
        raise OSError(errno.ENOSPC, "No space left on device")
    seed_main._report_error(full.value, tmp_path / "seed-0", channel)
    assert sent == [(MessageKind.FAILURE, "free disk space")]


def test_seeds_of_two_recipes_do_not_become_one_job(tmp_path):
    """After a change of the job file, the remaining seeds would have another recipe."""
    out = tmp_path / "job"
    assert rlflame("train", *TINY, "--steps", "64", "--seeds", "0-1", "--out", out).code == 0
    shutil.rmtree(out / "seed-1")
    file = out / "job.toml"
    before = file.read_text()
    file.write_text(before.replace("\ndiscount = 0.98\n", "\ndiscount = 0.5\n"))
    spoken = rlflame("resume", out)
    said = " ".join(spoken.err.split())
    assert spoken.code == 2
    assert f"Seed 0 was started with learning.ppo.discount = 0.98, but {file} has 0.5." in said
    assert not (out / "seed-1").exists()
    file.write_text(before)
    assert rlflame("resume", out).code == 0


def test_from_python(tmp_path):
    result = api.train_seeds(config(**{"runtime.out": str(tmp_path / "job")}), [4, 2])
    assert result.complete
    assert [one.seed for one in result.summary.seeds] == [4, 2]
    assert result.summary.final.seeds == 2
    with pytest.raises(ConfigError):
        api.resume_seeds(result.folder, config().runtime, steps=10)


def test_a_dry_run_says_the_seeds_and_runs_none(tmp_path):
    spoken = rlflame("train", *TINY, "--seeds", "2-4", "--dry-run", "--out", tmp_path / "x")
    assert "# --seeds 2-4" in spoken.out
    assert "seed = 2" in spoken.out
    assert not (tmp_path / "x").exists()
    assert rlflame("train", *TINY, "--seeds", "2-4", "--dry-run", "--json").json()["seeds"] == [
        2,
        3,
        4,
    ]


def test_without_matplotlib_there_is_no_picture(tmp_path, monkeypatch):
    def absent():
        raise matplotlib_backend.PlotUnavailableError("matplotlib is not installed.")

    monkeypatch.setattr(matplotlib_backend, "check_available", absent)
    words = ("train", *TINY, "--steps", "512", "--seeds", "0-1", "--json")
    spoken = rlflame(*words, "--out", tmp_path / "x")
    assert (spoken.code, spoken.json()["plot"]) == (0, None)
    assert not (tmp_path / "x/plot.png").exists()


# With several learners.


def test_seeds_are_not_shared_by_learners(tmp_path):
    words = ("train", *TINY, "--steps", "64", "--seeds", "0-1", "--out", tmp_path / "x")
    for asked in (("--learners", "2"), ("--set", "runtime.learners=2")):
        spoken = rlflame(*words, *asked)
        assert spoken.code == 2
        assert "each with one learner" in " ".join(spoken.err.split())
        assert "omit --learners" in spoken.err
    assert not (tmp_path / "x").exists()

    assert rlflame(*words).code == 0
    spoken = rlflame("resume", tmp_path / "x", "--steps", "128", "--learners", "2")
    assert spoken.code == 2
    assert "each with one learner" in " ".join(spoken.err.split())


def test_a_folder_of_seeds_is_not_resumed_by_what_torchrun_starts(tmp_path, monkeypatch):
    words = ("train", *TINY, "--steps", "64", "--seeds", "0-1", "--out", tmp_path / "x")
    assert rlflame(*words).code == 0
    launched = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "9"}
    for name, value in launched.items():
        monkeypatch.setenv(name, value)
    spoken = rlflame("resume", tmp_path / "x", "--steps", "128")
    assert spoken.code == 2
    assert "omit --learners and torchrun" in " ".join(spoken.err.split())
