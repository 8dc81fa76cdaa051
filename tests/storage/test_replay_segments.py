"""A replay buffer on disk: what is written, what is refused, what is deleted.

The runs have a replay buffer of forty transitions in segments of twelve (replays.py). The expected
values for a damaged buffer come from an undamaged copy.
"""

from __future__ import annotations

import dataclasses
import errno
import os
import random
import re
import shlex
import shutil
from pathlib import Path

import failpoints
import numpy as np
import pytest
from commands import rlflame
from replays import LEARNING, World, buffer_for, small_segments
from test_run_folder import content, recording, same_run, step

from rlflame import api
from rlflame.config import regular_file
from rlflame.config.runtime import RuntimeSettings
from rlflame.errors import CheckpointError, LearningError
from rlflame.experiment import preflight
from rlflame.learning.buffers import replay_buffer
from rlflame.rollout.task import Fragment
from rlflame.storage import checkpoint, run_folder, run_recorder, safetensors_file
from rlflame.storage.replay_segments import SegmentFiles
from rlflame.storage.sweep_folder import SWEEP_FILE
from rlflame.training.trainer import BUFFER_PREFIX, Progress, Snapshot

INLINE = RuntimeSettings(fleet="inline", checkpoint_every_steps=32, keep_checkpoints=9)


@pytest.fixture(autouse=True, scope="module")
def _many_segments():
    with small_segments():
        yield


@pytest.fixture(scope="module")
def untouched(tmp_path_factory):
    """A finished run of 96 steps in 24 rows. Tests must not change its folder."""
    folder = tmp_path_factory.mktemp("untouched") / "run"
    wanted = {"out": folder, "runtime": {"keep_checkpoints": 9}}
    api.train(failpoints.config(**wanted, learning=LEARNING))
    return folder


@pytest.fixture
def copied(untouched, tmp_path):
    return Path(shutil.copytree(untouched, tmp_path / "run"))


@pytest.fixture
def stopped(copied):
    """The same run as it was after 64 steps."""
    for file in copied.glob("checkpoints/step-000000096*"):
        file.unlink()
    (copied / "latest.safetensors").unlink()
    return copied


def segment_files(folder):
    return sorted(folder.glob("replay/*"))


def resumed(target, **changes):
    return api.resume(target, INLINE, **changes)


def digest_of(folder):
    return checkpoint.load(folder / "latest.safetensors").digest


# The files.


def test_a_segment_is_named_by_its_number_and_what_came_before_it(untouched):
    # 24 rows of four transitions, three rows per segment: eight segments, all named by checkpoints.
    files = segment_files(untouched)
    assert [file.name[:14] for file in files] == [f"segment-{n:06d}" for n in range(8)]
    found = checkpoint.load(untouched / "checkpoints" / step(64))
    # Of sixteen rows, the newest ten are sampled. The first of these is in segment 2.
    assert [segment.number for segment in found.snapshot.segments] == [2, 3, 4]
    # Row 15 is not in a segment yet.
    assert found.snapshot.learner["experience.tail.rewards"].shape == (1, 4)
    for segment in found.snapshot.segments:
        assert segment.arrays()["rewards"].shape == (3, 4)


def test_files_without_a_replay_have_no_word_of_it(untouched):
    lines = rlflame("inspect", untouched / "best.safetensors").lines
    assert not [line for line in lines if line.split()[0] == "replay"]
    strings = safetensors_file.read_metadata(untouched / "best.safetensors")
    assert "segments" not in strings
    assert "segments" in safetensors_file.read_metadata(untouched / "latest.safetensors")


@pytest.mark.parametrize("steps", [0, 32, 64])
def test_a_run_taken_up_at_any_checkpoint_ends_the_same(copied, untouched, steps):
    resumed(copied / "checkpoints" / step(steps))
    for path in copied.rglob("*.later"):
        path.unlink()
    assert same_run(copied, untouched) == set()


def test_what_was_set_aside_keeps_its_segments(copied, untouched):
    resumed(copied / "checkpoints" / step(32), fresh_replay=True)
    (aside,) = copied.glob("checkpoints/step-000000064*.later")
    for segment in checkpoint.load(aside).snapshot.segments:
        segment.arrays()
    # Two segments with the same number exist side by side.
    numbers = [file.name[:14] for file in segment_files(copied)]
    assert len(numbers) > len(set(numbers))


