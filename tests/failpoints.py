"""Tiny runs that die, or find the disk full, at a chosen call to the file system.

`python failpoints.py` reads a plan as JSON from standard input, makes an untouched run, then for
each chosen call a run that fails there and is resumed, and prints as JSON what was not equal. Each
attempt is a forked process, because it is to be killed for good. Knows nothing of pytest.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import replays

from rlflame import api
from rlflame.config.recipe import RunConfig
from rlflame.errors import RlflameError
from rlflame.storage import checkpoint
from rlflame.storage.run_folder import load_newest_checkpoint

EQUAL_BYTES = ("metrics.jsonl", "episodes.csv", "result.json")


def config(env: str = "CartPole-v1", out: Path | None = None, **sections: Any) -> RunConfig:
    """A run of three iterations that saves and evaluates after each; sections are merged in."""
    plain: dict[str, Any] = {
        "stop_at_steps": 96,
        "learning": {
            "algorithm": "ppo",
            "environment": {"id": env},
            "rollout": {"num_slots": 2, "envs_per_slot": 2, "steps": 8},
            "network": {"hidden": [8]},
        },
        "evaluation": {
            "every_steps": 32,
            "episodes": 2,
            "final_episodes": 3,
            "max_episode_steps": 20,
        },
        "runtime": {
            "fleet": "inline",
            "out": None if out is None else str(out),
            "checkpoint_every_steps": 32,
            "keep_checkpoints": 2,
        },
    }
    algorithm = sections.get("learning", {}).get("algorithm", "ppo")
    if algorithm == "ppo":
        plain["learning"]["ppo"] = {"epochs": 2, "minibatch_size": 16}
    elif algorithm == "sac":
        plain["learning"]["sac"] = {
            "learning_starts": 40,
            "batch_size": 8,
            "buffer_size": 100,
            "updates_per_step": 0.2,
        }
    else:
        plain["learning"]["rollout"]["unit"] = "episodes"
    return RunConfig.model_validate(merged(plain, sections))


def merged(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    result = dict(below)
    for key, value in above.items():
        inner = result.get(key)
        both = isinstance(value, dict) and isinstance(inner, dict)
        result[key] = merged(inner, value) if both else value
    return result


def begin_or_resume(wanted: RunConfig) -> None:
    """What a user would type next: the one place that knows how runs are started and resumed."""
    folder = Path(str(wanted.runtime.out))
    if (folder / "latest.safetensors").exists() or list(folder.glob("checkpoints/step-*")):
        api.resume(folder, wanted.runtime)
        return
    shutil.rmtree(folder, ignore_errors=True)
    api.train(wanted)


class Disk:
    """Counts the calls that change a folder, and at one of them dies or fails from then on.

    A killed process loses nothing that it had written, so `fsync` is only counted. With `power`,
    whatever was written but not flushed to disk by then is lost too.
    """

    def __init__(
        self, folder: Path, at: int | None = None, error: int | None = None, power: bool = False
    ) -> None:
        self.calls: list[str] = []
        self.files: dict[int, _Counted] = {}
        self.loose: list[tuple[int, int]] = []
        self._folder = str(folder)
        self._at = at
        self._error = error
        self._power = power

    def reached(self, kind: str, path: Any, torn: Callable[[], object] = lambda: None) -> None:
        """One call; `torn` is what a death in its middle leaves behind."""
        name = Path(os.fsdecode(path)).name if isinstance(path, str | os.PathLike) else "folder"
        name = re.sub(r"^\.(.+?)(\.[0-9a-f]{8})?\.tmp$", r"\1 (temporary)", name)
        name = re.sub(r"(step|segment)-[0-9]+(-[0-9a-f]{16})?", r"\1", name)
        self.calls.append(f"{kind} {name}")
        if self._at is None or len(self.calls) <= self._at:
            return
        if self._error is None:
            torn()
            if self._power:
                for descriptor, size in [
                    *self.loose,
                    *((f, c.safe) for f, c in self.files.items()),
                ]:
                    os.ftruncate(descriptor, size)
            os.kill(os.getpid(), signal.SIGKILL)
        if len(self.calls) == self._at + 1:
            torn()
        # A full disk stays full, but still lets files be removed.
        if kind != "unlink":
            raise OSError(self._error, os.strerror(self._error), os.fspath(self._folder))

    @contextlib.contextmanager
    def installed(self) -> Iterator[Disk]:
        """In force for this process: Python's `open` and the calls of `os` that change folders.

        A file that `os.open` opens to append to is one too, once Python's `open` has it.
        """
        saved = {
            name: getattr(os, name) for name in ("fsync", "replace", "link", "unlink", "mkdir")
        }
        real_open, real_descriptor = io.open, os.open
        appended: dict[int, str] = {}

        def counted(name: str) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                if name == "fsync":
                    file = self.files.get(args[0])
                    self.reached(name, file and file.path)
                    return file and file.flushed()
                if os.fspath(args[0]).startswith(self._folder):
                    self.reached(name, args[-1])
                return saved[name](*args, **kwargs)

            return call

        def opened_descriptor(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
            ours = isinstance(path, str | os.PathLike) and os.fspath(path).startswith(self._folder)
            ours = ours and bool(flags & os.O_APPEND)
            if ours:
                self.reached("open", path)
            descriptor = real_descriptor(path, flags, *args, **kwargs)
            appended.pop(descriptor, None)
            if ours:
                appended[descriptor] = os.fspath(path)
            return descriptor

        def opened(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
            known = appended.pop(file, None) if isinstance(file, int) else None
            ours = isinstance(file, str | os.PathLike) and os.fspath(file).startswith(self._folder)
            if known is None:
                if not ours or not set(mode) & set("wax+"):
                    return real_open(file, mode, *args, **kwargs)
                self.reached("open", file)
            raw = _Counted(file, mode.replace("b", ""), self, known or file)
            buffered = io.BufferedWriter(raw)
            if "b" in mode:
                return buffered
            return io.TextIOWrapper(buffered, kwargs.get("encoding"), newline=kwargs.get("newline"))

        import builtins

        builtins.open = io.open = opened  # type: ignore[assignment]
        os.open = opened_descriptor  # type: ignore[assignment]
        for name in saved:
            setattr(os, name, counted(name))
        try:
            yield self
        finally:
            builtins.open = io.open = real_open  # type: ignore[assignment]
            os.open = real_descriptor
            for name, function in saved.items():
                setattr(os, name, function)


class _Counted(io.FileIO):
    """An open file whose writes are calls that can fail, and are safe only once flushed."""

    def __init__(self, file: Any, mode: str, disk: Disk, path: Any) -> None:
        super().__init__(file, mode)
        self._disk = disk
        self.path = path
        self.safe = os.fstat(self.fileno()).st_size
        disk.files[self.fileno()] = self

    def flushed(self) -> None:
        self.safe = os.fstat(self.fileno()).st_size

    def write(self, data: Any) -> int:
        half = bytes(data)[: len(data) // 2]
        self._disk.reached("write", self.path, lambda: super(_Counted, self).write(half))
        return super().write(data)

    def truncate(self, size: int | None = None) -> int:
        self._disk.reached("truncate", self.path)
        self.safe = min(self.safe, size or 0)
        return super().truncate(size)

    def close(self) -> None:
        if not self.closed:
            self._disk.files.pop(self.fileno(), None)
            self._disk.loose.append((os.dup(self.fileno()), self.safe))
        super().close()


def attempt(wanted: RunConfig, disk: Disk) -> dict[str, Any]:
    """Begin or resume the run in a process of its own; how that went."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        answer: dict[str, Any] = {"error": "", "type": ""}
        try:
            with disk.installed():
                begin_or_resume(wanted)
        except BaseException as error:
            answer = {"error": str(error), "type": type(error).__name__}
            answer["sentence"] = isinstance(error, RlflameError)
        with os.fdopen(write, "w") as pipe:
            json.dump({**answer, "calls": disk.calls}, pipe)
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        text = pipe.read()
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return {"killed": os.WTERMSIG(status)}
    return {"killed": 0, **json.loads(text)}


