"""What a check-up finds: one finding for each question, and what to type where it is not well.

Must not know: Flame, how findings are come by, how they are shown.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

#: A warning is worth knowing, yet runs are right and get executors; what has failed they meet.
Status = Literal["ok", "warning", "failed"]
CheckVerdict = Literal["healthy", "degraded", "unreachable"]
#: Longer errors are cut off.
_MAX_CHARS = 240
EXIT_CODES: dict[CheckVerdict, int] = {"healthy": 0, "degraded": 1, "unreachable": 3}


@dataclass(frozen=True, slots=True)
class Finding:
    """The answer to one question."""

    check: str
    status: Status
    seen: str
    #: What to type or do; the first is the one to try first.
    fixes: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    #: The same for programs.
    facts: Mapping[str, Any] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        return {
            "check": self.check,
            "status": self.status,
            "seen": self.seen,
            "fixes": list(self.fixes),
            "notes": list(self.notes),
            "facts": dict(self.facts),
        }


def make_ok(check: str, seen: str, *, notes: Sequence[str] = (), **facts: Any) -> Finding:
    return Finding(check, "ok", seen, (), tuple(notes), facts)


def make_warning(
    check: str, seen: str, *fixes: str, notes: Sequence[str] = (), **facts: Any
) -> Finding:
    return Finding(check, "warning", seen, fixes, tuple(notes), facts)


def make_failure(
    check: str, seen: str, *fixes: str, notes: Sequence[str] = (), **facts: Any
) -> Finding:
    return Finding(check, "failed", seen, fixes, tuple(notes), facts)


def shorten_error(text: str) -> str:
    """An error of a library without its innards."""
    text = re.split(r"\. gRPC client debug context|\(code: \d+\)", " ".join(text.split()))[0]
    return (text if len(text) <= _MAX_CHARS else f"{text[:_MAX_CHARS]} ...").rstrip(" .")


@dataclass(frozen=True)
class Diagnosis:
    """All findings, in the order in which they were made."""

    findings: tuple[Finding, ...]
    #: False: no Flame is configured at all, which is no illness.
    configured: bool
    #: Whether session manager and object cache both answered to the end.
    reachable: bool

    @property
    def verdict(self) -> CheckVerdict:
        if not self.reachable:
            return "unreachable"
        return "degraded" if self.list_checks("failed") else "healthy"

    @property
    def exit_code(self) -> int:
        return EXIT_CODES[self.verdict]

    def list_checks(self, status: Status) -> list[str]:
        return [finding.check for finding in self.findings if finding.status == status]

    def as_dict(self) -> dict[str, Any]:
        return {
            "verdict": self.verdict,
            "exit_code": self.exit_code,
            "configured": self.configured,
            "checks": [finding.as_dict() for finding in self.findings],
        }


@dataclass(frozen=True)
class CheckTimeouts:
    """How long things may take, and whose clock says so."""

    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    #: The whole check-up; what was not begun by then is not looked at.
    total_s: float = 300.0
    #: An executor that has not moved for so long in a state that others pass in no time is stuck.
    still_s: float = 6.0
    #: In Binding, where a worker process is started, it may be for so long.
    binding_s: float = 30.0
    #: A lease that stands still for so long is that of a dead run: its workers give up after 90 s.
    lease_s: float = 100.0
    #: The same where the driver's process on this machine is gone, too. Not at once: containers may
    #: share a host's name and not its processes, so two beats have to be missed.
    gone_s: float = 11.0
    #: Until an executor has answered for the first time.
    first_answer_s: float = 45.0
    #: Until all that are to come have answered.
    all_answers_s: float = 20.0
    #: How long a session may refuse to be closed.
    closing_s: float = 15.0
