"""The findings of cluster-check: one for each question, with what to type if it is not well."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

#: Runs work in spite of a warning; a failure stops them.
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
    text: str
    #: What to type or do; the first is the one to try first.
    fixes: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    #: The same for programs.
    facts: Mapping[str, Any] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        facts = {**asdict(self), "fixes": list(self.fixes), "notes": list(self.notes)}
        return {"seen" if name == "text" else name: value for name, value in facts.items()}


def shorten_error(text: str) -> str:
    return (text if len(text) <= _MAX_CHARS else f"{text[:_MAX_CHARS]} ...").rstrip(" .")


@dataclass(frozen=True)
class Diagnosis:
    """All findings, in the order in which they were made."""

    findings: tuple[Finding, ...]
    #: False if no Flame is configured at all, which is no illness.
    is_configured: bool
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
            "configured": self.is_configured,
            "checks": [finding.as_dict() for finding in self.findings],
        }


@dataclass(frozen=True)
class CheckTimeouts:
    """How long the steps of a check may take."""

    #: An executor that stays this long in a state that others pass at once is stuck.
    still_s: float = 6.0
    #: The same for Binding, where a worker process is started.
    binding_s: float = 30.0
    #: A lease that stands still this long is of a dead run: its workers give up after 90 s.
    lease_s: float = 100.0
    #: The same if the driver's process on this machine is gone, too. Not at once: containers may
    #: share a host's name and not its processes, so two beats have to be missed.
    gone_s: float = 11.0
    #: Until an executor has answered for the first time.
    first_answer_s: float = 45.0
    #: Until all that are to come have answered.
    all_answers_s: float = 20.0
    #: How long a session may refuse to be closed.
    closing_s: float = 15.0
