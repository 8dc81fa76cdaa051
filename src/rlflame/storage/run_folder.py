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

#: What to type where nothing stands in a folder yet.
RETRY_HINT = "begin again with the same command"
#: Longer than a check of the lock holds it.
_LOCK_WAIT_S = 0.2
_LOCK_NAME = ".lock"
#: Files that are appended to, and folders that files are written into: none may be a link.
_LINKS_REFUSED = (
    *(_LOCK_NAME, "metrics.jsonl", "episodes.csv", "timing.jsonl"),
    *("checkpoints", "replay", "videos", "tensorboard", "tensorboard/hparams"),
)
_STEP_FILE = re.compile(r"step-(\d{9,})\.safetensors")


class FolderInUseError(CheckpointError):
    """A folder that another process holds."""


class RunFolder:
    """The paths of a run and the exclusive right to write them.

    Files are written by their paths and the lock is on an open file, so every write begins with a
    `check` that both are still the same folder.
    """

    def __init__(self, path: Path, lock_fd: int) -> None:
        self.path = path
        self._lock_fd = lock_fd
        # An open folder keeps its number from being given to another.
        self._folder_fd = -1
        with contextlib.suppress(OSError):  # one that may be entered and written, not read
            self._folder_fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)

    def check(self) -> None:
        """Raise CheckpointError where another folder, or none, is at the path now.

        A folder that has lost its lock file is the same: the recorder saves before it stops.
        """
        if self._lock_fd < 0 or _is_same(self.path / _LOCK_NAME, self._lock_fd) or self.is_unlocked:
            return
        raise CheckpointError(
            f"{self.path} was moved or removed during the run; nothing more was written there.",
            f"if it was moved: {format_command('resume', 'FOLDER')} continues it there",
        )

    @property
    def is_unlocked(self) -> bool:
        """Whether the folder is the same and lacks its lock file."""
        return (
            min(self._lock_fd, self._folder_fd) >= 0
            and not os.path.lexists(self.path / _LOCK_NAME)
            and _is_same(self.path, self._folder_fd)
        )

    def check_lock(self) -> None:
        """The same check, and an error where the lock file was removed."""
        self.check()
        if self.is_unlocked:
            raise CheckpointError(
                f"{self.path / _LOCK_NAME} was removed during the run, so another process could "
                f"write into {self.path}. The run was saved and stopped.",
                format_command("resume", self.path),
            )

    def check_all(self) -> None:
        """The same, and refuse symbolic links that a write would follow out of the folder."""
        self.check()
        refuse_links(self.path)

    @classmethod
    def create(cls, target: Path) -> RunFolder:
        """A new folder, or an empty one; beside one that is not, under a name with a number."""
        if target.name in ("", ".."):
            target = target.resolve()
        path, number = target, 1
        while True:
            if _make_folder(path) or _is_free(path):
                # Another process may be as quick.
                with contextlib.suppress(FolderInUseError):
                    folder = cls(path, _acquire_lock(path, "choose another folder with --out"))
                    if _is_free(path):
                        return folder
                    folder.release()
            number += 1
            path = target.parent / f"{target.name}-{number}"

    @classmethod
    def open(cls, path: Path) -> RunFolder:
        """An existing folder, rid of files that were half written when their process died."""
        if not path.is_dir():
            raise CheckpointError(f"{path} is no run folder.", "rlflame runs lists them")
        hint = (
            f"make it writable, or go on in a copy: {format_shell('cp', '-r', path, 'COPY')}; "
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
        """What to say where it is not the one that was asked for by name."""
        if out is None or self.path.resolve() == Path(out).resolve():
            return None
        return f"{out} is taken and stays as it is; this run is in {self.path}."

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
    """Raise CheckpointError where one of the names in a folder is a symbolic link."""
    for name in names:
        path = folder / name
        if path.is_symlink():
            raise CheckpointError(
                f"{path} is a symbolic link, and rlflame does not write through it.",
                "put the file or folder itself there, or remove the link: "
                f"{format_shell('rm', path)}",
            )


def _is_same(path: Path, descriptor: int) -> bool:
    """Whether the open file is the one at the path."""
    try:
        return os.path.samestat(os.lstat(path), os.fstat(descriptor))
    except (FileNotFoundError, NotADirectoryError):
        return False


def _make_folder(path: Path) -> bool:
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
        return {entry.name for entry in path.iterdir()} <= {_LOCK_NAME}
    except OSError:
        return False


def list_step_files(folder: Path) -> list[Path]:
    """Checkpoints in a run folder, oldest first."""
    paths = folder.glob("checkpoints/step-*.safetensors")
    return sorted((path for path in paths if _STEP_FILE.fullmatch(path.name)), key=_parse_steps)


def _parse_steps(path: Path) -> int:
    return int(path.name[5:-12])


def get_step_path(folder: Path, steps: int) -> Path:
    return folder / "checkpoints" / f"step-{steps:09d}.safetensors"


def list_later_files(folder: Path, progress: Progress) -> list[Path]:
    return [file for file in list_step_files(folder) if _parse_steps(file) > progress.steps]


def find_needed_segments(folder: Path) -> set[str]:
    """What any checkpoint names that lies here, those that were set aside among them."""
    paths = [*folder.glob("*.safetensors*"), *folder.glob("checkpoints/*.safetensors*")]
    return set().union(*map(checkpoint.read_segment_names, paths))


def is_later(policy: Path, progress: Progress) -> bool:
    try:
        return checkpoint.load(policy).progress.steps > progress.steps
    except CheckpointError:  # absent, or useless
        return False


def load_newest_checkpoint(target: Path, note: Callable[[str], None]) -> Checkpoint:
    """The newest valid checkpoint of a run folder, or the one in the file that is named.

    `latest.safetensors` comes last: a process may have died between writing a checkpoint and
    pointing to it.
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
            f"{target} holds no checkpoint that can be read; of the newest: {errors[0].message}",
            f"restore one from a copy, or {_format_restart(target)}",
        ) from errors[0]
    raise CheckpointError(
        f"{target} holds no checkpoint.",
        _format_restart(target)
        if (target / "config.toml").exists()
        else "rlflame runs lists the runs that can be resumed",
    )


def _format_restart(folder: Path) -> str:
    return f"begin again: {format_command('train', '--config', folder / 'config.toml')}"


def has_checkpoint_files(folder: Path) -> bool:
    """Whether a run folder has a checkpoint of any kind, whole or not."""
    patterns = ("*.safetensors*", "checkpoints/*", "replay/*")
    return any(path for place in patterns for path in folder.glob(place))


def format_resume_hint(folder: Path) -> str:
    """What to type after a run has failed."""
    if paths := list_step_files(folder):
        return f"{format_command('resume', folder)} goes on from {paths[-1].relative_to(folder)}"
    return _format_restart(folder) if (folder / "config.toml").exists() else RETRY_HINT


def load_policy_file(path: Path) -> Checkpoint:
    """The policy in a file; for a folder, an error with the file that may have been meant."""
    if path.is_dir():
        for policy_file in sorted(path.glob("*.safetensors")):  # the best one first
            raise CheckpointError(f"{path} is a folder.", f"a file in it: {policy_file}")
    return checkpoint.load(path)


@contextlib.contextmanager
def report_disk_errors(folder: Path, hint: str | None = None) -> Iterator[None]:
    """A full or read-only disk as a sentence; its hint is how to resume, unless one is given."""
    try:
        yield
    except (OSError, CheckpointError) as error:
        cause = error if isinstance(error, OSError) else error.__cause__
        if not isinstance(cause, OSError):
            raise
        path = cause.filename2 or cause.filename or folder
        message = f"{path} could not be written: {cause.strerror or cause}."
        is_full = cause.errno in safetensors_file.FULL_DISK_ERRNOS
        remedy = "make room" if is_full else "see that it can be written"
        failure = DiskError(
            error.message if isinstance(error, CheckpointError) else message,
            f"{remedy}, then {hint or format_resume_hint(folder)}",
        )
        failure.remedy = remedy
        raise failure from cause


def _acquire_lock(path: Path, hint: str) -> int:
    """An exclusive lock that ends with this process, however it ends.

    The `hint` is for a folder that may not be written.
    """
    refuse_links(path, [_LOCK_NAME])
    try:
        lock_fd = os.open(path / _LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        # It may have been moved or removed in between.
        is_held = _wait_for_lock(lock_fd) and _is_same(path / _LOCK_NAME, lock_fd)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be written: {error.strerror}.", hint) from error
    if not is_held:
        os.close(lock_fd)
        raise FolderInUseError(
            f"Another rlflame is training in {path}.",
            "wait for it, or start a new run with another --out",
        )
    # A user who can open a lock file can hold it. The file of another user stays as it is.
    with contextlib.suppress(OSError):
        os.fchmod(lock_fd, 0o600)
    return lock_fd


def _wait_for_lock(lock_fd: int) -> bool:
    """Whether it could be had: a check of the lock holds it for a moment."""
    deadline = time.monotonic() + _LOCK_WAIT_S
    while time.monotonic() < deadline:
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        time.sleep(_LOCK_WAIT_S / 20)
    return False


def is_locked(path: Path) -> bool:
    """Whether a trainer holds the folder now."""
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