def test_only_what_no_checkpoint_names_is_removed(untouched, tmp_path):
    folder = tmp_path / "run"
    wanted = {"out": folder, "runtime": {"keep_checkpoints": 1}}
    api.train(failpoints.config(**wanted, learning=LEARNING))
    newest = checkpoint.load(folder / "latest.safetensors")
    named = {file.name for file in segment_files(folder)}
    assert named == checkpoint.read_segment_names(folder / "latest.safetensors")
    assert [segment.number for segment in newest.snapshot.segments] == [4, 5, 6, 7]
    assert newest.digest == digest_of(untouched)


def test_files_of_others_beside_the_segments_are_left_alone(stopped):
    (stopped / "replay" / "notes.txt").write_text("mine")
    orphan = stopped / "replay" / f"segment-000099-{'0' * 16}.safetensors"
    orphan.write_text("nobody's")
    resumed(stopped)
    assert (stopped / "replay" / "notes.txt").exists()
    assert not orphan.exists()


def test_what_was_left_damaged_is_written_again_by_the_run_that_comes_there(copied, untouched):
    """The damaged segments belong to later checkpoints, which resume sets aside."""
    later = [file for file in segment_files(copied) if file.name > "segment-000003"]
    assert len(later) == 5
    later[0].write_bytes(later[0].read_bytes()[:-1])
    later[1].write_bytes(b"")
    later[2].unlink()
    resumed(copied / "checkpoints" / step(32))
    for path in copied.rglob("*.later"):
        path.unlink()
    assert same_run(copied, untouched) == set()
    for segment in checkpoint.load(copied / "latest.safetensors").snapshot.segments:
        segment.arrays()


def test_a_segment_is_asked_for_once(untouched, tmp_path):
    (segment, *_) = checkpoint.load(untouched / "latest.safetensors").snapshot.segments
    asked = []

    def arrays():
        asked.append(1)
        return segment.arrays()

    counted = dataclasses.replace(segment, arrays=arrays)
    files = SegmentFiles(tmp_path, ())
    for _ in range(3):
        files.write_missing([counted])
        for file in segment_files(tmp_path):
            file.unlink()
    assert len(asked) == 1
    SegmentFiles(tmp_path, [counted]).write_missing([counted])
    assert len(asked) == 1


# Missing and damaged segments.


def needed(folder):
    """The file of the second segment that the newest checkpoint names."""
    return folder / "replay" / sorted(checkpoint.read_segment_names(newest(folder)))[1]


def newest(folder):
    return sorted(folder.glob("checkpoints/step-*"))[-1]


def removed(file):
    file.unlink()


def flipped(file):
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def cut(file):
    file.write_bytes(file.read_bytes()[:-5])


def emptied(file):
    file.write_bytes(b"")


def swapped(file):
    other = next(path for path in segment_files(file.parent.parent) if path != file)
    shutil.copyfile(other, file)


def forged(file):
    """Change the rewards, with a valid checksum."""
    strings, arrays = safetensors_file.read(file, "segment", ())
    arrays["rewards"] = arrays["rewards"] + np.float32(1)
    safetensors_file.write(
        file, arrays, {name: strings[name] for name in ("kind", "segment", "digest")}
    )


def poisoned(file):
    strings, arrays = safetensors_file.read(file, "segment", ())
    arrays["rewards"] = np.full_like(arrays["rewards"], np.nan)
    kept = {name: strings[name] for name in ("kind", "segment", "digest")}
    with pytest.MonkeyPatch.context() as patch:  # as a writer without this check would
        patch.setattr(safetensors_file, "_find_not_finite", lambda tensors: None)
        safetensors_file.write(file, arrays, kept)


def renumbered(file):
    strings, arrays = safetensors_file.read(file, "segment", ())
    safetensors_file.write(file, arrays, {**strings, "segment": "7"})


def pickled(file):
    file.write_bytes(b"\x80\x04" + b"N." * 50)


def of_another_kind(file):
    shutil.copyfile(newest(file.parent.parent), file)


