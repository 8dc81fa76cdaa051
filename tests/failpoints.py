"""Tiny runs that die, or find the disk full, at a chosen call to the file system.

`python failpoints.py` reads a plan as JSON from standard input and makes an undisturbed run. For
each chosen call, it makes a run that fails there, resumes it, and prints the differences as JSON.
Each attempt is a forked process, because it may be killed. This module does not use pytest.
"""

from __future__ import annotations

import contextlib
import errno
import functools
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
from importlib import metadata
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
    """A run of three iterations that saves and evaluates each. Merges `sections`."""
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
    """Start or resume a run, as a user would."""
    folder = Path(str(wanted.runtime.out))
    if (folder / "latest.safetensors").exists() or list(folder.glob("checkpoints/step-*")):
        api.resume(folder, wanted.runtime)
        return
    shutil.rmtree(folder, ignore_errors=True)
    api.train(wanted)


class Disk:
    """Counts the calls that change a folder, and dies or fails from one of them on.

    A killed process loses nothing that it has written, so `fsync` is only counted. With `power`,
    data that was written but not flushed is lost too.
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
        """Count a call. `torn` does the first half of the call if the process dies in it."""
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
        # On a full disk, all later calls fail, except removing files.
        if kind != "unlink":
            raise OSError(self._error, os.strerror(self._error), os.fspath(self._folder))

    @contextlib.contextmanager
    def installed(self) -> Iterator[Disk]:
        """Patch Python's `open` and the folder functions of `os` in this process.

        A descriptor that `os.open` opens for appending is counted once Python's `open` wraps it.
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
    """An open file whose writes can fail, and whose data is safe only after a flush."""

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
    """Start or resume the run in a forked process, and return the outcome."""
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
    """The files and values that are equal in all runs of a recipe, despite failures."""
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
    """List the errors of files that must always be valid."""
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
    """Make each call of a run fail in turn, then let it finish. Return the faults."""
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
    """Carry out a plan of `failing_runs` in this process."""
    wanted = RunConfig.model_validate(plan["config"])
    if plan["replay"]:
        replays.small_segments().start()
    folder = Path(str(wanted.runtime.out))
    # Load the modules, and read the versions of packages, once for all attempts.
    metadata.version = functools.cache(metadata.version)
    begin_or_resume(wanted)
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
    """Choose up to `of_each` calls of each name, spread over the whole run."""
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
    """Make runs fail, resume them, and return the differences from another run.

    A run fails at each of the `chains`, or, without chains, at `of_each` calls of each name.
    With `about`, it fails at both, but only at names that contain this word.

    `error` is the name of an errno. Without it, the process is killed, in the middle of the call if
    that leaves something behind. With `power`, the whole machine fails. The result also contains
    the names of the calls at which a run first failed, so that a test can check them. With
    `replay`, the segments of the replay buffer are small.
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
