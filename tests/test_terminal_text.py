"""Lines on terminals of few columns, wrapped at words."""

from __future__ import annotations

import pytest
from screens import Clock, make_metrics, make_record, make_result, make_start

from rlflame.console import output
from rlflame.console.plain import PlainDisplay
from rlflame.terminal_text import format_count, format_duration, format_return

WIDTHS = (20, 30, 40, 60)
#: Words that must not be broken: the name of a setting, and a command to copy.
LONG = ("(learning.rollout.num_slots)", "rlflame eval runs/x/best.safetensors")


def print_run(capfd) -> list[str]:
    clock = Clock()
    display = PlainDisplay(clock)
    with display.open(make_start(environment="cartpole", flags={"stop_at_steps": 4_096})):
        for iteration in (1, 2):
            clock.now += 2.0
            metrics = make_metrics(iteration, 2048 * iteration, 9 * iteration)
            display.show_iteration(metrics, [12.5] * 9)
        display.show_evaluation(4_096, make_record(100.0), True)
    display.show_result(make_result(4_096, 18))
    return capfd.readouterr().out.splitlines()


@pytest.fixture
def columns(request, monkeypatch):
    monkeypatch.setattr(output, "find_terminal_columns", lambda: request.param)
    return request.param


@pytest.mark.parametrize("columns", WIDTHS, indirect=True)
def test_lines_fit_and_have_the_words_of_a_log(columns, monkeypatch, capfd):
    narrow = print_run(capfd)
    long = [line for line in narrow if len(line) > columns]
    assert [line for line in long if not any(word in line for word in LONG)] == []
    monkeypatch.setattr(output, "find_terminal_columns", lambda: None)
    assert " ".join(narrow).split() == " ".join(print_run(capfd)).split()


@pytest.mark.parametrize("columns", WIDTHS, indirect=True)
def test_a_command_stays_in_one_line(columns):
    lines = output.format_pairs([("next", "rlflame eval runs/a/best.safetensors --episodes 100")])
    assert [line.strip() for line in lines][-1].endswith(
        "rlflame eval runs/a/best.safetensors --episodes 100"
    )


def test_words_stand_beside_where_there_is_room_and_above_where_there_is_none():
    said = [("time", "0:05, 10,240 steps"), ("evaluation", "435.4, 95% interval [395.0, 472.6]")]
    assert output.format_pairs(said, 44) == [
        "  time        0:05, 10,240 steps",
        "  evaluation  435.4, 95% interval [395.0,\n              472.6]",
    ]
    assert output.format_pairs(said, 24) == [
        "  time",
        "    0:05, 10,240 steps",
        "  evaluation",
        "    435.4, 95% interval\n    [395.0, 472.6]",
    ]


def test_a_table_that_is_too_wide_loses_its_last_columns():
    rows = [("seed", "state", "steps"), ("0", "running", "1,000")]
    assert output.format_table(rows) == ["seed  state    steps", "0     running  1,000"]
    assert output.format_table(rows, 20) == output.format_table(rows)
    assert output.format_table(rows, 19) == ["seed  state", "0     running"]


def test_numbers_in_words():
    counts = [format_count(number, "step") for number in (0, 1, 2000)]
    assert counts == ["0 steps", "1 step", "2,000 steps"]
    durations = [format_duration(seconds) for seconds in (0.4, 59.6, 754, 11_045)]
    assert durations == ["0:00", "1:00", "12:34", "3:04:05"]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0.0"),
        (0.0612, "0.0612"),
        (0.3, "0.3"),
        (-1.0, "-1.0"),
        (9.396, "9.4"),
        (9.87, "9.87"),
        (9.996, "10.0"),
        (21.04, "21.0"),
        (12345.678, "12,345.7"),
    ],
)
def test_small_returns_have_three_digits(value, text):
    assert format_return(value) == text
    assert format_return(value, "+") == (text if value < 0 else f"+{text}")