HARMS = {
    removed: "does not exist",
    flipped: "is damaged",
    cut: "is damaged",
    emptied: "is damaged or not a safetensors file",
    swapped: "not the segment",
    forged: "not the segment",
    poisoned: "NaN",
    renumbered: "not the segment",
    pickled: "pickle",
    of_another_kind: "rlflame did not write it",
}


@pytest.mark.parametrize("harm", HARMS, ids=lambda harm: harm.__name__)
def test_a_replay_that_is_not_whole_is_refused_before_anything_is_written(stopped, harm):
    file = needed(stopped)
    harm(file)
    (stopped / ".lock").touch()
    before = content(stopped)
    with pytest.raises(CheckpointError) as caught:
        resumed(stopped)
    message = caught.value.message
    assert str(file) in message
    assert HARMS[harm] in message
    assert message.endswith(".")
    assert "\n" not in message
    assert f"rlflame resume {stopped} --fresh-replay" in caught.value.hint
    assert content(stopped) == before


def test_where_an_earlier_checkpoint_is_whole_it_is_named_first(stopped, untouched):
    """Only the newest checkpoint needs the damaged segment; the hint's end is equal."""
    last, others = newest(stopped), sorted(stopped.glob("checkpoints/step-*"))[:-1]
    spared = set().union(*map(checkpoint.read_segment_names, others))
    only = min(checkpoint.read_segment_names(last) - spared)
    flipped(stopped / "replay" / only)
    said = rlflame("resume", stopped, "--set", "runtime.fleet=inline")
    assert said.code == 1
    assert (
        "continues from an earlier checkpoint, bit-identically; rlflame resume"
        in said.err.replace("\n", " ")
    )
    advised = Path(re.search(r"rlflame resume (\S+step-\d+\.safetensors) ", said.err)[1])
    assert advised == others[-1]
    resumed(advised)
    assert digest_of(stopped) == digest_of(untouched)


def test_no_earlier_checkpoint_is_named_that_is_not_whole_either(stopped):
    shutil.rmtree(stopped / "replay")
    with pytest.raises(CheckpointError) as caught:
        resumed(stopped)
    # The first checkpoint needs no segment.
    first = stopped / "checkpoints" / step(0)
    assert caught.value.hint.startswith(f"rlflame resume {first} ")
    first.unlink()
    with pytest.raises(CheckpointError) as caught:
        resumed(stopped)
    assert caught.value.hint.startswith(f"rlflame resume {stopped} --fresh-replay")


def advised(hint, after="rlflame"):
    """The target and the steps of the `rlflame resume` in a hint after these words."""
    words = hint[hint.index(after) :].split("rlflame resume ", 1)[1].split()
    steps = int(words[words.index("--steps") + 1]) if "--steps" in words[:4] else None
    return Path(words[0]), steps


def only_needed_by_the_last(folder):
    """The segments that only the newest checkpoint names."""
    *others, last = sorted(folder.glob("checkpoints/step-*.safetensors"))
    spared = set().union(*map(checkpoint.read_segment_names, others))
    return [folder / "replay" / name for name in checkpoint.read_segment_names(last) - spared]


def test_what_is_advised_goes_as_far_as_was_asked_for(copied, tmp_path):
    other = Path(shutil.copytree(copied, tmp_path / "other"))
    resumed(other, steps=160)
    resumed(copied, steps=128)
    for file in only_needed_by_the_last(copied):
        file.unlink()
    with pytest.raises(CheckpointError) as caught:
        resumed(copied, steps=160)
    target, steps = advised(caught.value.hint)
    assert (target, steps) == (copied / "checkpoints" / step(96), 160)
    assert advised(caught.value.hint, "bit-identically; ") == (copied, 160)
    # The run has its 128 steps, and no more were requested.
    assert advised(rlflame("inspect", copied).err, "bit-identically; ") == (copied, 256)
    resumed(target, steps=steps)
    assert digest_of(copied) == digest_of(other)


def test_no_checkpoint_of_an_earlier_replay_is_advised(copied):
    resumed(copied, fresh_replay=True, steps=160)
    for file in only_needed_by_the_last(copied):
        file.unlink()
    with pytest.raises(CheckpointError) as caught:
        resumed(copied, steps=192)
    target, steps = advised(caught.value.hint)
    lineage = [
        int(checkpoint.load(path).snapshot.learner["experience.lineage"])
        for path in (target if target.is_file() else newest(copied), newest(copied))
    ]
    assert lineage[0] == lineage[1]
    assert steps == 192


