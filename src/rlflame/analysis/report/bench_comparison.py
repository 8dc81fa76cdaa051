"""Results of benchmarks, side by side: medians, and the change in percent (`.json` files).

Must not know: how they were measured.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from rlflame.analysis.report.document import Section, Table
from rlflame.analysis.report.text import NOTHING, number
from rlflame.config import regular_file
from rlflame.config.toml_io import written
from rlflame.errors import CheckpointError, ConfigError
from rlflame.rollout.blas_env import THREAD_VARIABLES
from rlflame.statistics import Interval, Verdict, compare_medians
from rlflame.storage import run_files

#: Of `rlflame bench`'s files, without their ends.
NAMES = ("scaling", "rollouts", "replay", "learners", "dppo", "dsac")
_MATTERS = ("processor", "usable_cores", "blas", "python")
_BEYOND = 1e100
_SMALL = 1e-6


@dataclass(frozen=True, slots=True)
class Measurement:
    """One quantity, measured a number of times."""

    name: str
    unit: str
    higher_is_better: bool
    values: tuple[float, ...]
    #: What was done each time, where that is more than the name says: settings by name.
    work: dict[str, Any] = field(default_factory=dict)
    #: Tasks that went to a second worker, of each value; empty where nothing says it.
    retried: tuple[int, ...] = ()

    @property
    def median(self) -> float:
        return float(np.median(self.values))


@dataclass(frozen=True, slots=True)
class Results:
    """All of one file, and what has to be known to read it."""

    name: str
    found: tuple[Measurement, ...]
    #: What it ran on and with, by name.
    surroundings: dict[str, str]
    #: Sentences that begin with who they are of.
    doubts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Change:
    """Of a quantity, in percent of what it was; improvement is positive whichever way is better."""

    name: str
    unit: str
    medians: tuple[float, float]
    repetitions: tuple[int, int]
    improvement: Interval
    #: The same at 90%, for the two one-sided tests of equivalence.
    equivalence: Interval
    margin: float

    @property
    def verdict(self) -> Verdict:
        return Verdict(self.repetitions, self.improvement, self.equivalence, self.margin)


def read(path: Path) -> Results:
    """`{"measurements": [{"name", "unit", "better": "higher" | "lower", "values"}]}`."""
    try:
        data = run_files.value(regular_file.read_text(path, regular_file.RECORD_BYTES))
        found = [_measurement(entry) for entry in data["measurements"]]
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be read: {error.strerror or error}.", "check its name"
        ) from error
    except (ValueError, KeyError, TypeError, OverflowError) as error:
        raise CheckpointError(
            f"{path} holds no results of a benchmark.",
            'it needs "measurements", each with name, unit, better (higher or lower) and values',
        ) from error
    if not found or len({one.name for one in found}) < len(found):
        raise CheckpointError(f"{path} has no measurements, or one twice.", "check how it was made")
    doubts = []
    if data.get("complete") is False:
        doubts.append(f"{path} was stopped before its end.")
    if data.get("busy") is True:
        doubts.append(f"{path} was measured on a machine that was busy with other work.")
    given = [one.name for one in found if any(one.retried)]
    if given:
        doubts.append(
            f"In {path} tasks were collected again, which takes longer, while this was measured: "
            f"{'; '.join(given)}."
        )
    return Results(str(path), tuple(found), _surroundings(data), tuple(doubts))


def meant(path: Path) -> Path | None:
    """The results of a benchmark that whoever names their folder, or their table, may mean."""
    if path.suffix == ".json" or (path / "config.toml").exists():
        return None
    named = [path / f"{name}.json" for name in NAMES] if path.is_dir() else []
    found = [*named, *([path.with_suffix(".json")] if path.suffix == ".csv" else [])]
    return next((file for file in found if file.is_file()), None)


def _surroundings(data: dict[str, Any]) -> dict[str, str]:
    """What seconds depend on, of what the file says."""
    machine, threads = (_table(data.get(name)) for name in ("machine", "threads"))
    found = {name.replace("_", " "): machine[name] for name in _MATTERS if name in machine}
    found |= _table(machine.get("packages"))
    found |= (
        {name: threads.get(name, "unset") for name in THREAD_VARIABLES} if "threads" in data else {}
    )
    return {name: str(value) for name, value in found.items()}


def _table(found: object) -> dict[str, Any]:
    return found if isinstance(found, dict) else {}


def _measurement(entry: dict[str, object]) -> Measurement:
    values = entry["values"]
    if entry["better"] not in ("higher", "lower") or not isinstance(values, list) or not values:
        raise ValueError("not a measurement")
    if not all(type(value) in (int, float) for value in values):
        raise ValueError("not numbers")
    numbers = tuple(float(value) for value in values)
    if not all(0.0 <= value < _BEYOND for value in numbers):
        raise ValueError("not finite, or of nothing that can be measured")
    higher = entry["better"] == "higher"
    return Measurement(
        str(entry["name"]),
        str(entry.get("unit", "")),
        higher,
        numbers,
        _table(entry.get("work")),
        _counts(entry.get("retried", []), len(numbers)),
    )


def _counts(found: object, times: int) -> tuple[int, ...]:
    """One of each value, or none where nothing says any."""
    if not isinstance(found, list) or len(found) not in (0, times):
        raise ValueError("not a count of each value")
    if not all(run_files.is_count(count) for count in found):
        raise ValueError("not counts")
    return tuple(found)


def changes(
    ours: Sequence[Measurement], theirs: Sequence[Measurement], margin: float
) -> list[Change]:
    """Of what was measured on both sides, from theirs to ours; `margin` is a share."""
    before = {one.name: one for one in theirs}
    both = [(one, before[one.name]) for one in ours if one.name in before]
    if not both:
        raise ConfigError(
            f"Nothing was measured on both sides: {', '.join(one.name for one in ours)}; "
            f"{', '.join(before)}.",
            "compare results of the same benchmark",
        )
    return [_change(one, other, margin) for one, other in both]


def doubts(ours: Results, theirs: Results) -> list[str]:
    """What a comparison has to be read with."""
    said = list(dict.fromkeys((*theirs.doubts, *ours.doubts)))
    before, now = theirs.surroundings, ours.surroundings
    unlike = [
        f"{name} {before.get(name, 'absent')} before, {now.get(name, 'absent')} now"
        for name in {**before, **now}
        if before.get(name) != now.get(name)
    ]
    if before and now and unlike:
        said.append(f"They were not measured alike: {'; '.join(unlike)}.")
    for here, there in ((ours, theirs), (theirs, ours)):
        if not here.surroundings:
            said.append(f"{here.name} does not say what it was measured on.")
        if not all(one.work for one in here.found):
            said.append(f"{here.name} does not say what work it timed: that may be other work.")
        others = {one.name: one.work for one in there.found}
        alone = [one.name for one in here.found if one.name not in others]
        if alone:
            said.append(f"In {here.name} alone: {'; '.join(alone)}.")
        more = {
            f"{setting} ({written(value)})": None
            for one in here.found
            for setting, value in one.work.items()
            if others.get(one.name) and setting not in others[one.name]
        }
        if more:
            said.append(f"{here.name} alone says: {', '.join(more)}; that may be other work.")
    return said


def _change(one: Measurement, other: Measurement, margin: float) -> Change:
    # A setting that one of them had not yet may be as it was; `doubts` says so.
    known = [name for name in other.work if name in one.work]
    unlike = [name for name in known if one.work[name] != other.work[name]]
    if unlike:
        name = unlike[0]
        raise ConfigError(
            f"{one.name} was measured with {name} {written(other.work[name])} before, and with "
            f"{written(one.work[name])} now.",
            "compare results of the same work",
        )
    for before, now in (
        (f"in {other.unit or 'no unit'}", f"in {one.unit or 'no unit'}"),
        (_better(other), _better(one)),
    ):
        if before != now:
            raise ConfigError(
                f"{one.name} was measured {before} before, and {now} now.",
                "compare results of the same benchmark",
            )
    if 0.0 in other.values:
        raise ConfigError(
            f"{one.name} was 0 before, of which there are no percent.", "measure it again"
        )
    sign = 1.0 if one.higher_is_better else -1.0
    ours, theirs = (sign * np.array(side.values, np.float64) for side in (one, other))
    return Change(
        one.name,
        one.unit,
        (one.median, other.median),
        (len(one.values), len(other.values)),
        compare_medians(ours, theirs),
        compare_medians(ours, theirs, 0.90),
        100.0 * margin,
    )


def _better(one: Measurement) -> str:
    return f"with the {'higher' if one.higher_is_better else 'lower'} as the better"


def _short(value: float) -> str:
    """Two places, or as many more as show three digits of what is small."""
    if 0.0 < value < _SMALL:
        return f"{value:.3g}"
    digits = 2 - math.floor(math.log10(value)) if value else 0
    return number(value, max(2, digits))


def listed(results: Results) -> Section:
    rows = tuple(
        (one.name, one.unit, str(len(one.values)), _short(one.median),
         _short(min(one.values)), _short(max(one.values)))
        for one in results.found
    )  # fmt: skip
    head = ("measured", "unit", "times", "median", "least", "most")
    return Section("Benchmark", (Table(head, rows, 2), *results.doubts))


def compared(
    found: Sequence[Change], ours: Results, theirs: Results, doubted: Sequence[str]
) -> Section:
    rows = tuple(
        (
            one.name,
            one.unit,
            _short(one.medians[1]),
            _short(one.medians[0]),
            f"{one.improvement.value:+.1f}%",
            f"[{one.improvement.low:+.1f}%, {one.improvement.high:+.1f}%]"
            if one.verdict.enough
            else NOTHING,
        )
        for one in found
    )
    head = ("measured", "unit", "median before", "median now", "improvement", "95% interval")
    return Section(
        "Benchmark, compared",
        (
            f"Before: {theirs.name}; now: {ours.name}. An improvement is positive whichever way "
            "is better; its interval is a bootstrap over repetitions, from three on.",
            Table(head, rows, 2),
            *doubted,
        ),
    )
