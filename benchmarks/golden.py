"""Check that short training runs are bit-for-bit identical to a table of hashes.

    python benchmarks/golden.py                    compare with tests/golden/bits.json
    python benchmarks/golden.py --write            write the table
    python benchmarks/golden.py --fleet local      compare runs on worker processes
    python benchmarks/golden.py --against COMMIT   compare with another commit on this machine

The script runs rlflame's command line and reads the resulting files without any of rlflame's code.
The hashes do not include the names of arrays, so modules, classes, tensors and metrics can be
renamed. The names on which the script depends are at the top of this file.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import math
import os
import re
import struct
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from golden_cases import ENV_FILE, ENV_FILE_TEXT, FOLDER, OUT, Case, make_cases
from script import ended, positive

ROOT = Path(__file__).resolve().parent.parent
TABLE = ROOT / "tests" / "golden" / "bits.json"

# Names that a restructuring may change. ---------------------------------------------------------

#: The options that select each fleet.
FLEETS = {
    "inline": ("--fleet", "inline"),
    "local": ("--fleet", "local"),
    "flame-stub": ("--fleet", "flame"),
}
#: Files of a run folder.
METRICS, EPISODES, RESULT = "metrics.jsonl", "episodes.csv", "result.json"
LATEST, BEST = "latest.safetensors", "best.safetensors"
CHECKPOINTS, SEGMENTS = "checkpoints/*.safetensors", "replay/*.safetensors"
#: The part of a run to which an array of the latest checkpoint belongs. The first match counts.
PARTS = (
    (r"policy\.normaliser\.", "normaliser"),
    (r"policy\.", "policy"),
    (r"behaviour\.", "acting policy"),
    (r"learner\.experience\.", "replay"),
    (r"learner\.average\.", "policy average"),
    (r"learner\.(normaliser|reward_scaler)", "normaliser"),
    (r"learner\.(\w+_)?adam\.", "optimizer"),
    (r"learner\.", "learner"),
    (r"envs", "environment states"),
)
#: The instructions that OpenBLAS's kernels for a processor need.
REQUIRED_FLAGS = {
    "SkylakeX": {"avx512f", "avx512cd", "avx512bw", "avx512dq", "avx512vl"},
    "Haswell": {"avx2", "fma"},
}
#: The arrays that contain the environment states as one encoded message.
STATES = re.compile(r"envs$")
#: Arrays of this type and shape are digests that include names, so they are not hashed.
DIGEST = ("U8", [32])
#: Metadata of a checkpoint.
PROGRESS, FINGERPRINT = "progress", "fingerprint"
#: The key of the recipe in the printed JSON, and the sections that are hashed.
RECIPE, RECIPE_SECTIONS = (
    "config",
    ("stop_at_steps", "stop_at_iterations", "learning", "evaluation"),
)
#: Fields of a fingerprint that do not affect the results.
HARMLESS = {"python", "device"}

# ------------------------------------------------------------------------------------------------

#: The number of hexadecimal digits of a SHA-256 that are kept.
DIGITS = 16
#: The sorted hashes of each part of a case.
Bits = dict[str, list[str]]
TIMEOUT_S = 600.0


@dataclass
class Table:
    """The hashes of all cases, and the fingerprint of the machine that made them."""

    fingerprint: dict[str, str] = field(default_factory=dict)
    runs: dict[str, Bits] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> Table:
        data = json.loads(path.read_text("utf-8"))
        runs = {
            name: {part: hashes.split() for part, hashes in parts.items()}
            for name, parts in data["runs"].items()
        }
        return cls(data["fingerprint"], runs)

    def write(self, path: Path) -> None:
        """Write JSON with one line for each part, so that a diff is easy to read."""
        runs = {
            name: {part: " ".join(hashes) for part, hashes in sorted(parts.items())}
            for name, parts in sorted(self.runs.items())
        }
        data = {"fingerprint": dict(sorted(self.fingerprint.items())), "runs": runs}
        path.write_text(json.dumps(data, indent=1) + "\n", "utf-8")


# Reading a run folder ---------------------------------------------------------------------------


def hash_bytes(*parts: bytes | str) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part.encode() if isinstance(part, str) else part)
        digest.update(b"|")
    return digest.hexdigest()[:DIGITS]


def hash_numbers(values: Sequence[float]) -> str:
    """Hash numbers and their count, in any order."""
    texts = sorted(map(repr, map(float, values)))
    return hash_bytes(str(len(texts)), *texts)


def list_numbers(value: Any) -> list[float]:
    """List the numbers in a JSON value. True and false count as 1 and 0."""
    if isinstance(value, bool | int | float):
        return [float(value)]
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        return [number for item in value for number in list_numbers(item)]
    return []


@dataclass(frozen=True)
class TensorFile:
    """A safetensors file: its metadata, and its arrays as (name, type, shape, bytes)."""

    strings: dict[str, str]
    arrays: list[tuple[str, str, list[int], bytes]]


def read_tensors(path: Path) -> TensorFile:
    data = path.read_bytes()
    (length,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8 : 8 + length])
    strings = header.pop("__metadata__", {})
    arrays = []
    for name, entry in header.items():
        begin, end = (8 + length + offset for offset in entry["data_offsets"])
        arrays.append((name, entry["dtype"], entry["shape"], data[begin:end]))
    return TensorFile(strings, arrays)


def hash_array(dtype: str, shape: Sequence[int], data: bytes) -> str:
    return hash_bytes(dtype, repr(list(shape)), data)


def hash_states(message: bytes) -> list[str]:
    """Hash the state of each environment: index, arrays and numbers, without names.

    The message has 6 bytes of magic, 4 of checksum, 8 of header length, a JSON header, and the
    arrays. Each array starts at a multiple of 64 bytes.
    """
    (length,) = struct.unpack_from("<Q", message, 10)
    header = json.loads(message[18 : 18 + length])
    start = -(-(18 + length) // 64) * 64
    arrays = []
    for dtype, shape, offset in header["arrays"]:
        size = int(dtype[2:]) * math.prod(shape)
        arrays.append(hash_array(dtype, shape, message[start + offset : start + offset + size]))

    def hash_state(place: int, state: dict[str, Any]) -> str:
        values = list(state.values())
        indices = [v["$array"] for v in values if isinstance(v, dict) and "$array" in v]
        numbers = list_numbers([v for v in values if not isinstance(v, dict)])
        return hash_bytes(str(place), hash_numbers(numbers), *sorted(arrays[i] for i in indices))

    states = [state["fields"] for slot in header["value"] for state in slot]
    return [hash_state(place, state) for place, state in enumerate(states)]


def find_part(name: str) -> str:
    return next((part for pattern, part in PARTS if re.match(pattern, name)), "other arrays")


def read_run(folder: Path) -> Bits:
    """The hashes of one run folder, by part."""
    bits: dict[str, list[str]] = {}

    def add(part: str, *hashes: str) -> None:
        bits.setdefault(part, []).extend(hashes)

    def add_array(part: str, dtype: str, shape: list[int], data: bytes) -> None:
        if (dtype, shape) != DIGEST:
            add(part, hash_array(dtype, shape, data))

    latest = read_tensors(folder / LATEST)
    for name, dtype, shape, data in latest.arrays:
        if STATES.match(name):
            add(find_part(name), *hash_states(data))
        else:
            add_array(find_part(name), dtype, shape, data)
    add("progress", hash_numbers(list_numbers(json.loads(latest.strings[PROGRESS]))))
    for path in sorted(folder.glob(SEGMENTS)):
        for _, dtype, shape, data in read_tensors(path).arrays:
            add_array("replay", dtype, shape, data)
    first = min(folder.glob(CHECKPOINTS))
    for part, path in (("first policy", first), ("best policy", folder / BEST)):
        for name, dtype, shape, data in read_tensors(path).arrays:
            if find_part(name) in ("policy", "normaliser") and name.startswith("policy."):
                add_array(part, dtype, shape, data)
    for line in (folder / METRICS).read_text("utf-8").splitlines():
        add("metrics", hash_numbers(list_numbers(json.loads(line))))
    _, _, rows = (folder / EPISODES).read_bytes().partition(b"\n")
    add("episodes", hash_bytes(rows))
    result = json.loads((folder / RESULT).read_text("utf-8"))
    add("evaluation", hash_numbers(list_numbers(result)))
    return {part: sorted(hashes) for part, hashes in bits.items()}


def read_case(folder: Path) -> tuple[Bits, dict[str, str]]:
    """Return the hashes of the run folders of a case, and the machine's fingerprint."""
    merged: Bits = {}
    fingerprint: dict[str, str] = {}
    runs = sorted(path.parent for path in folder.rglob(METRICS))
    for index, run in enumerate(runs):
        name = f"{index + 1}: " if len(runs) > 1 else ""
        merged |= {f"{name}{part}": hashes for part, hashes in read_run(run).items()}
        fingerprint |= json.loads(read_tensors(run / LATEST).strings[FINGERPRINT])
    return merged, fingerprint