def test_a_run_that_is_over_has_no_use_for_an_empty_replay_but_to_go_on(copied):
    before = content(copied)
    said = rlflame("resume", copied, "--fresh-replay")
    assert said.code == 2
    assert "This run ended at step 96" in said.err
    assert f"rlflame resume {copied} --fresh-replay --steps 192" in said.err.replace("\n", " ")
    assert {**content(copied), ".lock": b""} == {**before, ".lock": b""}
    assert resumed(copied, fresh_replay=True, steps=192).progress.steps == 192


def test_a_run_that_was_killed_before_its_score_is_scored_without_a_replay(copied, untouched):
    (copied / "result.json").unlink()
    shutil.rmtree(copied / "replay")
    with pytest.raises(CheckpointError) as caught:
        resumed(copied)
    assert f"rlflame resume {copied} --fresh-replay" in caught.value.hint
    result = resumed(copied, fresh_replay=True)
    assert (result.complete, result.progress.steps) == (True, 96)
    then = checkpoint.load(untouched / "latest.safetensors").evaluation
    assert result.evaluation == then


def test_a_run_that_has_its_return_is_begun_anew_with_the_command_that_is_advised(tmp_path):
    folder = tmp_path / "run"
    evaluation = {"until_return": -1e9, "every_steps": 32}
    sections = {"learning": LEARNING, "evaluation": evaluation}
    result = api.train(failpoints.config(out=folder, **sections))
    assert result.progress.reached
    assert rlflame("resume", folder, "--fresh-replay").code == 2
    said = rlflame("resume", folder, "--steps", "999")
    assert said.code == 2
    (command,) = re.findall(r"rlflame (train .*?until_return=none)", said.err)
    assert rlflame(*shlex.split(command), "--dry-run").code == 0
    assert shlex.split(result.resume_command)[1:] == shlex.split(command)


def test_while_a_checkpoint_cannot_be_read_nothing_of_the_replay_goes(copied, monkeypatch):
    """The unreadable checkpoint may need the segments."""
    kept = sorted((copied / "replay").iterdir())
    (copied / "replay" / "segment-000099-0123456789abcdef.safetensors").touch()
    header, opened = run_folder.list_step_files(copied)[0], regular_file.open_to_read

    def failing(path):
        if path == header:
            raise OSError(errno.EIO, "Input/output error")
        return opened(path)

    files = SegmentFiles(copied, ())
    with monkeypatch.context() as patch:
        patch.setattr(regular_file, "open_to_read", failing)
        files.prune(lambda: run_folder.find_needed_segments(copied))
    assert len([*(copied / "replay").iterdir()]) == len(kept) + 1
    files.prune(lambda: run_folder.find_needed_segments(copied))
    assert sorted((copied / "replay").iterdir()) == kept


def test_inspect_looks_again_where_a_run_has_moved_on(copied, monkeypatch):
    """A running process may have deleted the segments of an older checkpoint."""
    before = checkpoint.load(copied / "checkpoints" / step(64))
    for name in checkpoint.read_segment_names(copied / "checkpoints" / step(64)):
        if name not in checkpoint.read_segment_names(newest(copied)):
            (copied / "replay" / name).unlink()
    answers = [before]
    real = run_folder.load_newest_checkpoint

    def moved_on(target, note):
        return answers.pop() if answers else real(target, note)

    monkeypatch.setattr(run_folder, "load_newest_checkpoint", moved_on)
    said = rlflame("inspect", copied)
    assert (said.code, answers) == (0, [])
    assert "step 96" in said.out


def test_two_names_of_one_file_are_both_put_aside(copied):
    there = copied / "checkpoints" / step(96)
    os.link(there, f"{there}.later")
    run_recorder._set_file_aside(there)
    assert [path.name for path in copied.glob("checkpoints/*96*")] == [f"{there.name}.later"]


def test_a_replay_is_taken_up_in_the_memory_of_the_empty_one():
    """There may not be enough memory for two buffers."""
    world = World(slots=2, rows=2, rng=np.random.default_rng(0))
    first, second = buffer_for(world, 40), buffer_for(world, 40)
    ring = second._ring
    second.load_state(first.get_state(), first.list_segments())
    assert second._ring is ring


