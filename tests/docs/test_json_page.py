"""The keys that docs/reference/json.md lists are the keys of the real output."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from commands import TINY, rlflame
from drawing import begun, policy_file

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "reference" / "json.md").read_text("utf-8")
#: Words in backticks that are values and not keys.
VALUES = {"null", "true", "false"}


def read_section(heading: str) -> str:
    """The text below a heading, up to the next heading."""
    (text,) = re.findall(rf"^#+ {re.escape(heading)}\n(.*?)(?=^#|\Z)", PAGE, re.M | re.S)
    return str(text)


def read_rows(heading: str) -> dict[str, str]:
    """The second cell of each row of the tables below a heading, by the first cell."""
    lines = [line for line in read_section(heading).splitlines() if line.startswith("| `")]
    cells = [re.split(r"(?<!\\) \| ", line.strip("| "), maxsplit=1) for line in lines]
    return dict(cells)


def find_keys(*texts: str, values: Iterable[str] = ()) -> set[str]:
    """The words in backticks that can be keys, without the words that are values."""
    words = {word for text in texts for word in re.findall(r"`([a-z]\w*)`", text)}
    return words - VALUES - set(values)


def list_row_keys(heading: str) -> set[str]:
    """The keys in the first column below a heading."""
    return find_keys(*read_rows(heading))


def get_row(heading: str, key: str) -> str:
    (text,) = (second for first, second in read_rows(heading).items() if f"`{key}`" in first)
    return text


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("json")


@pytest.fixture(scope="module")
def events(folder):
    """The events of a run that was trained and resumed."""
    words = ("--steps", "128", "--horizon", "256", "--out", folder / "run", "--json")
    trained = rlflame("train", *TINY, *words)
    assert trained.code == 0, trained.err
    return trained.events() + rlflame("resume", folder / "run", "--steps", "256", "--json").events()


@pytest.fixture(scope="module")
def evaluation(events, folder):
    words = ("--vs", folder / "run", "--episodes", "3", "--min-return", "0", "--fleet", "inline")
    return rlflame("eval", folder / "run", *words, "--json").json()


def list_record_keys(evaluation: dict[str, Any]) -> set[str]:
    others = {"policy", "environment", "algorithm", "steps"}
    return evaluation.keys() - others - {"passed", "checks", "versus", "difference"}


def test_the_events_of_a_run(events, evaluation):
    rows = read_rows("`train --json`, `resume --json`")
    record = list_record_keys(evaluation)
    additions = {
        "start": list_row_keys("Keys of the recipe"),
        "evaluation": record,
    }
    values = {"start": {"auto", "note"}, "end": set(), "evaluation": set(), "checkpoint": set()}
    for kind in values:
        real = [event for event in events if event["event"] == kind]
        assert real, kind
        listed = find_keys(rows[f"`{kind}`"], values=values[kind]) | additions.get(kind, set())
        for event in real:
            assert event.keys() - {"event"} == listed, kind
    (iteration, *_) = (event for event in events if event["event"] == "iteration")
    assert list_row_keys("Metrics of every run") >= {"steps", "iteration"}
    names = find_keys(*list(read_rows("Metrics of every run")))
    assert {name for name in names if not name.startswith("eval_")} <= iteration.keys()
    assert {event["event"] for event in events} <= find_keys(*rows)


def test_an_error(tmp_path):
    document = rlflame("eval", tmp_path / "absent", "--json").json()
    row = get_row("`train --json`, `resume --json`", "error")
    assert document.keys() - {"event", "detail"} == find_keys(row)


def test_a_dry_run():
    shown = rlflame("train", *TINY, "--steps", "64", "--dry-run", "--seeds", "0-1", "--json").json()
    section = read_section("Keys of the recipe").rpartition("`train --dry-run --json` prints")[2]
    assert shown.keys() == list_row_keys("Keys of the recipe") | find_keys(section)


def test_a_sweep(folder):
    words = ("--steps", "64", "--seeds", "0-1", "--out", folder / "sweep", "--json")
    document = rlflame("train", *TINY, *words).json()
    assert document.keys() == list_row_keys("Sweeps")
    final = find_keys(get_row("Sweeps", "final"), values={"value", "low", "high"})
    assert document["final"].keys() == final
    assert document["final"]["iqm"].keys() == {"value", "low", "high"}
    states = {"finished", "stopped", "failed", "waiting"}
    listed = find_keys(read_rows("Sweeps")["`seeds`"], values=states)
    assert all(seed.keys() == listed for seed in document["seeds"])


def test_an_evaluation(evaluation):
    heading = "`eval --json`"
    assert evaluation.keys() == list_row_keys(heading)
    (check,) = evaluation["checks"]
    assert check.keys() == find_keys(get_row(heading, "checks"))
    assert evaluation["versus"].keys() == {"policy", *list_record_keys(evaluation)}
    assert evaluation["difference"].keys() == find_keys(get_row(heading, "difference"))


def test_a_rendering(folder):
    file = policy_file(folder / "policy.safetensors", begun())
    document = rlflame("render", file, "-o", folder / "x.png", "--json").json()
    real = document.keys() | document["episodes"][0].keys()
    assert real == find_keys(read_section("`render --json`"))


def test_a_report(events, folder):
    heading = "`report --json`"
    document = rlflame("report", folder / "run", "--vs", folder / "run", "--json").json()
    assert document.keys() == list_row_keys(heading)
    run = document["runs"][0]
    assert run.keys() == find_keys(get_row(heading, "runs"), values={"machines", "clusters"})
    (group, *_) = document["groups"]
    parts = {"iqm", "mean", "std", "worst", "steps"}
    assert find_keys(get_row(heading, "groups"), values=parts) <= group.keys()


def test_files_runs_environments_and_settings(events, folder):
    rows = read_rows("`inspect`, `runs`, `envs` and `config`")
    document = rlflame("inspect", folder / "run", folder / "run", "--json").json()
    (content, _) = document["files"]
    values = {"checkpoint", "policy", "dtype", "shape"}
    listed = find_keys(rows["`inspect --json`"], values=values)
    assert document.keys() | content.keys() == listed
    entries = rlflame("runs", folder, "--json").json()
    (entry,) = (entry for entry in entries if entry["folder"] == str(folder / "run"))
    states = {"training", "finished", "stopped", "damaged"}
    listed = find_keys(rows["`runs --json`"], values=states)
    assert entry.keys() == listed
    (environment, *_) = rlflame("envs", "--json").json()
    assert environment.keys() == find_keys(rows["`envs --json`"])
    (setting, *_) = rlflame("config", "--env", "hopper", "--json").json()
    assert setting.keys() == find_keys(rows["`config --json`"])


def test_an_export(events, folder):
    words = ("-o", folder / "policy.safetensors", "--json")
    document = rlflame("export", folder / "run", *words).json()
    assert document.keys() == find_keys(read_section("`export --json`"))


def test_a_cluster_check(monkeypatch, tmp_path):
    for name in ("FLAME_ENDPOINT", "FLAME_CACHE_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    document = rlflame("cluster-check", "--json").json()
    section = read_section("`cluster-check --json`")
    verdicts = {"healthy", "degraded", "unreachable"}
    listed = find_keys(section.partition("Each check has")[0], values=verdicts)
    assert document.keys() == listed
    keys = {"check", "status", "seen", "fixes", "notes", "facts"}
    assert all(check.keys() == keys for check in document["checks"])
    assert keys <= list_row_keys("`cluster-check --json`")


def test_the_files_of_a_run(events, folder):
    run = folder / "run"
    lines = [json.loads(line) for line in (run / "timing.jsonl").read_text().splitlines()]
    real = {key for line in lines for key in line} - {"steps", "closing"}
    assert real == list_row_keys("Keys of `timing.jsonl`")
    entries = json.loads((run / "machines.json").read_text())
    row = get_row("Files of a run", "machines.json")
    assert entries[0].keys() == find_keys(row)


TINY_BENCHMARKS = {
    "scaling": ("--compare", "inline", "--episode-ms", "0", "--episodes", "2"),
    "rollouts": ("--fleet", "inline", "--env", "cartpole", "--seconds", "0", "--set", "steps=8"),
    "replay": ("--compare", "inline", "--transitions", "24", "--set", "num_slots=3",
               "--set", "rollout.steps=8"),
    "learners": ("--env", "cartpole", "--learners", "1", "--iterations", "1", *TINY[2:]),
}  # fmt: skip


@pytest.mark.parametrize("name", TINY_BENCHMARKS)
def test_a_benchmark(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    workers = () if name == "learners" else ("--workers", "1")
    words = (*TINY_BENCHMARKS[name], *workers, "--repeat", "1", "--json")
    shown = rlflame("bench", name, *words)
    assert shown.code == 0, shown.err
    document = shown.json()
    rows = read_rows("`bench --json`")
    common = find_keys(*(first for first in rows if first.strip("`") not in TINY_BENCHMARKS))
    assert document.keys() == common | find_keys(rows[f"`{name}`"])
    measured = find_keys(rows["`measurements`"], values={"report"})
    assert all(item.keys() == measured for item in document["measurements"])
    # The lists below the tables describe the objects in these keys.
    items = re.findall(r"^- (`\w+`[^:]*): (.*?)(?=^- |^$)", get_bench_list(name), re.M | re.S)
    assert items
    for title, text in items:
        (key,) = find_keys(title.partition(" (")[0])
        parents = [document, *document.get("fillings", ())]
        entries = [entry for parent in parents for entry in parent.get(key, ())]
        real = set().union(*(list_all_keys(entry, depth=2) for entry in entries))
        # So few tasks give no estimate of the overhead.
        assert find_keys(text, values=WORDS) <= real or (key == "overheads" and not entries), key


#: Names in the descriptions that are not keys of these objects.
WORDS = {"sides", "gymnasium", "mj_step"}


def get_bench_list(name: str) -> str:
    return (
        PAGE.partition(f"\nKeys of `{name}`:\n")[2].partition("\nKeys of `")[0].split("\nTwo ")[0]
    )


def list_all_keys(entry: dict[str, Any], depth: int) -> set[str]:
    """The keys of an object and, up to this depth, of the objects in it."""
    keys = set(entry)
    for value in entry.values() if depth else ():
        for item in value if isinstance(value, list) else [value]:
            keys |= list_all_keys(item, depth - 1) if isinstance(item, dict) else set()
    return keys