def left_behind(folder: Path) -> dict[str, Any]:
    """What two runs of one recipe must have in common, whatever happened to them."""
    newest, best = checkpoint.load(folder / "latest.safetensors"), folder / "best.safetensors"
    found: dict[str, Any] = {name: (folder / name).read_text() for name in EQUAL_BYTES}
    found["digest"] = newest.digest
    found["evaluation"] = newest.evaluation and newest.evaluation.as_dict()
    found["best"] = newest.best and newest.best.as_dict()
    found["best policy"] = checkpoint.load(best).state_digest
    found["checkpoints"] = sorted(p.name for p in folder.glob("checkpoints/*"))
    found["replay"] = sorted(p.name for p in folder.glob("replay/*"))
    found["files"] = sorted(p.name for p in folder.iterdir())
    return found


def broken_now(folder: Path) -> list[str]:
    """Whatever of the names that promise a valid file does not keep it at this moment."""
    wrong = []
    names = [folder / "latest.safetensors", folder / "best.safetensors"]
    for file in [*filter(Path.exists, names), *folder.glob("checkpoints/step-*")]:
        try:
            snapshot = checkpoint.load(file).snapshot
            for segment in snapshot.segments if snapshot else ():
                segment.arrays()
        except RlflameError as error:
            wrong.append(error.message)
    return wrong