# Running the cases ------------------------------------------------------------------------------


class CaseFailed(Exception):
    """A command failed."""


@dataclass(frozen=True)
class Runner:
    """Runs cases from one source tree on one fleet."""

    source: Path
    fleet: str = "inline"
    workers: int | None = None
    variables: Mapping[str, str] = field(default_factory=dict)

    def run(self, case: Case, folder: Path) -> tuple[Bits, dict[str, str]]:
        """Run a case in a new folder and return its hashes and its fingerprint."""
        folder.mkdir(parents=True)
        env_file = folder / "golden_env.py"
        env_file.write_text(ENV_FILE_TEXT)
        places = {OUT: str(folder / "run"), ENV_FILE: str(env_file), FOLDER: str(folder)}
        options = list(FLEETS[self.fleet])
        if self.workers is not None and self.fleet != "inline":
            options += ["--workers", str(self.workers)]
        for command in case.commands:
            words = [_replace(word, places) for word in command]
            self._call([*words, *options, "--quiet"], folder)
        bits, fingerprint = read_case(folder)
        if case.recipe:
            recipe = json.loads(self._call(case.recipe, folder))[RECIPE]
            sections = [recipe.get(name) for name in RECIPE_SECTIONS]
            bits["recipe"] = [hash_numbers(list_numbers(sections))]
        return bits, fingerprint

    def _call(self, words: Sequence[str], folder: Path) -> str:
        flame = {name for name in os.environ if name.startswith("FLAME_")}
        environment = {name: text for name, text in os.environ.items() if name not in flame}
        environment |= {"PYTHONPATH": str(self.source), "HOME": str(folder), **self.variables}
        result = subprocess.run(
            [sys.executable, "-m", "rlflame", *words],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        if result.returncode:
            shown = " ".join(words)
            raise CaseFailed(f"rlflame {shown}\nended with {result.returncode}: {result.stderr}")
        return result.stdout


def _replace(word: str, places: Mapping[str, str]) -> str:
    for name, text in places.items():
        word = word.replace(name, text)
    return word


#: Serves a Flame stub until the standard input closes.
STUB = """
import json, sys
sys.path.insert(0, sys.argv[1])
from flame_stub import FlameStub
with FlameStub(executors=int(sys.argv[2])) as stub:
    print(json.dumps(stub.environment()), flush=True)
    sys.stdin.read()
"""


@contextlib.contextmanager
def start_stub(executors: int) -> Iterator[dict[str, str]]:
    """Start a Flame stub process, and yield the environment variables that select it."""
    command = [sys.executable, "-c", STUB, str(ROOT / "tests"), str(executors)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        yield json.loads(process.stdout.readline())
    finally:
        process.stdin.close()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextlib.contextmanager
def make_runner(fleet: str, workers: int | None, jobs: int, source: Path) -> Iterator[Runner]:
    """Yield a runner and, if necessary, keep a Flame stub running for it."""
    if fleet != "flame-stub":
        yield Runner(source, fleet, workers)
        return
    with start_stub(jobs * (workers or 1)) as variables:
        yield Runner(source, fleet, workers or 1, variables)


def run_cases(
    runner: Runner,
    names: Sequence[str],
    *,
    jobs: int = 1,
    keep: Path | None = None,
    report: Callable[[str], None] = lambda text: None,
) -> Table:
    """Run the cases and return their table. Raise CaseFailed after the last case."""
    cases, table = make_cases(), Table()
    failures: list[str] = []
    with tempfile.TemporaryDirectory(prefix="golden-") as temporary:
        root = keep or Path(temporary)

        def run(name: str) -> None:
            try:
                table.runs[name], fingerprint = runner.run(cases[name], root / name)
                table.fingerprint |= fingerprint
                report(f"{name} ({sum(map(len, table.runs[name].values()))} hashes)")
            except (CaseFailed, OSError, KeyError, ValueError, subprocess.SubprocessError) as error:
                failures.append(f"{name}: {type(error).__name__}: {error}")
                report(failures[-1])

        with ThreadPoolExecutor(jobs) as pool:
            list(pool.map(run, names))
    if failures:
        raise CaseFailed("\n".join(failures))
    return table


# Comparing --------------------------------------------------------------------------------------


def use_core(expected: Table) -> None:
    """Let OpenBLAS use the kernels of the table's processor, if this one supports them.

    OpenBLAS may choose other kernels for a newer processor with the same instructions.
    """
    cpu_facts = Path("/proc/cpuinfo")
    flags = set(cpu_facts.read_text().split()) if cpu_facts.exists() else set()
    core = expected.fingerprint.get("core", "")
    if REQUIRED_FLAGS.get(core, {""}) <= flags:
        os.environ.setdefault("OPENBLAS_CORETYPE", core)


def list_machine_differences(expected: Table, actual: Table) -> list[str]:
    """List the differences between two machines that may change results."""
    before, now = expected.fingerprint, actual.fingerprint
    names = sorted((before.keys() & now.keys()) - HARMLESS)
    return [f"{n}: {before[n]} -> {now[n]}" for n in names if before[n] != now[n]]


def merge_parts(bits: Bits) -> Bits:
    """Merge all hashes of a case into one part, to compare cases with renamed parts."""
    return {"all parts": sorted(h for hashes in bits.values() for h in hashes)}


def compare(expected: Table, actual: Table, *, merged: bool = False) -> list[tuple[str, str, str]]:
    """List the differences of the cases in `actual` as (case, part, description)."""
    differences = []
    for name in sorted(actual.runs):
        if name not in expected.runs:
            differences.append((name, "-", "not in the table"))
            continue
        before, now = expected.runs[name], actual.runs[name]
        if merged:
            before, now = merge_parts(before), merge_parts(now)
        for part in sorted(before.keys() | now.keys()):
            old, new = Counter(before.get(part, [])), Counter(now.get(part, []))
            if old != new:
                lost, added = (old - new).total(), (new - old).total()
                text = f"{lost} of {old.total()} lost, {added} of {new.total()} new"
                differences.append((name, part, text))
    return differences


def print_differences(differences: Sequence[tuple[str, str, str]]) -> None:
    widths = [max(len(row[i]) for row in differences) for i in (0, 1)]
    for name, part, text in differences:
        print(f"{name:{widths[0]}}  {part:{widths[1]}}  {text}")


def make_table_of_commit(commit: str, arguments: Sequence[str]) -> Table:
    """Make the table of another commit, with the script of that commit if it has one."""
    with tempfile.TemporaryDirectory(prefix="golden-commit-") as temporary:
        folder = Path(temporary)
        command = ["git", "-C", str(ROOT), "archive", commit, "src", "tests", "benchmarks"]
        archive = subprocess.run(command, stdout=subprocess.PIPE, check=False)
        if archive.returncode:
            raise SystemExit(2)  # git has printed the error
        (folder / "tree.tar").write_bytes(archive.stdout)
        with tarfile.open(folder / "tree.tar") as packed:
            packed.extractall(folder / "tree", filter="data")
        script = folder / "tree" / "benchmarks" / Path(__file__).name
        if not script.exists():
            script = Path(__file__).resolve()
        table = folder / "bits.json"
        options = ["--write", "--table", str(table), "--source", str(folder / "tree" / "src")]
        made = subprocess.run([sys.executable, str(script), *options, *arguments], check=False)
        if made.returncode:
            raise SystemExit(made.returncode)
        return Table.read(table)


def main() -> int:
    lines = (__doc__ or "").splitlines()
    parser = argparse.ArgumentParser(
        description="\n".join(lines), formatter_class=argparse.RawDescriptionHelpFormatter
    )
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--check", action="store_true", help="compare with the table (default)")
    action.add_argument("--write", action="store_true", help="write the table")
    action.add_argument("--list", action="store_true", help="list the cases")
    action.add_argument("--against", metavar="COMMIT", help="compare with another commit")
    parser.add_argument("--only", action="append", metavar="TEXT", default=[],
                        help="run the cases whose name begins with TEXT; repeatable")  # fmt: skip
    parser.add_argument("--fleet", choices=list(FLEETS), default="inline")
    parser.add_argument("--workers", type=positive, metavar="N", help="number of workers")
    parser.add_argument(
        "--jobs", type=positive, metavar="N", default=1, help="number of cases that run in parallel"
    )
    parser.add_argument("--merged", action="store_true", help="compare all parts of a case as one")
    parser.add_argument("--table", type=Path, default=TABLE, metavar="FILE")
    parser.add_argument("--source", type=lambda text: Path(text).resolve(), default=ROOT / "src",
                        metavar="DIR", help="the source tree to run")  # fmt: skip
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep the run folders in DIR")
    options = parser.parse_args()

    names = [n for n in make_cases() if not options.only or n.startswith(tuple(options.only))]
    if options.list:
        print("\n".join(names))
        return 0
    if not names:
        parser.error(f"no case begins with {' or '.join(options.only)}")
    expected = Table()
    if options.against:
        shared = ["--fleet", options.fleet, "--jobs", str(options.jobs)]
        shared += ["--workers", str(options.workers)] if options.workers else []
        shared += [word for text in options.only for word in ("--only", text)]
        expected = make_table_of_commit(options.against, shared)
    elif not options.write:
        expected = Table.read(options.table)

    def report(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    try:
        with make_runner(options.fleet, options.workers, options.jobs, options.source) as runner:
            if not (options.write or options.against):
                use_core(expected)
                machine = list_machine_differences(expected, run_cases(runner, names[:1]))
                if machine:
                    print(
                        "The table was made on another kind of machine, so results may differ:\n  "
                        + "\n  ".join(machine)
                        + "\n  hint: python benchmarks/golden.py --against COMMIT"
                    )
                    return 1
            actual = run_cases(runner, names, jobs=options.jobs, keep=options.keep, report=report)
    except CaseFailed as error:
        print(error)
        return 1
    if options.write:
        if options.only and options.table.exists():  # keep the other cases in the table
            table = Table.read(options.table)
            actual = Table(table.fingerprint | actual.fingerprint, table.runs | actual.runs)
        actual.write(options.table)
        print(f"{len(actual.runs)} cases written to {options.table}.")
        return 0
    differences = compare(expected, actual, merged=options.merged)
    if differences:
        print_differences(differences)
    print(f"{len(names)} cases on {options.fleet}: {len(differences)} differences.")
    return 1 if differences else 0


if __name__ == "__main__":
    ended(main)
