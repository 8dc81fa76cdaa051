"""The errors a user can meet: a sentence, the value seen, and the next command to type.

Knows nothing of the rest of rlflame. Anything that is not an RlflameError is a bug in rlflame.
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
    """A command of rlflame's as a shell reads it, whatever is in its words."""
    return format_shell("rlflame", *words)


def format_shell(*words: object) -> str:
    """The same of any command; a path that begins with a dash would be taken for an option."""
    return " ".join(
        quote(f"./{word}" if isinstance(word, Path) and str(word).startswith("-") else str(word))
        for word in words
    )


def quote(word: str) -> str:
    """A word as a shell reads it, without any character that a terminal would obey.

    bash, ksh and zsh read $'...' back to the same bytes, also those of a name that is not UTF-8.
    Quotes and backslashes are octal too: a shell that does not know $'...' sees one quoted word.
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
    """A file's name with another end; where it has none, or is a folder's dots, `word` so ended."""
    if out.name.strip(".-"):
        return out.with_suffix(suffix)
    return (out.parent if out.name.strip(".") else out) / f"{default_name}{suffix}"


class RlflameError(Exception):
    """An end the user can understand: `message` says what was seen, `hint` what to type next."""

    exit_code = 1

    def __init__(self, message: str, hint: str = "", detail: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        #: Longer text such as an environment's own traceback, shown below the sentence.
        self.detail = detail

    def as_dict(self) -> dict[str, Any]:
        """As it travels between processes; `make_error` reads it."""
        return {
            "kind": type(self).__name__,
            "message": self.message,
            "hint": self.hint,
            "detail": self.detail,
            "exit_code": self.exit_code,
        }


def from_exception(error: BaseException) -> RlflameError:
    """The sentence for whatever ended a command; a bug is the cause of its sentence."""
    if isinstance(error, RlflameError):
        return error
    if isinstance(error, KeyboardInterrupt):
        return Interruption("Interrupted.", "type the same again", signal.SIGINT)
    if isinstance(error, MemoryError):
        hint = "a smaller rollout.steps, rollout.num_slots or buffer_size; of --seeds, --workers 1"
        return RlflameError("Memory ran out.", hint)
    if isinstance(error, OSError):
        file_text = f" ({error.filename})" if error.filename is not None else ""
        hint = "mend that, and type the same again"
        return RlflameError(f"The system said: {error.strerror or error}{file_text}.", hint)
    text = str(error).strip().splitlines()
    summary = f"{type(error).__name__}: {text[0]}" if text else type(error).__name__
    failure = RlflameError(
        f"Something went wrong inside rlflame ({summary}).", "this is a bug; --debug shows where"
    )
    failure.__cause__ = error
    return failure


def mark_documented(error: BaseException) -> None:
    """The one document that a program reads has been written, so that no second follows it."""
    error.__dict__[_DOCUMENT_MARK] = True


def is_documented(error: BaseException) -> bool:
    return _DOCUMENT_MARK in error.__dict__


@contextmanager
def mark_errors_documented() -> Iterator[None]:
    """Whatever ends in here had its document before."""
    try:
        yield
    except BaseException as error:
        mark_documented(error)
        raise


class ConfigError(RlflameError):
    """A flag, a config file or a recipe that cannot be run as it stands."""

    exit_code = 2


def check_extra(
    package: str, consequence: str, extra: str, error_type: type[RlflameError] = ConfigError
) -> None:
    """Raise the error with the command to type where a package of an extra is not installed."""
    from importlib.util import find_spec

    if find_spec(package) is None:
        raise error_type(
            f"{package} is not installed, so {consequence}.", f"pip install 'rlflame[{extra}]'"
        )


class CheckpointError(RlflameError):
    """A file that cannot be read, verified or written."""


class DiskError(CheckpointError):
    """A full or read-only disk; `remedy` is what to do before the same is typed again."""

    remedy = ""


class DamagedCheckpointsError(CheckpointError):
    """Of all the checkpoints of a run there is none that can be read."""


class ReplayError(CheckpointError):
    """A part of the replay that a checkpoint names is missing or damaged."""


class EnvironmentFailure(RlflameError):
    """The user's environment raised, hung, or returned something impossible."""


class FleetError(RlflameError):
    """Workers were lost more often than the retry bound allows."""


class FleetUnreachableError(FleetError):
    """A fleet that was asked for cannot be reached at all."""

    exit_code = 3


class LearningError(RlflameError):
    """Learning went where no update can be trusted, for example several NaN losses in a row."""


class LearnerFailure(RlflameError):
    """One of several learners ended, or did not answer in time."""

    #: Whether the time was over; a learner that ended is noticed at once.
    is_hung = False


class Interruption(RlflameError):
    """A signal asked the run to end; everything was saved first."""

    def __init__(self, message: str, hint: str, signal_number: int) -> None:
        super().__init__(message, hint)
        self.exit_code = 128 + signal_number


_TRAVELLING_TYPES: dict[str, type[RlflameError]] = {
    kind.__name__: kind for kind in (EnvironmentFailure, FleetError, FleetUnreachableError)
}


def make_error(values: Mapping[str, Any]) -> RlflameError:
    """The error of another process again, of its own type where that can be told apart."""
    error_type = _TRAVELLING_TYPES.get(values["kind"], RlflameError)
    error = error_type(values["message"], values["hint"], values["detail"])
    error.exit_code = int(values["exit_code"])
    return error
