"""Locks run folders, and finds and loads their checkpoints.

A run folder contains these files and folders:

config.toml          recipe and runtime
metrics.jsonl        one line per iteration and per evaluation; no wall-clock times
episodes.csv         one line per training episode; no wall-clock times
timing.jsonl         one line per iteration: wall and CPU time, phase times, bytes transferred
machines.json        one entry per process that trained here: its machine and its workers
checkpoints/         the latest checkpoints, such as step-000100000.safetensors
replay/              the replay segments that these checkpoints need
latest.safetensors   the latest checkpoint
best.safetensors     the policy with the best evaluation
result.json          the final evaluation
videos/              short videos of the policy, if enabled
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
    DamagedCheckpointsError,
    DiskError,
    format_command,
    format_shell,
)
from rlflame.storage import checkpoint, safetensors_file
from rlflame.storage.checkpoint import Checkpoint
from rlflame.training.trainer import Progress

#: The hint for a folder without a config or checkpoint.
RETRY_HINT = "start again with the same command"
#: The time to wait for the lock, longer than `is_locked` holds it.
_LOCK_WAIT_S = 0.2
_LOCK_NAME = ".lock"
#: Files that are appended to and folders that are written into must not be symbolic links.
_LINKS_REFUSED = (
    *(_LOCK_NAME, "metrics.jsonl", "episodes.csv", "timing.jsonl"),
    *("checkpoints", "replay", "videos", "tensorboard", "tensorboard/hparams"),
)
_STEP_FILE = re.compile(r"step-(\d{9,})\.safetensors")


class FolderInUseError(CheckpointError):
    """The folder is locked by another process."""


class RunFolder:
    """A run folder, and the exclusive lock that this process holds on it.

    Files are written by path, but the lock belongs to an open file. Therefore, every write begins
    with `check`, which verifies that the path still leads to the locked folder.
    """

    def __init__(self, path: Path, lock_fd: int) -> None:
        self.path = path
        self._lock_fd = lock_fd
        # While the folder is open, its inode number is not reused.
        self._folder_fd = -1
        with contextlib.suppress(OSError):  # a folder without read permission
            self._folder_fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)

    def check(self) -> None:
        """Raise CheckpointError if the folder was moved, removed or replaced.

        A missing lock file alone is not an error, so that the recorder can save before it stops.
        """
        if self._lock_fd < 0 or _is_same(self.path / _LOCK_NAME, self._lock_fd) or self.is_unlocked:
            return
        raise CheckpointError(
            f"{self.path} was moved or removed during the run; nothing more was written there.",
            f"if it was moved: {format_command('resume', 'FOLDER')} continues the run there",
        )

    @property
    def is_unlocked(self) -> bool:
        """Whether the lock file was removed from an otherwise unchanged folder."""
        return (
            min(self._lock_fd, self._folder_fd) >= 0
            and not os.path.lexists(self.path / _LOCK_NAME)
            and _is_same(self.path, self._folder_fd)
        )

    def check_lock(self) -> None:
        """Run `check`, and raise CheckpointError if the lock file was removed."""
        self.check()
        if self.is_unlocked:
            raise CheckpointError(
                f"{self.path / _LOCK_NAME} was removed during the run, so another process could "
                f"write into {self.path}. The run was saved and stopped.",
                format_command("resume", self.path),
            )

    def check_all(self) -> None:
        """Run `check`, and reject symbolic links, which may lead out of the folder."""
        self.check()
        refuse_links(self.path)

    @classmethod
    def create(cls, target: Path) -> RunFolder:
        """Create a folder or use an empty one, and lock it.

        If the name is taken, a number is appended to it.
        """
        if target.name in ("", ".."):
            target = target.resolve()
        path, number = target, 1
        while True:
            if _make_folder(path) or _is_free(path):
                # Another process may lock the folder first.
                with contextlib.suppress(FolderInUseError):
                    folder = cls(path, _acquire_lock(path, "choose another folder with --out"))
                    if _is_free(path):
                        return folder
                    folder.release()
            number += 1
            path = target.parent / f"{target.name}-{number}"

    @classmethod
    def open(cls, path: Path) -> RunFolder:
        """Open and lock a folder, and remove temporary files of killed processes."""
        if not path.is_dir():
            raise CheckpointError(f"{path} is not a run folder.", "rlflame runs lists them")
        hint = (
            f"make it writable, or continue in a copy: {format_shell('cp', '-r', path, 'COPY')}; "
            "rlflame resume COPY"
        )
        refuse_links(path)
        folder = cls(path, _acquire_lock(path, hint))
        with contextlib.suppress(OSError):
            for prefix in ("", "checkpoints/", "replay/"):
                for leftover in path.glob(f"{prefix}.*{safetensors_file.TEMPORARY_SUFFIX}"):
                    if safetensors_file.is_temporary(leftover.name):
                        leftover.unlink()
        return folder

    def format_relocation_note(self, out: str | None) -> str | None:
        """Return a note if the folder is not the requested `out`, else None."""
        if out is None or self.path.resolve() == Path(out).resolve():
            return None
        return f"{out} already exists and is left unchanged; this run is in {self.path}."

    def release(self) -> None:
        for descriptor in (self._lock_fd, self._folder_fd):
            if descriptor >= 0:
                os.close(descriptor)
        self._lock_fd = self._folder_fd = -1

    @property
    def latest(self) -> Path:
        return self.path / "latest.safetensors"

    @property
    def best(self) -> Path:
        return self.path / "best.safetensors"


def refuse_links(folder: Path, names: Iterable[str] = _LINKS_REFUSED) -> None:
    """Raise CheckpointError if one of the names in a folder is a symbolic link."""
    for name in names:
        path = folder / name
        if path.is_symlink():
            raise CheckpointError(
                f"{path} is a symbolic link, which rlflame does not write through.",
                "replace it with the file or folder itself, or remove the link: "
                f"{format_shell('rm', path)}",
            )


def _is_same(path: Path, descriptor: int) -> bool:
    """Return whether an open file is still the one at the path."""
    try:
        return os.path.samestat(os.lstat(path), os.fstat(descriptor))
    except (FileNotFoundError, NotADirectoryError):
        return False


def _make_folder(path: Path) -> bool:
    """Create a folder; return False if the path exists."""
    missing = [level for level in (path, *path.parents) if not level.exists()]
    try:
        path.mkdir(parents=True)
        for level in missing:
            with contextlib.suppress(PermissionError):  # a folder without read permission
                safetensors_file.sync_folder(level.parent)
    except FileExistsError:
        return False
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be created: {error.strerror}.", "choose another with --out"
        ) from error
    return True


def _is_free(path: Path) -> bool:
    """Return whether the path is a folder that is empty except for a lock file."""
    try:
        return {entry.name for entry in path.iterdir()} <= {_LOCK_NAME}
    except OSError:
        return False


def list_step_files(folder: Path) -> list[Path]:
    """List the checkpoints in a run folder, oldest first."""
    paths = folder.glob("checkpoints/step-*.safetensors")
    return sorted((path for path in paths if _STEP_FILE.fullmatch(path.name)), key=_parse_steps)


def _parse_steps(path: Path) -> int:
    return int(path.name[5:-12])


def get_step_path(folder: Path, steps: int) -> Path:
    return folder / "checkpoints" / f"step-{steps:09d}.safetensors"


def list_later_files(folder: Path, progress: Progress) -> list[Path]:
    return [file for file in list_step_files(folder) if _parse_steps(file) > progress.steps]


def find_needed_segments(folder: Path) -> set[str]:
    """Return the file names of all segments that checkpoints in a run folder need.

    This includes renamed checkpoints, such as `*.later`.
    """
    paths = [*folder.glob("*.safetensors*"), *folder.glob("checkpoints/*.safetensors*")]
    return set().union(*map(checkpoint.read_segment_names, paths))


def is_later(policy: Path, progress: Progress) -> bool:
    try:
        return checkpoint.load(policy).progress.steps > progress.steps
    except CheckpointError:  # missing or unreadable
        return False


def load_newest_checkpoint(target: Path, note: Callable[[str], None]) -> Checkpoint:
    """Load the latest valid checkpoint of a run folder, or a checkpoint file.

    `latest.safetensors` is tried last, because a process may have died after it wrote a checkpoint,
    but before it updated this link.
    """
    if not target.is_dir():
        return checkpoint.load(target)
    latest = target / "latest.safetensors"
    candidates = [*reversed(list_step_files(target)), *([latest] if latest.exists() else ())]
    errors: list[CheckpointError] = []
    for path in candidates:
        try:
            return checkpoint.load(path)
        except CheckpointError as error:
            errors.append(error)
            note(error.message)
    if errors:
        raise DamagedCheckpointsError(
            f"{target} has no readable checkpoint; the latest: {errors[0].message}",
            f"restore one from a copy, or {_format_restart(target)}",
        ) from errors[0]
    raise CheckpointError(
        f"{target} has no checkpoint.",
        _format_restart(target)
        if (target / "config.toml").exists()
        else "rlflame runs lists the runs that can be resumed",
    )


def _format_restart(folder: Path) -> str:
    return f"start again: {format_command('train', '--config', folder / 'config.toml')}"


def has_checkpoint_files(folder: Path) -> bool:
    """Return whether a run folder has checkpoint or replay files, even damaged."""
    patterns = ("*.safetensors*", "checkpoints/*", "replay/*")
    return any(path for place in patterns for path in folder.glob(place))


def format_resume_hint(folder: Path) -> str:
    """Return a hint with the command that continues or restarts a failed run."""
    if paths := list_step_files(folder):
        return f"{format_command('resume', folder)} continues from {paths[-1].relative_to(folder)}"
    return _format_restart(folder) if (folder / "config.toml").exists() else RETRY_HINT


def find_policy_file(path: Path) -> Path:
    """Return the file of the best policy of a run folder, or the path of a file itself."""
    if not path.is_dir():
        return path
    if seeds := sorted(path.glob("seed-*")):
        raise CheckpointError(
            f"{path} is the folder of a sweep over several seeds.", f"name a seed: {seeds[0]}"
        )
    best, latest = path / "best.safetensors", path / "latest.safetensors"
    return latest if latest.exists() and not best.exists() else best


def load_policy_file(path: Path) -> Checkpoint:
    """Load a policy from a file, or the best policy of a run folder."""
    return checkpoint.load(find_policy_file(path))


@contextlib.contextmanager
def report_disk_errors(folder: Path, hint: str | None = None) -> Iterator[None]:
    """Convert write errors to DiskError.

    `hint` says how to continue after the disk is fixed; the default is the resume command.
    """
    try:
        yield
    except (OSError, CheckpointError) as error:
        cause = error if isinstance(error, OSError) else error.__cause__
        if not isinstance(cause, OSError):
            raise
        path = cause.filename2 or cause.filename or folder
        message = f"{path} could not be written: {cause.strerror or cause}."
        is_full = cause.errno in safetensors_file.FULL_DISK_ERRNOS
        remedy = "free disk space" if is_full else "make it writable"
        failure = DiskError(
            error.message if isinstance(error, CheckpointError) else message,
            f"{remedy}, then {hint or format_resume_hint(folder)}",
        )
        failure.remedy = remedy
        raise failure from cause


def _acquire_lock(path: Path, hint: str) -> int:
    """Lock a folder; return a descriptor that holds the lock while it is open."""
    # `hint` is the hint of the error for a folder that is not writable.
    refuse_links(path, [_LOCK_NAME])
    try:
        lock_fd = os.open(path / _LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        # The lock file may have been moved or removed before it was locked.
        is_held = _wait_for_lock(lock_fd) and _is_same(path / _LOCK_NAME, lock_fd)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be written: {error.strerror}.", hint) from error
    if not is_held:
        os.close(lock_fd)
        raise FolderInUseError(
            f"Another rlflame process is training in {path}.",
            "wait for it, or start a new run with another --out",
        )
    # Any user who can open the lock file can lock it, so make it private. This fails if the file
    # belongs to another user.
    with contextlib.suppress(OSError):
        os.fchmod(lock_fd, 0o600)
    return lock_fd


def _wait_for_lock(lock_fd: int) -> bool:
    """Try to lock for a short time, because `is_locked` briefly holds the lock."""
    deadline = time.monotonic() + _LOCK_WAIT_S
    while time.monotonic() < deadline:
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        time.sleep(_LOCK_WAIT_S / 20)
    return False


def is_locked(path: Path) -> bool:
    """Return whether a process has locked the folder for training."""
    try:
        lock_fd = os.open(path / _LOCK_NAME, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        fcntl.flock(lock_fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(lock_fd)
    return False
