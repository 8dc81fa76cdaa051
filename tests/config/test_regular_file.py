"""Pipes, sockets, devices and huge files are refused instead of a run's files."""

from __future__ import annotations

import json
import os
import shutil
import socket
import struct
import tracemalloc
from pathlib import Path

import pytest
from commands import TINY, rlflame

from rlflame.analysis.plots import speedup
from rlflame.analysis.report import bench_comparison
from rlflame.config import regular_file, toml_io
from rlflame.errors import CheckpointError, ConfigError, RlflameError
from rlflame.experiment import listings
from rlflame.storage import checkpoint, replay_segments, run_folder, run_reader
from rlflame.storage.metrics import LineFile

GIGABYTE = 1 << 30


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole") / "run"
    spoken = rlflame("train", "--env", "cartpole", *TINY, "--steps", "512", "--out", folder)
    assert spoken.code == 0, spoken.err
    return folder


@pytest.fixture
def run(whole, tmp_path):
    return Path(shutil.copytree(whole, tmp_path / "run"))


@pytest.fixture(params=["pipe", "socket", "device", "folder"])
def replace(request, monkeypatch):
    """Replace a file by something that is not a regular file."""

    def put(path):
        path.unlink(missing_ok=True)
        if request.param == "pipe":
            os.mkfifo(path)
        elif request.param == "socket":
            with monkeypatch.context() as patch, socket.socket(socket.AF_UNIX) as server:
                patch.chdir(path.parent)  # paths of sockets must be short
                server.bind(path.name)
        elif request.param == "device":
            path.symlink_to("/dev/zero")
        else:
            path.mkdir()

    return put


READERS = {
    "latest.safetensors": (checkpoint.load, CheckpointError),
    "config.toml": (toml_io.read_file, ConfigError),
    "metrics.jsonl": (run_reader.read_lines, CheckpointError),
    "result.json": (run_reader.read_result, CheckpointError),
    "scaling.json": (bench_comparison.read_results, CheckpointError),
    "scaling.csv": (speedup.make_speedup_chart, CheckpointError),
}


@pytest.mark.parametrize("name", READERS)
def test_what_is_no_file_is_a_sentence(name, tmp_path, replace):
    read, error = READERS[name]
    path = tmp_path / name
    replace(path)
    with pytest.raises(error) as caught:
        read(path)
    assert str(path) in caught.value.message


@pytest.mark.parametrize("name", ["timing.jsonl", "machines.json"])
def test_what_stands_beside_the_point_reads_as_empty(name, tmp_path, replace):
    path = tmp_path / name
    replace(path)
    assert {
        "timing.jsonl": lambda path: run_reader.read_lines(path, strict=False),
        "machines.json": run_reader.read_machines,
    }[name](path) == ()


def test_a_table_of_episodes_that_is_no_file_is_a_sentence(run, replace):
    replace(run / "episodes.csv")
    with pytest.raises(CheckpointError, match=r"episodes\.csv"):
        run_reader.read_run(run).read_episodes()


@pytest.mark.parametrize(
    "name", ["metrics.jsonl", "episodes.csv", "timing.jsonl", "config.toml", "result.json"]
)
def test_a_run_with_no_file_in_a_file_s_place_does_not_hang(name, run, replace):
    replace(run / name)
    (run / ".lock").touch()
    for words in (("resume", run, "--steps", "1024"), ("runs", run), ("report", run)):
        spoken = rlflame(*words)
        said = spoken.out + spoken.err
        assert spoken.code in (0, 1, 2), said
        assert "Traceback" not in said
        assert "bug" not in said


def test_a_pipe_is_not_appended_to(tmp_path, replace):
    path = tmp_path / "metrics.jsonl"
    replace(path)
    with pytest.raises(OSError, match="metrics"):
        LineFile(path, 0)
    with pytest.raises(OSError, match="metrics"):
        regular_file.open_to_append(path)


def test_a_pipe_among_checkpoints_is_passed_over(run, replace):
    replace(run / "checkpoints" / "step-000099999.safetensors")
    notes = []
    assert run_folder.load_newest_checkpoint(run, notes.append).progress.steps == 512
    assert len(notes) == 1
    assert run_folder.find_needed_segments(run) == set()
    assert listings.read_run_overview(run).steps == 512


