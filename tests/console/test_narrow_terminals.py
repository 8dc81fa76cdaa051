"""Terminals of few columns: what is said about a run is wrapped by us, at words, and whole."""

from __future__ import annotations

import io

import pytest
from rich.console import Console
from test_displays import Clock, ended, metrics, record, started

from rlflame.console import formatting
from rlflame.console.live import KeyValueTable, LiveDisplay
from rlflame.console.plain import PlainDisplay

WIDTHS = (20, 30, 40, 60)
#: What cannot be broken: a name of a setting, and a command that is to be copied.
LONG = ("(learning.rollout.num_slots)", "rlflame eval runs/x/best.safetensors")


def run_of() -> list[str]:
    clock, said = Clock(), []
    show = PlainDisplay(said.append, said.append, clock)
    with show.open(started(environment="cartpole", flags={"stop_at_steps": 4_096})):
        for iteration in (1, 2):
            clock.now += 2.0
            show.show_iteration(metrics(iteration, 2048 * iteration, 9 * iteration), [12.5] * 9)
        show.show_evaluation(4_096, record(100.0), True)
    show.show_result(ended(4_096, 18))
    return said


@pytest.fixture
def columns(request, monkeypatch):
    monkeypatch.setattr(formatting, "find_terminal_columns", lambda: request.param)
    return request.param


@pytest.mark.parametrize("columns", WIDTHS, indirect=True)
def test_lines_fit_and_say_what_they_say_in_a_log(columns, monkeypatch):
    narrow = run_of()
    lines = "\n".join(narrow).splitlines()
    long = [line for line in lines if len(line) > columns]
    assert [line for line in long if not any(word in line for word in LONG)] == []
    monkeypatch.setattr(formatting, "find_terminal_columns", lambda: None)
    assert " ".join(narrow).split() == " ".join(run_of()).split()


@pytest.mark.parametrize("columns", WIDTHS, indirect=True)
def test_a_command_stays_in_one_line(columns):
    lines = formatting.format_pairs(
        [("next", "rlflame eval runs/a/best.safetensors --episodes 100")]
    )
    assert [line.strip() for line in lines][-1].endswith(
        "rlflame eval runs/a/best.safetensors --episodes 100"
    )


def test_words_stand_beside_where_there_is_room_and_above_where_there_is_none():
    said = [("time", "0:05, 10,240 steps"), ("evaluation", "435.4, 95% interval [395.0, 472.6]")]
    assert formatting.format_pairs(said, 44) == [
        "  time        0:05, 10,240 steps",
        "  evaluation  435.4, 95% interval [395.0,\n              472.6]",
    ]
    assert formatting.format_pairs(said, 24) == [
        "  time",
        "    0:05, 10,240 steps",
        "  evaluation",
        "    435.4, 95% interval\n    [395.0, 472.6]",
    ]


@pytest.mark.parametrize("width", [20, 39, 40, 59])
def test_the_live_view_fits_and_is_whole(width):
    shows = []
    for size in (width, 200):
        console = Console(file=io.StringIO(), width=size, color_system=None, highlight=False)
        show = LiveDisplay(console, Clock())
        with show.open(started(environment="cartpole", flags={"stop_at_steps": 8_192})):
            show.show_iteration(metrics(1, 2048, 9, loss=0.5, clip_fraction=0.25), [12.5] * 9)
            show.show_evaluation(2_048, record(100.0), True)
            out = io.StringIO()
            Console(file=out, width=size, color_system=None, highlight=False).print(
                show.render_view()
            )
        shows.append(out.getvalue())
    narrow, wide = shows
    assert all(len(line.rstrip()) <= width for line in narrow.splitlines())
    assert "…" not in narrow
    # The bar and the time that is gone are left out; the rest is whole.
    assert f"{0.25:4.0%}" in narrow
    whole = ("".join(text[text.index("progress") :].split()) for text in (narrow, wide))
    assert next(whole) == next(whole)


@pytest.mark.parametrize("columns", WIDTHS)
def test_a_command_stays_in_one_line_on_a_terminal_too(columns):
    console = Console(file=io.StringIO(), width=columns, force_terminal=True, color_system=None)
    command = "rlflame train --config runs/x/config.toml --init-from runs/x/best.safetensors"
    said = [("time", "0:05, 10,240 steps (2,048/s), 100 episodes"), ("to go on", command)]
    console.print(KeyValueTable(said), crop=False)
    lines = console.file.getvalue().splitlines()
    (whole,) = [line for line in lines if command in line]
    assert whole.endswith(command)
    assert all(len(line) <= columns for line in lines if line != whole)


def test_words_and_a_command_begin_where_the_others_do():
    console = Console(file=io.StringIO(), width=80, color_system=None)
    console.print(
        KeyValueTable([("a", "one"), ("b", "rlflame two"), ("a longer word", "3")]), crop=False
    )
    lines = console.file.getvalue().splitlines()
    assert [line.index(word) for line, word in zip(lines, ("one", "rlf", "3"), strict=True)] == [
        17,
        17,
        17,
    ]
