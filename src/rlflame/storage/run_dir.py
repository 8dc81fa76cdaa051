"""A run on disk: its lock, its config, its logs and its checkpoints.

    config.toml          recipe and runtime
    metrics.jsonl        one line an iteration, one an evaluation; no wall clock
    episodes.csv         one line a training episode; no wall clock
    timing.jsonl         wall and processor seconds of each iteration by phase, and bytes shipped
    machines.json        every process that trained here, the machine and the workers it had
    checkpoints/         step-000100000.safetensors, the newest few
    replay/              the segments of a replay that these checkpoints name
    latest.safetensors   the newest checkpoint
    best.safetensors     the policy with the best evaluation
    result.json          the final evaluation
    videos/              short films of the policy, where they were asked for

Must not know: the loop, algorithms, display.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from rlflame.errors import (
    CheckpointError,
    CheckpointsDamaged,
    FolderLost,
    NotWritten,
    shell,
    typed,
)
from rlflame.storage import checkpoint, safetensors_file
from rlflame.storage.checkpoint import Checkpoint
from rlflame.training.trainer import Progress

#: What to type where nothing stands in a folder yet.
AGAIN = "begin again with the same command"
#: As long as nobody holds a lock who only looks whether it is held.
_MOMENT_S = 0.2
_LOCK = ".lock"
#: Files that are appended to, and folders that files are written into: none may be a link.
_LINKS_REFUSED = (
    _LOCK,
    "metrics.jsonl",
    "episodes.csv",
    "timing.jsonl",
    "checkpoints",
    "replay",
    "videos",
    "tensorboard",
    "tensorboard/hparams",
)
_STEP_FILE = re.compile(r"step-(\d{9,})\.safetensors")


class Taken(CheckpointError):
    """A folder that another process holds."""


class RunFolder:
    """The paths of a run and the exclusive right to write them.

    Files are written by their paths and the lock is on an open file, so every write begins with a
    `check` that both are still the same folder.
    """

    def __init__(self, path: Path, lock: int) -> None:
        self.path = path
        self._lock = lock
        # An open folder keeps its number from being given to another.
        try:
            self._folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        except OSError:  # one that may be entered and written, not read
            self._folder = -1

    def check(self) -> None:
        """Raise FolderLost where another folder, or none, is at the path now."""
        if self._lock < 0 or _is_same(self.path / _LOCK, self._lock):
            return
        if self.lock_removed:
            return  # nobody else has the folder; the recorder saves before it stops
        if not self.path.exists():
            raise FolderLost(
                f"{self.path} does not exist any more: it was moved or removed during the run.",
                f"if it was moved: {typed('resume', 'FOLDER')} goes on there",
            )
        raise FolderLost(
            f"{self.path} is not the folder that this run began in: that one was moved or removed, "
            "and nothing was written into the new one.",
            f"if it was moved: {typed('resume', 'FOLDER')} goes on there",
        )

    @property
    def lock_removed(self) -> bool:
        """Whether the folder is the same and lacks its lock file."""
        return (
            self._lock >= 0
            and self._folder >= 0
            and not os.path.lexists(self.path / _LOCK)
            and _is_same(self.path, self._folder)
        )

    def unlocked_error(self) -> FolderLost:
        """The end of a run whose lock file was removed."""
        return FolderLost(
            f"{self.path / _LOCK} was removed during the run, so another process could write into "
            f"{self.path}. The run was saved and stopped.",
            typed("resume", self.path),
        )

    def check_held(self) -> None:
        """A check for a folder of runs, of which each saves itself."""
        self.check()
        if self.lock_removed:
            raise self.unlocked_error()

    def check_whole(self) -> None:
        """Both checks, for a write into a sub-folder."""
        self.check()
        self.check_links()

    def check_links(self) -> None:
        """Refuse symbolic links that a write would follow out of the folder."""
        refuse_links(self.path)

    @classmethod
    def create(cls, wanted: Path) -> RunFolder:
        """A new folder, or an empty one; beside one that is not, under a name with a number."""
        if wanted.name in ("", ".."):
            wanted = wanted.resolve()
        path, number = wanted, 1
        while True:
            if _made(path) or _is_free(path):
                try:
                    lock = _locked(path, "choose another folder with --out")
                except Taken:  # by one that was as quick
                    lock = None
                if lock is not None:
                    if _is_free(path):
                        return cls(path, lock)
                    os.close(lock)
            number += 1
            path = wanted.parent / f"{wanted.name}-{number}"

    @classmethod
    def open(cls, path: Path) -> RunFolder:
        """An existing folder, rid of files that were half written when their process died."""
        if not path.is_dir():
            raise CheckpointError(f"{path} is no run folder.", "rlflame runs lists them")
        hint = (
            f"make it writable, or go on in a copy: {shell('cp', '-r', path, 'COPY')}; "
            "rlflame resume COPY"
        )
        refuse_links(path)
        folder = cls(path, _locked(path, hint))
        with contextlib.suppress(OSError):
            for place in ("", "checkpoints/", "replay/"):
                for leftover in path.glob(f"{place}.*{safetensors_file.TEMPORARY}"):
                    if safetensors_file.is_temporary(leftover.name):
                        leftover.unlink()
        return folder

    def instead_of(self, asked: str | None) -> str | None:
        """What to say where it is not the one that was asked for by name."""
        if asked is None or self.path.resolve() == Path(asked).resolve():
            return None
        return f"{asked} is taken and stays as it is; this run is in {self.path}."

    def release(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1
        if self._folder >= 0:
            os.close(self._folder)
            self._folder = -1

    @property
    def latest(self) -> Path:
        return self.path / "latest.safetensors"

    @property
    def best(self) -> Path:
        return self.path / "best.safetensors"


def refuse_links(folder: Path, names: Iterable[str] = _LINKS_REFUSED) -> None:
    """Raise CheckpointError where one of the names in a folder is a symbolic link."""
    for name in names:
        path = folder / name
        if path.is_symlink():
            raise CheckpointError(
                f"{path} is a symbolic link, and rlflame does not write through it.",
                f"put the file or folder itself there, or remove the link: {shell('rm', path)}",
            )


def _is_same(path: Path, descriptor: int) -> bool:
    """Whether the open file is the one at the path."""
    try:
        at_path = os.stat(path, follow_symlinks=path.name != _LOCK)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return os.path.samestat(at_path, os.fstat(descriptor))


def _made(path: Path) -> bool:
    """Whether there is a folder now where there was nothing."""
    missing = [level for level in (path, *path.parents) if not level.exists()]
    try:
        path.mkdir(parents=True)
        for level in missing:
            with contextlib.suppress(PermissionError):  # one that may be entered, not read
                safetensors_file.sync_folder(level.parent)
    except FileExistsError:
        return False
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be made: {error.strerror}.", "choose another with --out"
        ) from error
    return True


def _is_free(path: Path) -> bool:
    """Whether it is a folder with nothing in it but what a lock leaves behind."""
    try:
        return {entry.name for entry in path.iterdir()} <= {_LOCK}
    except OSError:
        return False


def step_files(folder: Path) -> list[Path]:
    """Checkpoints in a run folder, oldest first."""
    found = folder.glob("checkpoints/step-*.safetensors")
    return sorted((path for path in found if _STEP_FILE.fullmatch(path.name)), key=_steps_of)


def _steps_of(path: Path) -> int:
    return int(path.name[5:-12])


def step_file(folder: Path, steps: int) -> Path:
    return folder / "checkpoints" / f"step-{steps:09d}.safetensors"


def later_files(folder: Path, progress: Progress) -> list[Path]:
    return [file for file in step_files(folder) if _steps_of(file) > progress.steps]


def segments_needed(folder: Path) -> set[str]:
    """What any checkpoint names that lies here, those that were set aside among them."""
    found = [*folder.glob("*.safetensors*"), *folder.glob("checkpoints/*.safetensors*")]
    return set().union(*map(checkpoint.segments_named_in, found))


def is_later(policy: Path, progress: Progress) -> bool:
    try:
        return checkpoint.load(policy).progress.steps > progress.steps
    except CheckpointError:  # absent, or of no use to anybody
        return False


def newest_checkpoint(target: Path, note: Callable[[str], None]) -> Checkpoint:
    """The newest valid checkpoint of a run folder, or the one in the file that is named.

    `latest.safetensors` comes last: a process may have died between writing a checkpoint and
    pointing to it.
    """
    if not target.is_dir():
        return checkpoint.load(target)
    latest = target / "latest.safetensors"
    candidates = [*reversed(step_files(target)), *([latest] if latest.exists() else ())]
    config = target / "config.toml"
    first: CheckpointError | None = None
    for path in candidates:
        try:
            return checkpoint.load(path)
        except CheckpointError as error:
            first = first or error
            another = path != candidates[-1]
            note(f"{error.message}{' Trying an earlier checkpoint.' if another else ''}")
    if first is not None:
        raise CheckpointsDamaged(
            f"{target} holds no checkpoint that can be read; of the newest: {first.message}",
            f"restore one from a copy, or begin again: {typed('train', '--config', config)}",
        ) from first
    raise CheckpointError(
        f"{target} holds no checkpoint.",
        f"begin again: {typed('train', '--config', config)}"
        if config.exists()
        else "rlflame runs lists the runs that can be resumed",
    )


def holds_anything(folder: Path) -> bool:
    """Whether a run folder has a checkpoint of any kind, whole or not."""
    places = ("*.safetensors*", "checkpoints/*", "replay/*")
    return any(path for place in places for path in folder.glob(place))


def kept(folder: Path) -> str:
    """What to type after a run has failed."""
    found, config = step_files(folder), folder / "config.toml"
    if found:
        return f"{typed('resume', folder)} goes on from {found[-1].relative_to(folder)}"
    return f"begin again: {typed('train', '--config', config)}" if config.exists() else AGAIN


def named_policy(path: Path) -> Checkpoint:
    """The policy in a file; for a folder, an error with the file that may have been meant."""
    if path.is_dir():
        best = path / "best.safetensors"
        if best.exists():
            raise CheckpointError(f"{path} is a folder.", f"the best policy in it: {best}")
        if found := sorted(path.glob("*.safetensors")):
            raise CheckpointError(f"{path} is a folder.", f"a file in it: {found[0]}")
    return checkpoint.load(path)


@contextlib.contextmanager
def writing(folder: Path, onward: str | None = None) -> Iterator[None]:
    """A full or read-only disk is a sentence. What to type then is the way on of a run, unless it
    is said."""
    try:
        yield
    except (OSError, CheckpointError) as error:
        cause = error if isinstance(error, OSError) else error.__cause__
        if not isinstance(cause, OSError):
            raise
        place = cause.filename2 or cause.filename or folder
        message = f"{place} could not be written: {cause.strerror or cause}."
        raise NotWritten(
            error.message if isinstance(error, CheckpointError) else message,
            "make room" if cause.errno in safetensors_file.FULL else "see that it can be written",
            onward or kept(folder),
        ) from cause


def _locked(path: Path, hint: str) -> int:
    """An exclusive lock that ends with this process, however it ends.

    The `hint` is for whoever may not write there.
    """
    refuse_links(path, [_LOCK])
    try:
        lock = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be written: {error.strerror}.", hint) from error
    try:
        _locked_soon(lock)
    except BlockingIOError as error:
        os.close(lock)
        raise Taken(
            f"Another rlflame is training in {path}.",
            "wait for it, or start a new run with another --out",
        ) from error
    except OSError as error:
        os.close(lock)
        raise CheckpointError(
            f"{path} cannot be locked: {error.strerror}.", "choose a folder on a local disk"
        ) from error
    if not _is_same(path / _LOCK, lock):  # it was moved or removed in between
        os.close(lock)
        raise Taken(
            f"{path} was moved or removed by another process just now.",
            "start a new run with another --out",
        )
    _close_to_others(lock)
    return lock


def _close_to_others(lock: int) -> None:
    """Whoever can open a lock file can hold it."""
    status = os.fstat(lock)
    if status.st_uid == os.geteuid() and status.st_mode & 0o077:
        with contextlib.suppress(OSError):  # a file system without such rights
            os.fchmod(lock, 0o600)


def _locked_soon(lock: int) -> None:
    """Whoever looks whether it is locked has it for a moment."""
    until = time.monotonic() + _MOMENT_S
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > until:
                raise
            time.sleep(_MOMENT_S / 20)


def is_locked(path: Path) -> bool:
    """Whether a trainer holds the folder now."""
    try:
        lock = os.open(path / _LOCK, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(lock)
    return False