def forget(path, name):
    """Write a checkpoint again, without this array of its learner."""
    found = checkpoint.load(path)
    learner = {n: array for n, array in found.snapshot.learner.items() if n != name}
    snapshot = dataclasses.replace(found.snapshot, learner=learner)
    checkpoint.save(path, dataclasses.replace(found, snapshot=snapshot))


@pytest.mark.parametrize("fresh", [False, True])
def test_a_state_that_is_not_taken_up_leaves_the_run_as_it_is(stopped, fresh):
    forget(newest(stopped), "critics")
    (stopped / ".lock").touch()
    before = content(stopped)
    with pytest.raises(LearningError, match="critics is missing"):
        resumed(stopped, fresh_replay=fresh, steps=128)
    assert content(stopped) == before


def test_a_segment_with_any_bit_flipped_is_refused(copied):
    file, rng = needed(copied), random.Random(0)
    data = file.read_bytes()
    (segment,) = (
        segment
        for segment in checkpoint.load(newest(copied)).snapshot.segments
        if f"{segment.number:06d}-{segment.digest[:16]}" in file.name
    )
    segment.arrays()
    for position in {*range(0, 200, 7), *(rng.randrange(len(data)) for _ in range(80))}:
        wrong = bytearray(data)
        wrong[position] ^= 1 << rng.randrange(8)
        file.write_bytes(wrong)
        with pytest.raises(CheckpointError):
            segment.arrays()


def test_a_checkpoint_that_names_segments_oddly_is_refused(untouched, tmp_path):
    whole = checkpoint.load(untouched / "latest.safetensors")
    for digest in ("../../../../tmp/x", "0" * 63, "G" * 64):
        segment = dataclasses.replace(whole.snapshot.segments[0], digest=digest)
        snapshot = dataclasses.replace(whole.snapshot, segments=(segment,))
        path = tmp_path / "odd.safetensors"
        checkpoint.save(path, dataclasses.replace(whole, snapshot=snapshot))
        with pytest.raises(CheckpointError, match="is damaged"):
            checkpoint.load(path)


# A new lineage.


def test_a_fresh_replay_goes_on_where_the_old_one_is_lost(stopped, untouched):
    shutil.rmtree(stopped / "replay")
    with pytest.raises(CheckpointError):
        resumed(stopped)
    result = resumed(stopped, fresh_replay=True)
    assert result.complete
    assert result.progress.steps == 96
    assert result.digest != digest_of(untouched)
    found = checkpoint.load(stopped / "latest.safetensors").snapshot
    # 32 new steps, of which twelve are beyond the first twenty: six updates at 0.5 per step.
    before = checkpoint.load(untouched / "checkpoints" / step(64)).snapshot
    made = [int(s.learner["experience.updates"]) for s in (before, found)]
    assert made == [22, 22 + 6]
    assert int(found.learner["experience.lineage"]) == 1
    assert [segment.number for segment in found.segments] == [0, 1]


def test_a_fresh_replay_is_exact_in_its_turn(stopped, tmp_path):
    other = Path(shutil.copytree(stopped, tmp_path / "other"))
    resumed(stopped, fresh_replay=True, steps=192)
    resumed(other, fresh_replay=True, steps=128)
    resumed(other, steps=192)
    assert digest_of(stopped) == digest_of(other)


def test_a_fresh_replay_instead_of_a_whole_one_changes_the_digest(stopped, untouched):
    resumed(stopped, fresh_replay=True)
    assert digest_of(stopped) != digest_of(untouched)


def test_what_a_fresh_replay_replaces_is_kept_with_its_segments(stopped, untouched):
    there = newest(stopped)
    before = checkpoint.load(there)
    resumed(stopped, fresh_replay=True)
    kept = there.with_name(f"{there.name}.replaced")
    again = stopped / "checkpoints" / there.name
    kept.replace(again)
    assert checkpoint.load(again).digest == before.digest
    resumed(again)
    assert digest_of(stopped) == digest_of(untouched)


