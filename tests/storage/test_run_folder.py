"""Tests of a run on disk: locks, contents at any moment, and resuming."""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import errno
import fcntl
import itertools
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import failpoints
import numpy as np
import pytest
from commands import rlflame

from rlflame import api
from rlflame.config.runtime import RuntimeSettings
from rlflame.errors import CheckpointError, LearningError
from rlflame.experiment import run
from rlflame.fleet.inline import InlineFleet
from rlflame.learning import policy_average
from rlflame.storage import checkpoint, run_folder, safetensors_file
from rlflame.storage.metrics import EPISODE_HEADER, LineFile
from rlflame.storage.run_folder import (
    RunFolder,
    find_policy_file,
    is_locked,
    list_step_files,
    load_newest_checkpoint,
    report_disk_errors,
)
from rlflame.storage.run_recorder import FileRecorder, MachineLog
from rlflame.storage.tracking.tensorboard import EventFile


class Watching:
    """An observer that keeps notes and saved steps."""

    def __init__(self):
        self.notes = []
        self.saved_at = []

    def show_iteration(self, metrics, returns): ...
    def show_evaluation(self, steps, record, best): ...
    def show_fleet_event(self, event): ...

    def show_checkpoint(self, path, progress):
        self.saved_at.append(progress.steps)

    def show_note(self, text):
        self.notes.append(text)

    def open(self, run):
        return contextlib.nullcontext()


INLINE = RuntimeSettings(fleet="inline", checkpoint_every_steps=32, keep_checkpoints=9)


@pytest.fixture(scope="module")
def untouched(tmp_path_factory):
    """A finished run. Tests must not change its folder."""
    folder = tmp_path_factory.mktemp("untouched") / "run"
    learning = {"horizon_steps": 128}
    api.train(failpoints.config(out=folder, learning=learning, runtime={"keep_checkpoints": 9}))
    return folder


@pytest.fixture
def copied(untouched, tmp_path):
    """A copy of the finished run, which a test may change."""
    return Path(shutil.copytree(untouched, tmp_path / "run"))


@pytest.fixture(scope="module")
def whole(untouched):
    return checkpoint.load(untouched / "latest.safetensors")


