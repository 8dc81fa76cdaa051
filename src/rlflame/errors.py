"""Errors to show to the user, each with a description of the problem and a hint.

This module imports nothing from the rest of rlflame. An unexpected exception is a bug in rlflame.
"""

from __future__ import annotations

import shlex
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_DOCUMENT_MARK = "rlflame_documented"


def format_command(*words: object) -> str:
    """Return an rlflame command, quoted for a shell."""
    return format_shell("rlflame", *words)


def format_shell(*words: object) -> str:
    """Return a command quoted for a shell; prefix `./` to paths that start with `-`."""
    return " ".join(
        quote(f"./{word}" if isinstance(word, Path) and str(word).startswith("-") else str(word))
        for word in words
    )


def quote(word: str) -> str:
    """Quote a word for a shell, and escape terminal control characters.

    bash, ksh and zsh decode $'...' to the same bytes, even if a name is not UTF-8. Quotes and
    backslashes are also written in octal, so that even a shell without $'...' reads a single quoted
    word.
    """
    if word.isprintable():
        return shlex.quote(word)
    return "$'" + "".join(map(_escape_octets, word)) + "'"


def _escape_octets(character: str) -> str:
    if character.isprintable() and character not in "\\'":
        return character
    of_a_file_name = "\udc80" <= character <= "\udcff"
    octets = character.encode("utf-8", "surrogateescape" if of_a_file_name else "surrogatepass")
    return "".join(f"\\{octet:03o}" for octet in octets)


def replace_suffix(out: Path, suffix: str, default_name: str) -> Path:
    """Replace the suffix of a path.

    If its name consists of only dots and dashes, `default_name` is used.
    """
    if out.name.strip(".-"):
        return out.with_suffix(suffix)
    return (out.parent if out.name.strip(".") else out) / f"{default_name}{suffix}"


class RlflameError(Exception):
    """An error to show to the user, with a hint for fixing the problem."""

    exit_code = 1

    def __init__(self, message: str, hint: str = "", detail: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        #: Longer text, such as an environment's traceback, shown above the message.
        self.detail = detail

    def as_dict(self) -> dict[str, Any]:
        """Return a dictionary from which `make_error` can recreate the error."""
        return {
            "kind": type(self).__name__,
            "message": self.message,
            "hint": self.hint,
            "detail": self.detail,
            "exit_code": self.exit_code,
        }


def from_exception(error: BaseException) -> RlflameError:
    """Convert any exception to an RlflameError.

    An unexpected exception becomes the `__cause__` of the new error.
    """
    if isinstance(error, RlflameError):
        return error
    if isinstance(error, KeyboardInterrupt):
        return Interruption("Interrupted.", "run the same command again", signal.SIGINT)
    if isinstance(error, MemoryError):
        hint = (
            "reduce rollout.steps, rollout.num_slots or buffer_size; with --seeds, use --workers 1"
        )
        return RlflameError("Out of memory.", hint)
    if isinstance(error, OSError):
        file_text = f" ({error.filename})" if error.filename is not None else ""
        hint = "fix the cause, then run the same command again"
        return RlflameError(f"System error: {error.strerror or error}{file_text}.", hint)
    text = str(error).strip().splitlines()
    summary = f"{type(error).__name__}: {text[0]}" if text else type(error).__name__
    failure = RlflameError(
        f"Internal error in rlflame ({summary}).", "this is a bug; --debug shows the traceback"
    )
    failure.__cause__ = error
    return failure


def mark_documented(error: BaseException) -> None:
    """Mark an error so that it is not printed as JSON after another JSON document."""
    error.__dict__[_DOCUMENT_MARK] = True


def is_documented(error: BaseException) -> bool:
    return _DOCUMENT_MARK in error.__dict__


@contextmanager
def mark_errors_documented() -> Iterator[None]:
    """Call `mark_documented` on any exception that is raised in the `with` block."""
    try:
        yield
    except BaseException as error:
        mark_documented(error)
        raise


class ConfigError(RlflameError):
    """An invalid flag, config file or recipe."""

    exit_code = 2


def check_extra(
    package: str, consequence: str, extra: str, error_type: type[RlflameError] = ConfigError
) -> None:
    """Raise an error with the install command if an optional package is missing."""
    from importlib.util import find_spec

    if find_spec(package) is None:
        raise error_type(
            f"{package} is not installed, so {consequence}.", f"pip install 'rlflame[{extra}]'"
        )


class CheckpointError(RlflameError):
    """A file that cannot be read, verified or written."""


class DiskError(CheckpointError):
    """A full or read-only disk; `remedy` is the action that makes it writable."""

    remedy = ""


class DamagedCheckpointsError(CheckpointError):
    """A run without a readable checkpoint."""


class ReplayError(CheckpointError):
    """A replay file that a checkpoint refers to is missing or damaged."""


class EnvironmentFailure(RlflameError):
    """The user's environment raised an exception, hung, or returned an invalid value."""


class FleetError(RlflameError):
    """A failure of the fleet, for example too many lost workers."""


class FleetUnreachableError(FleetError):
    """The requested fleet cannot be reached."""

    exit_code = 3


class LearningError(RlflameError):
    """Learning cannot continue, for example after several NaN losses in a row."""


class LearnerFailure(RlflameError):
    """A learner ended, could not connect, or did not answer in time."""

    #: True after a timeout; False if the learner's process ended.
    is_hung = False


class Interruption(RlflameError):
    """A signal ended the command. A run saves its state before it raises this error."""

    def __init__(self, message: str, hint: str, signal_number: int) -> None:
        super().__init__(message, hint)
        self.exit_code = 128 + signal_number


_TRAVELLING_TYPES: dict[str, type[RlflameError]] = {
    kind.__name__: kind for kind in (EnvironmentFailure, FleetError, FleetUnreachableError)
}


def make_error(values: Mapping[str, Any]) -> RlflameError:
    """Recreate an error from another process, with its original type if possible."""
    error_type = _TRAVELLING_TYPES.get(values["kind"], RlflameError)
    error = error_type(values["message"], values["hint"], values["detail"])
    error.exit_code = int(values["exit_code"])
    return error