def test_whatever_is_replaced_or_set_aside_is_kept_however_often(copied):
    """Three branches start at one step, then the second one is resumed again."""
    there = copied / "checkpoints" / step(64)
    digests = {path: checkpoint.load(path).digest for path in copied.glob("checkpoints/step-*")}
    for steps in (128, 160, 192):
        resumed(there, fresh_replay=True, steps=steps)
        digests |= {copied / "kept": digest_of(copied)}
        held = [*copied.glob("checkpoints/step-*")]
        found = [checkpoint.load(path) for path in held]
        assert {one.digest for one in found} >= set(digests.values())
        for one in found:
            for segment in one.snapshot.segments:
                segment.arrays()
        digests = dict(enumerate(one.digest for one in found))
    names = sorted(path.name for path in copied.glob("checkpoints/*.replaced*"))
    assert names == [f"{there.name}.replaced{more}" for more in ("", "-2", "-3")]


def test_a_run_that_goes_on_as_it_was_replaces_nothing(stopped):
    resumed(stopped)
    assert not [*stopped.rglob("*.replaced")]


def test_without_a_replay_there_is_none_to_begin_anew(tmp_path):
    folder = tmp_path / "run"
    wanted = failpoints.config(out=folder, evaluation={"every_steps": None})
    api.train(wanted)
    said = rlflame("resume", folder, "--steps", "128", "--fresh-replay")
    assert said.code == 2
    assert "ppo has none" in said.err


# A copy without its replay buffer, and the output of inspect.


def test_a_copy_without_its_replay_is_good_for_all_but_resuming(untouched, tmp_path):
    copy = tmp_path / "elsewhere" / "copy.safetensors"
    copy.parent.mkdir()
    shutil.copyfile(untouched / "checkpoints" / step(64), copy)
    api.load_policy(copy)(np.zeros(3))
    said = rlflame("eval", copy, "--local", "--workers", "1")
    assert said.code == 0, said.err
    said = rlflame("inspect", copy)
    assert said.code == 0
    assert "36 transitions in 3 segments that are not next to the file" in said.out
    said = rlflame("resume", copy, "--set", "runtime.fleet=inline")
    assert said.code == 1
    assert "does not exist" in said.err
    assert f"rlflame resume {copy} --fresh-replay" in said.err.replace("\n", " ")
    assert resumed(copy, fresh_replay=True).complete


def test_inspect_counts_and_verifies(copied):
    said = rlflame("inspect", copied)
    assert said.code == 0
    size = sum(
        (copied / "replay" / name).stat().st_size
        for name in checkpoint.read_segment_names(newest(copied))
    )
    (line,) = [line for line in said.lines if line.split()[0] == "replay"]
    assert line.split(maxsplit=1)[1] == (
        f"48 transitions in 4 segments, {size / 1000:,.0f} kB; the last 0 in the file"
    )
    (shown,) = rlflame("inspect", copied, "--json").json()["files"]
    assert shown["replay"] == {
        "transitions": 48,
        "segments": 4,
        "bytes": size,
        "tail": 0,
        "absent": False,
        "problem": None,
    }


def test_inspect_names_what_is_damaged_and_fails(copied):
    file = needed(copied)
    file.unlink()
    for words in ((), ("--json",)):
        said = rlflame("inspect", copied, *words)
        assert said.code == 1
        assert f"{file} does not exist" in said.out
    assert f"rlflame resume {copied} --fresh-replay" in said.err
    assert rlflame("inspect", copied, "--recipe").code == 0


def test_inspect_names_what_is_damaged_in_a_folder_of_seeds(untouched, tmp_path):
    seed = tmp_path / "job" / "seed-0"
    shutil.copytree(untouched, seed)
    (tmp_path / "job" / SWEEP_FILE).touch()
    assert rlflame("inspect", tmp_path / "job").code == 0
    file = needed(seed)
    file.unlink()
    for words in ((), ("--json",)):
        said = rlflame("inspect", tmp_path / "job", *words)
        assert said.code == 1
        assert f"{file} does not exist" in said.out
        assert f"rlflame resume {seed} --fresh-replay" in said.err


# Costs.