def at(whole, steps, **changes):
    """The same checkpoint at another step."""
    batch = whole.progress.steps // whole.progress.iteration
    counters = {"iteration": -(-steps // batch), "episodes": min(steps, whole.progress.episodes)}
    progress = dataclasses.replace(whole.progress, steps=steps, evaluations=0, **counters)
    snapshot = dataclasses.replace(whole.snapshot, progress=progress)
    return dataclasses.replace(whole, progress=progress, snapshot=snapshot, **changes)


def fresh(whole):
    """The checkpoint from which a run of the recipe starts."""
    nothing = {"snapshot": None, "line_counts": (0, 0), "best": None, "evaluation": None}
    return dataclasses.replace(whole, **nothing)


@contextlib.contextmanager
def recording(folder, begun, every_steps=10, keep=2, clock=lambda: 0.0):
    """A recorder in a new folder, and its observer."""
    watching = Watching()
    run = RunFolder.open(folder) if folder.exists() else RunFolder.create(folder)
    try:
        recorder = FileRecorder(
            run,
            begun,
            every_steps=every_steps,
            every_minutes=5.0,
            keep_count=keep,
            observer=watching,
            clock=clock,
        )
        try:
            yield recorder, watching
        finally:
            recorder.close()
    finally:
        run.release()


def offer(recorder, state, final=False):
    recorder.record_snapshot(lambda: state.snapshot, state.progress, final)


def content(folder):
    return {p.relative_to(folder): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def names(folder):
    return [path.name for path in list_step_files(folder)]


def step(steps):
    return f"step-{steps:09d}.safetensors"


def test_a_slow_run_saves_after_minutes_too(tmp_path, whole):
    now_s = 0.0
    with recording(
        tmp_path / "run", fresh(whole), every_steps=1000, keep=9, clock=lambda: now_s
    ) as (
        recorder,
        _,
    ):
        for minutes, steps in ((0, 1), (4, 2), (5, 3), (9, 4), (10, 5), (11, 6)):
            now_s = 60.0 * minutes
            offer(recorder, at(whole, steps))
    assert names(tmp_path / "run") == [step(1), step(3), step(5)]


# Folders and locks.


def test_an_existing_folder_is_never_touched(tmp_path):
    wanted = tmp_path / "deep" / "run"
    found = [RunFolder.create(wanted) for _ in range(3)]
    assert [folder.path.name for folder in found] == ["run", "run-2", "run-3"]
    for folder in found:
        folder.release()
    (tmp_path / "file").write_text("mine")
    other = RunFolder.create(tmp_path / "file")
    assert other.path == tmp_path / "file-2"
    other.release()
    assert (tmp_path / "file").read_text() == "mine"


def test_an_empty_folder_is_used_as_it_is(tmp_path):
    """An empty folder may be a volume that was mounted for the run."""
    wanted = tmp_path / "volume"
    wanted.mkdir()
    first, second = RunFolder.create(wanted), RunFolder.create(wanted)
    assert [folder.path.name for folder in (first, second)] == ["volume", "volume-2"]
    for folder in (first, second):
        folder.release()
    # A run that ended before it began leaves a lock that no process holds.
    again = RunFolder.create(wanted)
    again.release()
    assert again.path == wanted


def test_as_many_as_begin_at_once_have_a_folder_each(tmp_path):
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: RunFolder.create(tmp_path / "run"), range(8)))
    assert len({folder.path for folder in found}) == 8
    for folder in found:
        folder.release()


def test_the_current_folder_is_an_existing_one_too(tmp_path, monkeypatch):
    here = tmp_path / "here"
    here.mkdir()
    (here / "mine").touch()
    monkeypatch.chdir(here)
    folder = RunFolder.create(Path("."))
    folder.release()
    assert folder.path == tmp_path / "here-2"
    assert [path.name for path in here.iterdir()] == ["mine"]


def test_new_folders_are_on_disk_before_anything_is_in_them(tmp_path, monkeypatch):
    (tmp_path / "old").mkdir()
    synced = []
    monkeypatch.setattr(safetensors_file, "sync_folder", synced.append)
    RunFolder.create(tmp_path / "old/a/b/run").release()
    below = tmp_path / "old"
    assert synced == [below / "a/b", below / "a", below]


def test_a_folder_that_cannot_be_made_is_a_sentence(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="Not a directory"):
        RunFolder.create(tmp_path / "file" / "run")
    with pytest.raises(CheckpointError, match="not a run folder"):
        RunFolder.open(tmp_path / "absent")
    assert not (tmp_path / "absent").exists()


def test_the_policy_of_a_folder_is_the_best_or_the_latest(tmp_path):
    (tmp_path / "a_policy.safetensors").touch()
    best, latest = tmp_path / "best.safetensors", tmp_path / "latest.safetensors"
    assert find_policy_file(tmp_path) == best  # which does not exist
    latest.touch()
    assert find_policy_file(tmp_path) == latest
    best.touch()
    assert find_policy_file(tmp_path) == best
    assert find_policy_file(latest) == latest


def test_the_second_trainer_is_refused(tmp_path):
    folder = RunFolder.create(tmp_path / "run")
    assert is_locked(folder.path)
    with pytest.raises(CheckpointError, match="Another rlflame"):
        RunFolder.open(folder.path)
    folder.release()
    folder.release()
    assert not is_locked(folder.path)
    RunFolder.open(folder.path).release()


def test_asking_whether_a_folder_is_locked_leaves_nothing_in_it(tmp_path):
    assert not is_locked(tmp_path)
    assert not list(tmp_path.iterdir())


def test_the_lock_of_a_dead_process_is_no_obstacle(tmp_path):
    """The process is killed while it holds the lock, and its child is still alive."""
    program = (
        "import subprocess, sys; from pathlib import Path\n"
        "from rlflame.storage.run_folder import RunFolder\n"
        f"folder = RunFolder.create(Path({str(tmp_path / 'run')!r}))\n"
        "child = subprocess.Popen([sys.executable, '-c', 'input()'], stdin=subprocess.PIPE)\n"
        "print('locked', child.pid, flush=True); input()"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    said, child = holder.stdout.readline().split()
    assert said == "locked"
    assert is_locked(tmp_path / "run")
    with pytest.raises(CheckpointError, match="Another rlflame"):
        RunFolder.open(tmp_path / "run")
    os.kill(holder.pid, signal.SIGKILL)
    holder.wait()
    RunFolder.open(tmp_path / "run").release()
    with contextlib.suppress(ProcessLookupError):
        os.kill(int(child), signal.SIGKILL)
    holder.stdin.close()
    holder.stdout.close()


def test_other_users_cannot_open_the_lock(tmp_path):
    folder = RunFolder.create(tmp_path / "run")
    lock = folder.path / ".lock"
    assert stat.S_IMODE(lock.stat().st_mode) == 0o600
    folder.release()
    lock.chmod(0o644)
    RunFolder.open(folder.path).release()
    assert stat.S_IMODE(lock.stat().st_mode) == 0o600


def writes(recorder, whole):
    """All ways in which a recorder writes by path."""
    snapshot = whole.snapshot
    return {
        "iteration": lambda: recorder.record_iteration(snapshot.progress, {}, ()),
        "evaluation": lambda: recorder.record_evaluation(
            snapshot.progress, whole.evaluation, snapshot.policy
        ),
        "best": lambda: recorder.offer_best(snapshot.progress, whole.evaluation, snapshot.policy),
        "checkpoint": lambda: offer(recorder, whole, final=True),
        "result": lambda: recorder.save_final_evaluation(snapshot, whole.evaluation),
    }


@pytest.mark.parametrize("write", ["iteration", "evaluation", "best", "checkpoint", "result"])
@pytest.mark.parametrize("successor", [True, False])
def test_a_run_whose_folder_was_moved_writes_nothing_at_its_path(write, successor, tmp_path, whole):
    path = tmp_path / "run"
    with recording(path, fresh(whole)) as (recorder, _):
        offer(recorder, at(whole, 32))
        path.rename(tmp_path / "old")
        second = RunFolder.create(path) if successor else None
        with pytest.raises(CheckpointError) as lost:
            writes(recorder, whole)[write]()
        assert str(path) in lost.value.message
        assert "rlflame resume" in lost.value.hint
        if second is None:
            assert not path.exists()
        else:
            assert [entry.name for entry in path.iterdir()] == [".lock"]
            second.release()
    assert names(tmp_path / "old") == [step(32)]
    assert load_newest_checkpoint(tmp_path / "old", print).progress.steps == 32


@pytest.mark.parametrize("file", ["machines.json", "config.toml"])
def test_neither_machines_nor_config_go_into_another_folder(file, tmp_path, whole):
    folder = RunFolder.create(tmp_path / "run")
    log = MachineLog(folder, InlineFleet(), 0)
    folder.path.rename(tmp_path / "old")
    second = RunFolder.create(tmp_path / "run")
    write = {
        "machines.json": lambda: log.record_work({}, 0),
        "config.toml": run.Run(folder, whole, INLINE, run.RunHost(), None)._write_config,
    }[file]
    with pytest.raises(CheckpointError):
        write()
    assert not (folder.path / file).exists()
    for held in (folder, second):
        held.release()


def test_a_run_whose_lock_was_removed_is_saved_and_stops(tmp_path, whole):
    path = tmp_path / "run"
    with recording(path, fresh(whole), every_steps=1000) as (recorder, _):
        offer(recorder, at(whole, 32))
        (path / ".lock").unlink()
        with pytest.raises(CheckpointError) as lost:
            offer(recorder, at(whole, 64))
        assert lost.value.hint == f"rlflame resume {path}"
    assert names(path) == [step(32), step(64)]


LINKED_FILES = [".lock", "metrics.jsonl", "episodes.csv", "timing.jsonl"]
LINKED_FOLDERS = ["checkpoints", "replay", "videos", "tensorboard"]


@pytest.mark.parametrize("name", LINKED_FILES + LINKED_FOLDERS)
def test_a_link_in_a_run_folder_is_refused_and_its_target_untouched(name, copied, tmp_path):
    target, link = tmp_path / "elsewhere", copied / name
    if name in LINKED_FILES:
        target.write_text("precious")
        link.unlink(missing_ok=True)
    else:
        target.mkdir()
        if link.is_dir():
            for entry in link.iterdir():
                entry.rename(target / entry.name)
            link.rmdir()
    link.symlink_to(target)
    held = target.read_text() if target.is_file() else content(target)
    with pytest.raises(CheckpointError) as refused:
        resumed(copied, steps=256)
    assert str(link) in refused.value.message
    assert (target.read_text() if target.is_file() else content(target)) == held


@pytest.mark.parametrize(
    "name", ["config.toml", "machines.json", "result.json", "latest.safetensors"]
)
def test_a_link_that_a_rename_replaces_keeps_its_target(name, copied, tmp_path):
    target, link = tmp_path / "elsewhere", copied / name
    link.replace(target)
    link.symlink_to(target)
    held = target.read_bytes()
    resumed(copied, steps=256)
    assert target.read_bytes() == held
    assert not link.is_symlink()


@pytest.mark.parametrize("name", ["metrics.jsonl", "checkpoints", "replay"])
def test_a_link_that_appears_during_a_run_is_not_followed(name, tmp_path, whole):
    target = tmp_path / "elsewhere"
    target.mkdir()
    with recording(tmp_path / "run", fresh(whole)) as (recorder, _):
        (tmp_path / "run" / name).unlink(missing_ok=True)
        (tmp_path / "run" / name).symlink_to(target)
        with pytest.raises(CheckpointError, match=name):
            offer(recorder, whole, final=True)
    assert not list(target.iterdir())


def test_a_lock_that_is_a_dangling_link_creates_nothing(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run/.lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match=r"run/\.lock"):
        RunFolder.create(tmp_path / "run")
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize("opened", ["lines", "events"])
def test_a_file_is_not_opened_through_a_link(opened, tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="link"):
        (LineFile if opened == "lines" else EventFile)(tmp_path / "link", 0)
    assert not (tmp_path / "elsewhere").exists()


def test_a_run_folder_may_itself_be_a_link(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "run").symlink_to(tmp_path / "disk")
    folder = RunFolder.create(tmp_path / "run")
    folder.check_all()
    assert folder.path == tmp_path / "run"
    folder.release()


def test_half_written_files_of_a_dead_process_are_removed(copied):
    before = content(copied)
    for name in (".latest.safetensors.tmp", ".config.toml.0a1b2c3d.tmp"):
        (copied / name).touch()
    (copied / "checkpoints" / f".{step(64)}.01234567.tmp").touch()
    RunFolder.open(copied).release()
    assert content(copied) == before


def test_what_others_left_in_a_folder_stays(copied):
    for name in (".someone-elses.abc.tmp", ".report.tmp", ".a.0a1b2c3.tmp"):
        (copied / name).touch()
    before = content(copied)
    RunFolder.open(copied).release()
    assert content(copied) == before


def test_a_folder_that_is_no_run_is_left_as_it_is(tmp_path):
    (tmp_path / "notes.txt").write_text("not a run")
    (tmp_path / ".notes.0a1b2c3d.tmp").touch()
    before = content(tmp_path)
    for named, said in ((tmp_path, "has no checkpoint"), (tmp_path / "notes.txt", "safetensors")):
        spoken = rlflame("resume", named)
        assert (spoken.code, said in spoken.err) == (1, True), spoken.err
    assert content(tmp_path) == before


def test_what_could_not_be_read_is_not_written_and_nothing_older_goes(copied, whole):
    """NaN weights would make new checkpoints useless while old ones are pruned."""
    weights = {name: array.copy() for name, array in whole.policy.items()}
    weights["actor.0.bias"][3] = np.nan
    spoiled = at(whole, 128)
    with recording(copied, whole) as (recorder, _):
        before = {path.name: path.read_bytes() for path in copied.rglob("*.safetensors")}
        with pytest.raises(LearningError, match=r"actor\.0\.bias contains NaN"):
            recorder.record_snapshot(
                lambda: dataclasses.replace(spoiled.snapshot, policy=weights),
                spoiled.progress,
                final=True,
            )
    assert {path.name: path.read_bytes() for path in copied.rglob("*.safetensors")} == before


def test_who_only_looks_whether_a_folder_is_locked_keeps_nobody_out(copied, monkeypatch):
    look = os.open(copied / ".lock", os.O_RDONLY)
    fcntl.flock(look, fcntl.LOCK_SH)
    slept = []

    def moment(seconds):
        slept.append(seconds)
        fcntl.flock(look, fcntl.LOCK_UN)

    monkeypatch.setattr(run_folder.time, "sleep", moment)
    RunFolder.open(copied).release()
    assert len(slept) == 1
    os.close(look)


# Checkpoints.


def test_checkpoints_are_written_when_a_multiple_is_passed_and_the_newest_are_kept(tmp_path, whole):
    steps = [0, 4, 9, 11, 19, 27, 45, 46, 50, 55]
    expected = [0]
    for before, now in itertools.pairwise(steps):
        if any(step % 10 == 0 for step in range(before + 1, now + 1)):
            expected.append(now)
    with recording(tmp_path / "run", fresh(whole)) as (recorder, watching):
        for now in steps:
            offer(recorder, at(whole, now))
            offer(recorder, at(whole, now))
            kept = [s for s in expected if s <= now][-2:]
            assert names(tmp_path / "run") == [step(s) for s in kept]
            latest = checkpoint.load(tmp_path / "run" / "latest.safetensors")
            assert latest.progress.steps == kept[-1]
        assert watching.saved_at == expected
        offer(recorder, at(whole, 55), final=True)
        offer(recorder, at(whole, 55), final=True)
    assert watching.saved_at == [*expected, 55]


def test_the_newest_name_costs_no_second_copy(untouched):
    newest = untouched / "checkpoints" / step(96)
    assert os.path.samefile(untouched / "latest.safetensors", newest)


def test_a_disk_without_hard_links_gets_copies(tmp_path, whole, monkeypatch):
    def unsupported(*_):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", unsupported)
    with recording(tmp_path / "run", fresh(whole)) as (recorder, _):
        for now in (0, 10, 20):
            offer(recorder, at(whole, now))
            latest = tmp_path / "run" / "latest.safetensors"
            assert latest.read_bytes() == (tmp_path / "run/checkpoints" / step(now)).read_bytes()
            assert latest.stat().st_nlink == 1


def record_of(whole, mean):
    return dataclasses.replace(whole.evaluation, mean=mean)


def test_only_a_better_policy_becomes_the_best(tmp_path, whole):
    best = tmp_path / "run" / "best.safetensors"
    with recording(tmp_path / "run", fresh(whole)) as (recorder, _):
        seen = []
        for now, mean in ((10, -5.0), (20, -7.0), (30, -5.0), (40, 1.0), (50, 0.0)):
            state = at(whole, now)
            recorder.record_evaluation(state.progress, record_of(whole, mean), whole.policy)
            offer(recorder, state)
            kept = checkpoint.load(best)
            assert not kept.resumable
            assert kept.evaluation == kept.best
            seen.append((kept.progress.steps, kept.best.mean))
            newest = checkpoint.load(tmp_path / "run" / "latest.safetensors")
            assert newest.best == kept.best
    assert seen == [(10, -5.0), (10, -5.0), (10, -5.0), (40, 1.0), (40, 1.0)]


def test_the_best_is_remembered_by_the_run_that_goes_on(tmp_path, whole):
    begun = at(whole, 40, best=record_of(whole, 3.0), line_counts=(0, 0))
    with recording(tmp_path / "run", begun) as (recorder, _):
        assert not recorder.offer_best(at(whole, 50).progress, record_of(whole, 2.0), whole.policy)
        assert recorder.offer_best(at(whole, 50).progress, record_of(whole, 4.0), whole.policy)


def test_an_evaluation_is_not_passed_on_to_later_checkpoints(copied, whole):
    assert whole.evaluation is not None
    with recording(copied, whole) as (recorder, _):
        # Until a later evaluation, this is the evaluation of this policy.
        assert checkpoint.load(copied / "latest.safetensors").evaluation == whole.evaluation
        offer(recorder, at(whole, 200))
    assert checkpoint.load(copied / "latest.safetensors").evaluation is None


# Finding a checkpoint.


def found(target):
    notes = []
    return load_newest_checkpoint(target, notes.append).progress.steps, notes


def damage(*paths):
    """Change the contents of the files."""
    for path in paths:
        with path.open("r+b") as file:
            file.seek(100)
            file.write(b"damaged")


def test_the_newest_valid_checkpoint_is_found_and_damaged_ones_are_named(copied):
    assert found(copied) == (96, [])
    assert found(copied / "checkpoints" / step(32)) == (32, [])
    damage(copied / "latest.safetensors")
    assert found(copied) == (96, [])
    damage(copied / "checkpoints" / step(96))
    steps, notes = found(copied)
    assert steps == 64
    assert len(notes) == 1
    assert step(96) in notes[0]
    damage(copied / "checkpoints" / step(64))
    steps, notes = found(copied)
    assert (steps, len(notes)) == (32, 2)
    damage(*list_step_files(copied))
    with pytest.raises(CheckpointError, match=step(96)):
        found(copied)


def test_a_checkpoint_that_nothing_points_to_yet_is_the_newest(copied):
    """The state after a death between writing the checkpoint and linking it."""
    (copied / "latest.safetensors").unlink()
    shutil.copy(copied / "checkpoints" / step(64), copied / "latest.safetensors")
    assert found(copied) == (96, [])
    shutil.rmtree(copied / "checkpoints")
    assert found(copied) == (64, [])


def test_folders_without_a_checkpoint_say_what_to_do(tmp_path):
    with pytest.raises(CheckpointError, match="has no checkpoint") as caught:
        found(tmp_path)
    assert "rlflame runs" in caught.value.hint
    (tmp_path / "config.toml").touch()
    with pytest.raises(CheckpointError) as caught:
        found(tmp_path)
    assert f"--config {tmp_path / 'config.toml'}" in caught.value.hint
    with pytest.raises(CheckpointError, match="does not exist"):
        found(tmp_path / "absent")


# Resuming.


def resumed(target, show=None, steps=None):
    return api.resume(target, INLINE, show=show, steps=steps)


def same_run(folder, untouched):
    now, then = failpoints.left_behind(folder), failpoints.left_behind(untouched)
    return {name for name in then if now[name] != then[name]}


def test_a_run_that_keeps_an_average_goes_on_to_the_same_end(tmp_path, monkeypatch):
    """Its checkpoints also contain the acting policy. The average is evaluated."""
    monkeypatch.setattr(policy_average, "_SHARE", 1.0)  # average from the second version on
    folders = [tmp_path / name for name in ("whole", "resumed")]
    for folder in folders:
        runtime = {"out": str(folder), "keep_checkpoints": 9}
        api.train(failpoints.config(learning={"policy_average": 3}, runtime=runtime))
    middle, last = folders[1] / "checkpoints" / step(32), folders[1] / "latest.safetensors"
    acting = checkpoint.load(last).snapshot.learner["parameters"]
    kept = checkpoint.load(last).policy["actor.0.weight"]
    assert not np.isin(kept, acting).all()
    resumed(middle)
    for path in folders[1].rglob("*.later"):
        path.unlink()
    assert same_run(folders[1], folders[0]) == set()
    assert rlflame("eval", last, "--local", "--expect-recorded").code == 0


@pytest.mark.parametrize("steps", [0, 32, 64, 96])
def test_an_older_checkpoint_takes_its_folder_back_to_it(copied, untouched, steps):
    """Later checkpoints are set aside, logs truncated, and steps repeated."""
    later = [s for s in (0, 32, 64, 96) if s > steps]
    watching = Watching()
    resumed(copied / "checkpoints" / step(steps), watching)
    aside = sorted(path.name for path in copied.glob("checkpoints/*.later"))
    assert aside == [f"{step(s)}.later" for s in later]
    assert bool(watching.notes) == bool(later)
    for path in copied.rglob("*.later"):
        checkpoint.load(path)
        path.unlink()
    assert same_run(copied, untouched) == set()


def rising(whole, folder):
    """A run whose evaluations improved at steps 10 and 30, but not at 20."""
    with recording(folder, fresh(whole), keep=9) as (recorder, _):
        for now, mean in ((10, 1.0), (20, 0.5), (30, 2.0)):
            weights = {name: array + np.float32(now) for name, array in whole.policy.items()}
            state = at(whole, now)
            snapshot = dataclasses.replace(state.snapshot, policy=weights)
            state = dataclasses.replace(state, policy=weights, snapshot=snapshot)
            recorder.record_evaluation(state.progress, record_of(whole, mean), weights)
            offer(recorder, state)


def test_the_best_policy_goes_back_with_its_run(tmp_path, whole):
    folder = tmp_path / "run"
    rising(whole, folder)
    then = checkpoint.load(folder / "best.safetensors")
    back = checkpoint.load(folder / "checkpoints" / step(20))
    with recording(folder, back, keep=9) as (recorder, _):
        best = checkpoint.load(folder / "best.safetensors")
        assert (best.best, best.progress.steps) == (recorder.best, 10)
        assert recorder.best.mean == 1.0
        right = checkpoint.load(folder / "checkpoints" / step(10)).policy
        assert all(np.array_equal(best.policy[name], right[name]) for name in right)
    assert checkpoint.load(folder / "best.safetensors.later").digest == then.digest
    with recording(folder, checkpoint.load(folder / "latest.safetensors"), keep=9) as (again, _):
        assert again.best == best.best  # nothing more is set aside


def test_a_best_policy_that_is_kept_nowhere_is_no_longer_spoken_of(tmp_path, whole):
    folder = tmp_path / "run"
    rising(whole, folder)
    back = checkpoint.load(folder / "checkpoints" / step(20))
    (folder / "checkpoints" / step(10)).unlink()
    with recording(folder, back, keep=9) as (recorder, watching):
        assert recorder.best is None
        assert not (folder / "best.safetensors").exists()
        assert any("not kept" in note for note in watching.notes)
    assert checkpoint.load(folder / "latest.safetensors").best is None


def test_going_back_can_fail_at_any_call_and_the_run_is_still_whole(untouched, tmp_path):
    folder = tmp_path / "run"
    for call in itertools.count():
        shutil.copytree(untouched, folder)
        disk = failpoints.Disk(folder, call, errno.EIO)
        try:
            with disk.installed():
                RunFolder.open(folder).release()
                back = checkpoint.load(folder / "checkpoints" / step(32))
                with recording(folder, back):
                    pass
        except CheckpointError:
            resumed(folder)
            for path in folder.rglob("*.later"):
                path.unlink()
            assert same_run(folder, untouched) <= {"checkpoints"}, disk.calls
        else:
            break
        finally:
            shutil.rmtree(folder)
    assert call > 10


def test_a_damaged_newest_checkpoint_costs_its_steps_and_nothing_else(copied, untouched):
    damage(copied / "latest.safetensors", copied / "checkpoints" / step(96))
    watching = Watching()
    resumed(copied, watching)
    assert any("damaged" in note for note in watching.notes)
    for path in copied.rglob("*.later"):
        path.unlink()
    assert same_run(copied, untouched) == set()


def test_a_checkpoint_in_a_folder_of_its_own_begins_a_new_record(tmp_path, untouched):
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    shutil.copy(untouched / "checkpoints" / step(64), folder / "mine.safetensors")
    watching = Watching()
    result = resumed(folder / "mine.safetensors", watching)
    assert "new logs start" in watching.notes[0]
    assert result.digest == checkpoint.load(untouched / "latest.safetensors").digest
    lines = (untouched / "metrics.jsonl").read_text().splitlines()
    counted, _ = checkpoint.load(untouched / "checkpoints" / step(64)).line_counts
    assert (folder / "metrics.jsonl").read_text().splitlines() == lines[counted:]
    header, *rows = (folder / "episodes.csv").read_text().splitlines()
    whole = (untouched / "episodes.csv").read_text().splitlines()
    assert header == whole[0]
    assert rows == whole[len(whole) - len(rows) :]
    # That record continues too.
    assert resumed(folder).digest == result.digest


@pytest.mark.parametrize("name", ["metrics.jsonl", "episodes.csv"])
def test_lost_lines_are_an_error_and_an_earlier_checkpoint_continues(copied, untouched, name):
    lines = (copied / name).read_text().splitlines(keepends=True)
    (copied / name).write_text("".join(lines[:-1]))
    before = content(copied)
    with pytest.raises(CheckpointError, match=f"{name} lacks 1 of") as caught:
        resumed(copied, steps=128)
    assert "earlier" in caught.value.hint
    after = content(copied)
    del after[Path("config.toml")], before[Path("config.toml")]
    assert after == before
    resumed(copied / "checkpoints" / step(32))
    for path in copied.rglob("*.later"):
        path.unlink()
    assert same_run(copied, untouched) == set()


def test_a_missing_log_has_lost_all_its_lines(copied):
    (copied / "episodes.csv").unlink()
    with pytest.raises(CheckpointError, match="lacks 3 of"):
        resumed(copied, steps=128)


def test_a_changed_recipe_is_on_disk_before_the_first_step(copied, whole):
    """If `resume --steps` is killed at once, the new end must not be lost."""
    longer = dataclasses.replace(
        whole, recipe=whole.recipe.model_copy(update={"stop_at_steps": 5000})
    )
    with recording(copied, longer):
        pass
    assert load_newest_checkpoint(copied, print).recipe.stop_at_steps == 5000


def test_the_runtime_changes_neither_bits_nor_logs(tmp_path, untouched):
    changes = {"checkpoint_every_steps": 50, "keep_checkpoints": 1, "progress": "quiet"}
    learning = {"horizon_steps": 128}
    api.train(failpoints.config(out=tmp_path / "run", learning=learning, runtime=changes))
    assert same_run(tmp_path / "run", untouched) == {"checkpoints"}


# The record.


def test_an_iteration_can_be_read_of_at_once(tmp_path, whole):
    """The next iteration may take minutes, and the folder must be readable meanwhile."""
    with recording(tmp_path / "run", fresh(whole), every_steps=1_000) as (recorder, _):
        recorder.record_iteration(dataclasses.replace(whole.progress, steps=64), {"loss": 0.5}, [])
        (line,) = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
        assert json.loads(line)["loss"] == 0.5
        assert (tmp_path / "run" / "episodes.csv").read_text() == EPISODE_HEADER
        assert len((tmp_path / "run" / "timing.jsonl").read_text().splitlines()) == 1


def test_the_logs_agree_with_each_other_and_with_the_weights(untouched, whole):
    with (untouched / "episodes.csv").open() as file:
        episodes = list(csv.DictReader(file))
    lines = [json.loads(line) for line in (untouched / "metrics.jsonl").read_text().splitlines()]
    iterations = [line for line in lines if "n_updates" in line]
    evaluations = [line for line in lines if "eval_return_mean" in line]
    assert [line["steps"] for line in iterations] == [32, 64, 96]
    assert [line["steps"] for line in evaluations] == [32, 64, 96]
    assert whole.line_counts == (len(lines), len(episodes))
    assert whole.progress.episodes == len(episodes) == iterations[-1]["episodes"]
    assert len(episodes) > 2
    for line in iterations:
        mine = [row for row in episodes if int(row["iteration"]) == line["iteration"]]
        assert len(mine) == line["episodes_finished"]
        if mine:
            mean = sum(float(row["r"]) for row in mine) / len(mine)
            assert line["episode_return_mean"] == pytest.approx(mean)
            length = sum(int(row["l"]) for row in mine) / len(mine)
            assert line["episode_length_mean"] == pytest.approx(length)
    # CartPole pays 1 for each step.
    assert all(float(row["r"]) == int(row["l"]) for row in episodes)
    assert not any("time" in key or key.endswith("_s") for line in lines for key in line)


def test_an_iterations_episodes_stand_row_by_row_and_not_as_they_ended(tmp_path):
    shape = {"num_slots": 2, "envs_per_slot": 4, "steps": 500}
    learning = {"algorithm": "reinforce", "rollout": shape}
    api.train(failpoints.config(out=tmp_path / "run", learning=learning, stop_at_steps=2000))
    with (tmp_path / "run" / "episodes.csv").open() as file:
        rows = [{name: int(float(value)) for name, value in row.items()}
                for row in csv.DictReader(file)]  # fmt: skip
    iterations = rows[-1]["iteration"]
    places = [(row["iteration"], row["slot"], row["row"]) for row in rows]
    assert places == [*itertools.product(range(1, iterations + 1), range(2), range(4))]
    # In the order of their ends, the episodes of each slot would be sorted by length.
    slots = [[row["l"] for row in rows[i : i + 4]] for i in range(0, len(rows), 4)]
    assert sum(lengths == sorted(lengths) for lengths in slots) < len(slots) / 2


def test_times_are_kept_apart(untouched):
    lines = [json.loads(line) for line in (untouched / "timing.jsonl").read_text().splitlines()]
    assert [line["steps"] for line in lines] == [32, 64, 96, 96]
    assert [line.get("closing", 0) for line in lines] == [0, 0, 0, 1]
    closing = lines.pop()
    assert {"evaluate_s", "checkpoint_s", "wall_s"} <= closing.keys()
    for line in lines:
        spent = {"wall_s", "driver_cpu_s", "collect_s", "transfer_s", "learn_s"}
        # Nothing leaves this process. Other tests check the numbers of fleets with processes.
        assert line.keys() >= {*spent, "bytes_out", "bytes_in"}
        assert (line["bytes_out"], line["bytes_in"]) == (0, 0)
    # Each iteration but the last is evaluated and saved before the next line.
    assert all({"evaluate_s", "checkpoint_s"} <= line.keys() for line in lines[1:])


def test_the_final_evaluation_is_in_the_checkpoint_and_beside_it(untouched, whole):
    result = json.loads((untouched / "result.json").read_text())
    assert result["steps"] == 96
    assert result["evaluation"]["returns"] == list(whole.evaluation.returns)
    assert len(whole.evaluation.returns) == 3


def test_a_log_that_cannot_be_closed_is_no_traceback(tmp_path, whole, monkeypatch):
    with recording(tmp_path / "run", fresh(whole)) as (recorder, _):
        file = recorder._metric_file._file
        close = file.close

        def fail_to_close():
            close()  # as a real file, which is closed even if its last write fails
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(file, "close", fail_to_close)
        recorder.close()
        assert recorder._timing.closed


@pytest.mark.parametrize(
    ("number", "files", "hint"),
    [
        (errno.ENOSPC, (), "free disk space, then start again with the same command"),
        (errno.EFBIG, (), "free disk space, then start again with the same command"),
        (errno.EROFS, (), "make it writable, then start again with the same command"),
        (errno.ENOSPC, ("config.toml",), "disk space, then start again: rlflame train --config"),
        (
            errno.EDQUOT,
            ("config.toml", "checkpoints/step-000000096.safetensors"),
            "continues from checkpoints/step-000000096.safetensors",
        ),
    ],
)
def test_after_a_failed_write_what_is_advised_is_possible(number, files, hint, tmp_path):
    tmp_path = tmp_path / "my run"
    (tmp_path / "checkpoints").mkdir(parents=True)
    for name in files:
        (tmp_path / name).touch()
    with pytest.raises(CheckpointError) as failed, report_disk_errors(tmp_path):
        raise OSError(number, os.strerror(number))
    assert failed.value.message == f"{tmp_path} could not be written: {os.strerror(number)}."
    assert hint in failed.value.hint
    if files:
        assert f"'{tmp_path}" in failed.value.hint  # quoted for a shell


def test_a_file_that_cannot_be_replaced_is_an_error_that_names_the_run(tmp_path):
    (tmp_path / "latest.safetensors").mkdir()
    with pytest.raises(CheckpointError) as failed, report_disk_errors(tmp_path):
        safetensors_file.write_atomically(tmp_path / "latest.safetensors", b"")
    assert failed.value.message.startswith(f"{tmp_path}/latest.safetensors could not be written: ")
    assert failed.value.hint.endswith("start again with the same command")
    with pytest.raises(CheckpointError) as full, report_disk_errors(tmp_path):
        # The error of a file that is already open contains no name.
        raise CheckpointError("a/b could not be written.", "") from OSError(errno.ENOSPC, "full")
    assert full.value.message == "a/b could not be written."
    assert full.value.hint.startswith("free disk space, then ")
    refused = CheckpointError("It is another run's.", "leave it")
    with pytest.raises(CheckpointError) as told, report_disk_errors(tmp_path):
        raise refused
    assert told.value is refused
