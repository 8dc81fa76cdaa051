"""The logs of a run: truncation, explained names, and no wall-clock times."""

from __future__ import annotations

import json
import math
import os

import failpoints
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlflame import api
from rlflame.errors import CheckpointError
from rlflame.storage import metrics
from rlflame.storage.metrics import (
    EPISODE_HEADER,
    NAMES,
    JsonLines,
    LineFile,
    PhaseTimer,
    read_last_returns,
)

HEADER = "a,b\n"


def opened(path, lines, header="", kind=LineFile):
    file = kind(path, lines, header)
    file.truncate()
    return file


# A history of a log: lines are appended, checkpoints count them, deaths truncate the last line.
ACTS = st.one_of(
    st.text("xyzäö,", max_size=5).map(lambda text: ("append", text)),
    st.just(("checkpoint", "")),
    st.sampled_from(["", "torn", "whole\n", "two\nlines\nand"]).map(lambda text: ("die", text)),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(ACTS, max_size=30), st.sampled_from(["", HEADER]))
def test_after_every_death_the_log_goes_on_from_the_lines_that_were_counted(
    tmp_path_factory, story, header
):
    path = tmp_path_factory.mktemp("log") / "log"
    file = opened(path, 0, header)
    lines, counted = [], 0
    for act, text in story:
        if act == "append":
            file.append(text)
            lines.append(text)
        elif act == "checkpoint":
            file.sync()
            counted = file.lines
            assert path.read_text() == header + "".join(line + "\n" for line in lines)
        else:
            file.close()
            with path.open("a", newline="") as after:
                after.write(text)
            lines = lines[:counted]
            file = opened(path, counted, header)
        assert file.lines == len(lines)
    file.close()
    assert path.read_text() == header + "".join(line + "\n" for line in lines)


@pytest.mark.parametrize("torn", [b"", b"a", b"a,b", b"a,b\n", b"a,b\n1,2\n", b"a,b\n1"])
def test_a_log_that_died_in_its_header_begins_anew(tmp_path, torn):
    path = tmp_path / "log"
    path.write_bytes(torn)
    file = opened(path, 0, HEADER)
    file.append("1,2")
    file.close()
    assert path.read_text() == "a,b\n1,2\n"


@pytest.mark.parametrize(
    ("content", "lost"),
    [(None, 3), ("", 3), ("a,b\n", 3), ("a,b\n1\n2", 2), ("a,b\n1\n2\n", 1), ("a,b\n1\n2\n3", 1)],
)
def test_lines_that_are_missing_are_counted_and_nothing_is_changed(tmp_path, content, lost):
    path = tmp_path / "log"
    if content is not None:
        path.write_text(content)
    with pytest.raises(CheckpointError, match=f"lacks {lost} of the 3 lines"):
        LineFile(path, 3, HEADER)
    assert (path.read_text() if path.exists() else None) == content


def test_opening_changes_nothing_before_the_cut(tmp_path):
    path = tmp_path / "log"
    path.write_text("1\n2\n3\n")
    file = LineFile(path, 1)
    assert path.read_text() == "1\n2\n3\n"
    file.truncate()
    assert path.read_text() == "1\n"
    file.close()


def test_synced_lines_were_flushed_to_the_disk(tmp_path, monkeypatch):
    file = opened(tmp_path / "log", 0)
    seen = []
    monkeypatch.setattr(os, "fsync", lambda fd: seen.append(os.fstat(fd).st_size))
    file.append("four")
    file.sync()
    file.close()
    assert seen == [5]


def strict(text):
    """Parse JSON without NaN and infinity, as other languages do."""

    def never(name):
        raise ValueError(name)

    return json.loads(text, parse_constant=never)


def test_json_lines_are_strict_and_in_the_order_of_writing(tmp_path):
    path = tmp_path / "log"
    sink = opened(path, 0, kind=JsonLines)
    sink.write(7, {"loss": math.nan, "std": -math.inf, "entropy_loss": 0.1, "episodes": 3})
    sink.write(8, {"episode_return_mean": None})
    sink.close()
    first, second = map(strict, path.read_text().splitlines())
    assert list(first.items()) == [
        ("steps", 7),
        ("loss", None),
        ("std", None),
        ("entropy_loss", 0.1),
        ("episodes", 3),
    ]
    assert second == {"steps": 8, "episode_return_mean": None}


def test_a_metric_that_nobody_explained_is_a_bug(tmp_path):
    sink = opened(tmp_path / "log", 0, kind=JsonLines)
    with pytest.raises(KeyError, match="surprise"):
        sink.write(1, {"surprise": 1.0})
    sink.close()


def test_every_name_that_is_explained_is_written_by_some_run(tmp_path):
    seen = set()
    for number, learning in enumerate(
        ({"ppo": {"clip_range_value": 0.2}}, {"algorithm": "reinforce"}, {"algorithm": "sac"})
    ):
        folder = tmp_path / str(number)
        api.train(failpoints.config("Pendulum-v1", folder, learning=learning))
        for line in (folder / "metrics.jsonl").read_text().splitlines():
            seen |= strict(line).keys()
    assert seen == NAMES.keys()


def test_times_are_kept_by_phase_and_lap(monkeypatch):
    class Clock:
        now = 100.0
        used = 5.0

        def monotonic(self):
            return self.now

        def process_time(self):
            return self.used

    clock = Clock()
    monkeypatch.setattr(metrics, "time", clock)
    monkeypatch.setattr(metrics, "read_children_cpu_s", lambda: None)
    times = PhaseTimer()
    for seconds in (1.0, 2.0):
        with times.time_phase("collect"):
            clock.now += seconds

    def fail():
        with times.time_phase("learn"):
            clock.now += 4.0
            clock.used += 3.0
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    clock.now += 8.0
    lap = {"wall_s": 15.0, "driver_cpu_s": 3.0, "collect_s": 3.0, "learn_s": 4.0}
    assert times.finish_lap() == lap
    assert times.finish_lap() == {"wall_s": 0.0, "driver_cpu_s": 0.0}


@pytest.mark.parametrize(
    ("text", "returns"),
    [
        (EPISODE_HEADER, []),
        (f"{EPISODE_HEADER}1.5,3\n-2,4\n", [1.5, -2.0]),
        (f"{EPISODE_HEADER}1,3\n2,4\n3,5\n4,5\n", [2.0, 3.0, 4.0]),
        (f"{EPISODE_HEADER}damaged,3\n", []),
        (None, []),
    ],
)
def test_a_resumed_run_shows_the_returns_of_the_last_episodes(tmp_path, text, returns):
    path = tmp_path / "episodes.csv"
    if text is not None:
        path.write_text(text)
    assert read_last_returns(path, 3) == returns