def test_a_replay_that_memory_cannot_hold_is_refused(stopped, monkeypatch):
    available = 123_456_789
    monkeypatch.setattr(preflight, "measure_usable_bytes", lambda: available)
    words = ("train", "--env", "ant", "--algo", "sac", "--set", "runtime.fleet=inline")
    out = stopped / "refused"
    said = rlflame(*words, "--out", out)
    assert said.code == 2
    # Eight columns. Each transition has 105 observations, 8 actions and a reward of four bytes
    # each, one byte for the end, and a thousandth of the observation that the limit of 1,000 steps
    # hides.
    assert "A replay buffer of 1,000,000 transitions takes 458 MB of memory" in said.err
    assert "but only 123 MB is available" in said.err
    assert not out.exists()
    assert "a smaller learning.sac.buffer_size" in said.err
    # A dry run may be for another machine.
    said = rlflame(*words, "--dry-run")
    assert said.code == 0
    monkeypatch.setattr(preflight, "measure_usable_bytes", lambda: 1000)
    said = rlflame("resume", stopped, "--set", "runtime.fleet=inline")
    assert said.code == 2
    assert "free memory" in said.err.replace("\n", " ")


def test_the_memory_of_a_replay_is_shown_at_the_start(tmp_path):
    said = rlflame("train", "--env", "hopper", "--algo", "sac", "--dry-run")
    # Eleven observations, three actions, a reward and one byte are 61 bytes per transition.
    assert "a replay buffer of 1,000,000 transitions takes 61 MB when full" in said.out
    assert "when full" not in rlflame("train", "--env", "hopper", "--dry-run").out


def test_each_transition_of_a_long_run_is_written_about_once(tmp_path, untouched, monkeypatch):
    """A million steps and a checkpoint every ten thousand, measured by the files."""
    template = checkpoint.load(untouched / "latest.safetensors")
    begun = dataclasses.replace(
        template, snapshot=None, line_counts=(0, 0), best=None, evaluation=None
    )
    written = 0
    real = safetensors_file.write_atomically

    def counted(path, data):
        nonlocal written
        written += len(data)
        real(path, data)

    monkeypatch.setattr(safetensors_file, "write_atomically", counted)
    monkeypatch.setattr(safetensors_file, "sync_folder", lambda folder: None)
    monkeypatch.setattr(safetensors_file.os, "fsync", lambda descriptor: None)
    monkeypatch.setattr(replay_buffer, "SEGMENT_TRANSITIONS", 2048)
    world = World(1, 8, np.random.default_rng(0), observation_size=11, action_size=3)
    buffer = buffer_for(world, 1_000_000)
    with recording(tmp_path / "run", begun, every_steps=10_000) as (recorder, _):
        for steps in range(10_000, 1_000_001, 10_000):
            buffer.add([idle(steps, 1250, 8, 11, 3)], {})
            progress = Progress(iteration=steps // 10_000, steps=steps)
            held = {BUFFER_PREFIX + name: array for name, array in buffer.get_state().items()}
            snapshot = Snapshot(
                progress,
                template.policy,
                held,
                template.snapshot.states,
                None,
                buffer.list_segments(),
            )
            recorder.record_snapshot(lambda snapshot=snapshot: snapshot, progress, False)
    # Eleven observations, three actions, a reward, and how the step ended.
    each = 4 * (11 + 3 + 1) + 2
    assert 1_000_000 * each < written < 1.25 * 1_000_000 * each
    files = segment_files(tmp_path / "run")
    assert len(files) == 1_000_000 // 2048
    assert sum(file.stat().st_size for file in files) < 1.05 * 1_000_000 * each


def idle(seed, steps, columns, observation_size, action_size) -> Fragment:
    """Random steps without an episode end."""
    rng = np.random.default_rng(seed)
    nothing = np.zeros((steps, columns), bool)
    return Fragment(
        iteration=0,
        slot=0,
        observations=rng.random((steps, columns, observation_size), np.float32),
        actions=rng.random((steps, columns, action_size), np.float32),
        log_probs=np.zeros((steps, columns), np.float32),
        rewards=rng.random((steps, columns)),
        terminated=nothing,
        truncated=nothing,
        lengths=np.full(columns, steps),
        last_observations=np.zeros((columns, observation_size), np.float32),
        boundary_index=np.zeros((0, 2), np.int64),
        boundary_observations=np.zeros((0, observation_size), np.float32),
        episodes=(),
        states=(),
    )