def one(
    wanted: RunConfig, failures: list[int], error: int | None, power: bool, untouched: Any
) -> list[str]:
    """A run that fails at each of these calls in turn, and is then let go on to its end."""
    folder = Path(str(wanted.runtime.out))
    shutil.rmtree(folder, ignore_errors=True)
    complaints: list[str] = []
    for at in failures:
        outcome = attempt(wanted, Disk(folder, at, error, power))
        complaints += broken_now(folder)
        if error is None:
            continue
        if not outcome["error"]:
            complaints.append("went unnoticed")
        elif not outcome["sentence"]:
            complaints.append(f"{outcome['type']}: {outcome['error']}")
        if list(folder.glob("checkpoints/step-*")):
            load_newest_checkpoint(folder, complaints.append)
    outcome = attempt(wanted, Disk(folder))
    if outcome["killed"] or outcome["error"]:
        return [*complaints, f"could not be resumed: {outcome}"]
    now = left_behind(folder)
    complaints += [f"{name} differs" for name in untouched if now[name] != untouched[name]]
    return complaints


def sweep(plan: dict[str, Any]) -> dict[str, Any]:
    """See `failing_runs`."""
    wanted = RunConfig.model_validate(plan["config"])
    if plan["replay"]:
        replays.small_segments().start()
    folder = Path(str(wanted.runtime.out))
    begin_or_resume(wanted)  # what is imported now is not imported again by every attempt
    shutil.rmtree(folder)
    gc.freeze()
    error = getattr(errno, plan["error"]) if plan["error"] else None
    calls = attempt(wanted, Disk(folder))
    if calls["killed"] or calls["error"]:
        return {"calls": [], "moments": [], "complaints": {"untouched": [str(calls)]}}
    untouched, names = left_behind(folder), calls["calls"]
    singles = [[at] for at in chosen(names, plan["of_each"]) if plan["about"] in names[at]]
    chains = [*plan["chains"], *singles]
    complaints = {}
    for chain in chains:
        wrong = one(wanted, chain, error, plan["power"], untouched)
        if wrong:
            where = ", ".join(f"{at}: {names[at % len(names)]}" for at in chain)
            complaints[where] = wrong
    moments = sorted({names[at] for at, *_ in chains if at < len(names)})
    return {"calls": names, "moments": moments, "complaints": complaints, "runs": len(chains)}


def chosen(names: list[str], of_each: int) -> list[int]:
    """So many calls of each name, spread over the run: its first, its last, some between."""
    places: dict[str, list[int]] = {}
    for at, name in enumerate(names):
        places.setdefault(name, []).append(at)
    picked: set[int] = set()
    for found in places.values():
        count = min(of_each, len(found))
        picked |= {found[(len(found) - 1) * i // max(1, count - 1)] for i in range(count)}
    return sorted(picked)


def failing_runs(
    wanted: RunConfig,
    *,
    error: str = "",
    power: bool = False,
    of_each: int = 2,
    about: str = "",
    chains: Sequence[list[int]] = (),
    replay: bool = False,
) -> dict[str, Any]:
    """Fail at chains of calls, or at so many of each name; resume; what was not equal.

    With `about`, at both; then of the names that have this word alone.

    Without an error's name the process is killed, in the middle of the call where that leaves
    something behind, or with `power` the whole machine. The names of the calls at which a run first
    failed come back too, so that a test can see that the kinds it cares about were among them. With
    `replay` the segments of one are small.
    """
    plan = {
        "config": json.loads(wanted.model_dump_json()),
        "error": error,
        "power": power,
        "of_each": of_each if about or not chains else 0,
        "chains": list(chains),
        "about": about,
        "replay": replay,
    }
    ended = subprocess.run(
        [sys.executable, __file__],
        input=json.dumps(plan),
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
    )
    assert ended.returncode == 0, ended.stderr
    result: dict[str, Any] = json.loads(ended.stdout)
    return result


if __name__ == "__main__":
    print(json.dumps(sweep(json.load(sys.stdin))))