def test_a_segment_that_is_no_file_is_a_sentence(tmp_path, replace):
    digest = "0" * 64
    replace(tmp_path / replay_segments.format_segment_name(3, digest))
    with pytest.raises(CheckpointError) as caught:
        replay_segments.make_lazy_segment(tmp_path, 3, digest).arrays()
    assert "--fresh-replay" in caught.value.hint


# Sizes.


def extend(path, size=4 * GIGABYTE):
    """Extend a file to this size without using disk space."""
    with path.open("ab") as file:
        file.truncate(size)


def peak_of(work, *given):
    """The peak memory of refusing a file."""
    tracemalloc.start()
    try:
        with pytest.raises(RlflameError):
            work(*given)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("name", READERS)
def test_gigabytes_are_refused_before_they_are_read(name, tmp_path):
    read, _ = READERS[name]
    extend(tmp_path / name)
    assert peak_of(read, tmp_path / name) < 100_000_000


def header_file(path, header, size):
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text)
    extend(path, 8 + len(text) + size)


def test_a_checkpoint_with_gigabytes_behind_its_tensors_is_refused(run):
    path = run / "latest.safetensors"
    extend(path)
    assert peak_of(checkpoint.load, path) < 10_000_000


def test_a_policy_s_tensors_are_judged_before_they_are_read(run):
    """The header fits the size of the file, but not the recipe."""
    path = run / "latest.safetensors"
    (length,) = struct.unpack_from("<Q", path.read_bytes())
    header = json.loads(path.read_bytes()[8 : 8 + length])
    kept = {"__metadata__": {**header["__metadata__"], "kind": "policy"}}
    large = {"dtype": "F32", "shape": [GIGABYTE], "data_offsets": [0, 4 * GIGABYTE]}
    for name in ("policy.actor.0.weight", "learner.parameters", "envs"):
        path.unlink()
        header_file(path, {**kept, name: large}, 4 * GIGABYTE)
        assert peak_of(checkpoint.load, path) < 10_000_000


def test_a_header_of_too_many_tensors_is_refused(tmp_path):
    path = tmp_path / "a.safetensors"
    empty = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    metadata = {"format": "1", "recipe": "{}"}
    tensors = {f"t{number}": empty for number in range(200_000)}
    header_file(path, {"__metadata__": metadata, **tensors}, 0)
    assert peak_of(checkpoint.load, path) < 60_000_000
    few = dict(list(tensors.items())[:10_001])
    header_file(path, {"__metadata__": metadata, **few}, 0)
    with pytest.raises(CheckpointError, match="too many"):
        checkpoint.load(path)


@pytest.mark.parametrize("name", ["../up", "", "a b", "a" * 300, "ä", "1", "a\n", "a\ud800"])
def test_names_of_another_form_are_refused(tmp_path, name):
    path = tmp_path / "a.safetensors"
    empty = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    header_file(path, {"__metadata__": {"format": "1", "recipe": "{}"}, name: empty}, 0)
    with pytest.raises(CheckpointError, match="is damaged"):
        checkpoint.load(path)


def test_a_file_within_its_limit_is_read_whole(tmp_path):
    path = tmp_path / "a"
    path.write_bytes(b"a\r\nb\rc\n")
    assert regular_file.read_text(path, 7) == "a\nb\nc\n" == path.read_text()
    assert list(regular_file.read_lines(path)) == ["a\n", "b\n", "c\n"]
    assert list(regular_file.read_lines(path, newline="", limit=3)) == ["a\r\n", "b\r", "c\n"]
    with pytest.raises(OSError, match="6"):
        regular_file.read_text(path, 6)
    with pytest.raises(OSError, match="line 1"):
        list(regular_file.read_lines(path, limit=1))


def test_a_link_to_a_file_is_read_as_the_file(tmp_path):
    (tmp_path / "a").write_text("x = 1\n")
    (tmp_path / "b").symlink_to("a")
    assert toml_io.read_file(tmp_path / "b") == {"x": 1}
