"""Reports, plots and lists of damaged runs end with a sentence or show a dash."""

from __future__ import annotations

import contextlib
import itertools
import json
import pickle
import re
import shlex
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import damage
import pytest
from commands import TINY, rlflame

from rlflame import api, statistics
from rlflame.analysis import curves
from rlflame.analysis.plots import matplotlib_backend, terminal_backend
from rlflame.analysis.plots.speedup import make_speedup_chart
from rlflame.analysis.report import build, document
from rlflame.config.runtime import RuntimeSettings
from rlflame.console.output import as_json_text
from rlflame.errors import RlflameError
from rlflame.experiment import listings
from rlflame.storage import run_reader

#: Each file has some hundred damaged variants, of which the tests try every STRIDE-th. `python
#: tests/storage/test_run_reader_damage.py` tries all of them, which takes an hour.
STRIDE = 41
DAMAGE = {
    "config.toml": damage.of_toml,
    "metrics.jsonl": damage.of_json_lines,
    "timing.jsonl": damage.of_json_lines,
    "episodes.csv": damage.of_table,
    "machines.json": damage.of_json_file,
    "result.json": damage.of_json_file,
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole") / "run"
    spoken = rlflame("train", "--env", "cartpole", *TINY, "--steps", "512", "--out", folder)
    assert spoken.code == 0, spoken.err
    return folder


@pytest.fixture
def quick_reports(monkeypatch):
    """Few resamples, and equal charts are drawn once: most damage changes no chart."""
    draw, drawn = matplotlib_backend.render_svg, {}

    def draw_once(chart):
        content = pickle.dumps(chart)
        if content not in drawn:
            drawn[content] = draw(chart)
        return drawn[content]

    monkeypatch.setattr(matplotlib_backend, "render_svg", draw_once)
    monkeypatch.setattr(statistics, "RESAMPLES", 20)
    monkeypatch.setattr(statistics, "CURVE_RESAMPLES", 20)


def look_at(folder: Path) -> None:
    """Run all code that reads a run. It may raise an RlflameError."""
    for work in (_reported, _drawn, listings.read_run_overview):
        with contextlib.suppress(RlflameError):
            work(folder)


def _reported(folder: Path) -> None:
    found = build.build_report([folder], [], 0.1)
    document.to_markdown(found.document)
    document.to_html(found.document)
    as_json_text(found.facts)


def _drawn(folder: Path) -> None:
    run = run_reader.read_run(folder)
    wanted = [(axis, curves.EVALUATION) for axis in curves.AXES]
    for axis, metric in [*wanted, (None, None), (None, curves.EPISODE_RETURN)]:
        try:
            chart = curves.make_chart([run], axis, metric)
        except RlflameError:
            continue
        terminal_backend.render_text(chart, 60)


def damaged(whole: Path, name: str, stride: int, folder: Path) -> None:
    shutil.copytree(whole, folder)
    tried(DAMAGE[name]((whole / name).read_bytes()), folder / name, stride, look_at, folder)


def tried(
    damages: Iterator[tuple[str, bytes]],
    file: Path,
    stride: int,
    work: Callable[..., object],
    *given: Any,
) -> None:
    """Call `work` for each damaged variant of a file. It may raise an RlflameError."""
    for what, data in itertools.islice(damages, 0, None, stride):
        file.write_bytes(data)
        try:
            with warnings.catch_warnings(), contextlib.suppress(RlflameError):
                warnings.simplefilter("error")  # warnings of numpy would reach the user's terminal
                work(*given)
        except Exception as error:
            said = f"{file.name} with {what}: {type(error).__name__}: {error}"
            raise AssertionError(said) from error


@pytest.mark.usefixtures("quick_reports")
@pytest.mark.parametrize("name", DAMAGE)
def test_damage_ends_in_a_sentence_or_a_dash(name, whole, tmp_path):
    damaged(whole, name, STRIDE, tmp_path / "run")


@pytest.mark.parametrize("name", ["result.json", "machines.json"])
def test_a_finished_run_with_damage_beside_its_checkpoints_goes_on(name, whole, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)

    def go_on() -> None:
        assert api.resume(folder, RuntimeSettings(fleet="inline")).complete

    text = (whole / name).read_bytes()
    tried(DAMAGE[name](text), folder / name, 4 * STRIDE, go_on)


@pytest.mark.usefixtures("quick_reports")
def test_damaged_results_of_a_benchmark_end_in_a_sentence(tmp_path):
    whole, file = tmp_path / "whole.json", tmp_path / "damaged.json"
    one = {"name": "start", "unit": "s", "better": "lower", "values": [1.0, 2.0, 3.0]}
    whole.write_text(json.dumps({"measurements": [one]}))

    def compare() -> None:
        for sides in (([file], [whole]), ([whole], [file]), ([file], [])):
            with contextlib.suppress(RlflameError):
                found = build.build_report(*sides, 0.1)
                document.to_markdown(found.document)
                as_json_text(found.facts)

    tried(damage.of_json_file(whole.read_bytes()), file, 3, compare)


def test_a_damaged_table_of_run_times_ends_in_a_sentence(tmp_path):
    file = tmp_path / "scaling.csv"
    text = b"workers,backend,seconds,steps,case\n1,local,3.5,100,a\n2,flame,2.5,100,a\n"
    tried(
        damage.of_table(text),
        file,
        1,
        lambda: terminal_backend.render_text(make_speedup_chart(file), 60),
    )


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("machines.json", '[{"machine": {"memory_bytes": "x", "packages": [1]}, "workers": 3}]'),
        ("machines.json", '[{"machine": [], "workers": [{"host": {}, "number": "x"}]}, 3, null]'),
        ("machines.json", "[" * 100_000),
        ("timing.jsonl", '{"steps": 1e400, "wall_s": "x"}\n{"steps": 3, "wall_s": 1e999}\n\x00\n'),
        ("config.toml", "x = 1" + "0" * 5_000),
        ("metrics.jsonl", '{"steps": ' + "9" * 400 + "}\n"),
        ("metrics.jsonl", '{"steps": 3, "eval_return_mean": {"x": []}}\n'),
        ("episodes.csv", "r,l\n" + "9" * 400 + ",nan\n\x00,\x00\n"),
    ],
)
def test_no_command_calls_damage_a_bug(name, text, whole, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    (folder / name).write_text(text)
    commands = (
        ("report", folder),
        ("report", folder, "--json"),
        ("plot", folder, "-o", "-"),
        ("plot", folder, "--metric", "episode_return", "-o", "-"),
        ("plot", folder, "-x", "wall", "-o", "-"),
        ("runs", folder),
    )
    for words in commands:
        spoken = rlflame(*words)
        said = spoken.out + spoken.err
        assert spoken.code in (0, 1, 2), said
        assert "bug" not in said
        assert "Traceback" not in said
        if name == "machines.json":
            assert spoken.code == 0, said


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("size", [1e308, -1e308, 1e200])
@pytest.mark.parametrize("name", ["metrics.jsonl", "episodes.csv", "result.json"])
def test_returns_beyond_what_can_be_averaged_end_in_no_fault(name, size, whole, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    path = folder / name
    if name == "metrics.jsonl":
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        large = [{k: size if "return" in k and v else v for k, v in x.items()} for x in lines]
        path.write_text("".join(json.dumps(line) + "\n" for line in large))
    elif name == "result.json":
        found = json.loads(path.read_text())
        found["evaluation"] |= dict.fromkeys(("mean", "low", "high"), size)
        path.write_text(json.dumps(found))
    else:
        head, *rows = path.read_text().splitlines()
        rows = [f"{size!r},{row.partition(',')[2]}" for row in rows]
        path.write_text("\n".join([head, *rows]) + "\n")
    for words in (
        ("report", folder),
        ("report", folder, "--json"),
        ("plot", folder, "-o", "-"),
        ("plot", folder, "--metric", "episode_return", "-o", "-"),
    ):
        spoken = rlflame(*words)
        said = spoken.out + spoken.err
        assert spoken.code in (0, 1), said
        assert "Warning" not in said
        assert "bug" not in said
        assert f"{size:g}" not in spoken.out
        assert ("result.json" in spoken.err) == (name == "result.json")


@pytest.mark.filterwarnings("error")
def test_clocks_that_nothing_has_counted_are_unknown(whole, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    lines = [json.loads(line) for line in (folder / "timing.jsonl").read_text().splitlines()]
    large = [{name: 1e308 if name != "steps" else n for name, n in x.items()} for x in lines]
    (folder / "timing.jsonl").write_text("".join(json.dumps(line) + "\n" for line in large))
    assert run_reader.read_run(folder).compute_elapsed_s("wall_s") is None
    assert rlflame("report", folder).code == 0


@pytest.mark.parametrize(
    ("name", "text"),
    [("metrics.jsonl", "rubbish"), ("metrics.jsonl", "[1]"), ("episodes.csv", "rubbish")],
)
def test_what_is_advised_makes_a_damaged_record_anew(name, text, whole, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    lines = (folder / name).read_text().splitlines(keepends=True)
    (folder / name).write_text("".join([*lines[:-1], f"{text}\n"]))
    metric = ("--metric", "episode_return", "-x", "episodes") if name == "episodes.csv" else ()
    spoken = rlflame("plot", folder, "-o", "-", *metric)
    assert (spoken.code, "is damaged" in spoken.err) == (1, True)
    (command,) = re.findall(r"rlflame (resume .*)", spoken.err)
    again = rlflame(*shlex.split(command))
    assert again.code == 0, again.err
    assert (folder / name).read_bytes() == (whole / name).read_bytes()


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as made:
        one = Path(made) / "whole"
        rlflame("train", "--env", "cartpole", *TINY, "--steps", "512", "--out", one)
        statistics.RESAMPLES = statistics.CURVE_RESAMPLES = 20
        for file in sys.argv[1:] or DAMAGE:
            damaged(one, file, 1, Path(made) / file)
            print(file, "is done", flush=True)
