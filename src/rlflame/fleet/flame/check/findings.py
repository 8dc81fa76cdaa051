"""The findings of `rlflame cluster-check`: one per check, with suggested fixes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

#: A problem with the status `warning` does not prevent runs; one with `failed` may.
Status = Literal["ok", "warning", "failed"]
CheckVerdict = Literal["healthy", "degraded", "unreachable"]
#: The maximum length of an error text. Longer texts are truncated.
_MAX_CHARS = 240
EXIT_CODES: dict[CheckVerdict, int] = {"healthy": 0, "degraded": 1, "unreachable": 3}


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check."""

    check: str
    status: Status
    text: str
    #: Commands or actions that may fix the problem, the most likely one first.
    fixes: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    #: The finding as data, for programs.
    facts: Mapping[str, Any] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        facts = {**asdict(self), "fixes": list(self.fixes), "notes": list(self.notes)}
        return {"seen" if name == "text" else name: value for name, value in facts.items()}


def shorten_error(text: str) -> str:
    return (text if len(text) <= _MAX_CHARS else f"{text[:_MAX_CHARS]} ...").rstrip(" .")


@dataclass(frozen=True)
class Diagnosis:
    """All findings of a cluster check, in order."""

    findings: tuple[Finding, ...]
    #: Whether a Flame cluster is configured. Training works without one.
    is_configured: bool
    #: Whether the session manager and the object cache answered throughout the check.
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
    """The time limits of a cluster check."""

    #: An executor that stays in a transient state for this long is stuck.
    still_s: float = 6.0
    #: The same for Binding, the state in which the worker process starts.
    binding_s: float = 30.0
    #: A run whose lease has not changed for this long is dead: its workers give up after 90 s.
    lease_s: float = 100.0
    #: The same if the driver's process no longer exists on this machine. Containers can share a
    #: host name without sharing processes, so the lease must also miss two renewals.
    gone_s: float = 11.0
    #: How long to wait for the first answer from an executor.
    first_answer_s: float = 45.0
    #: How long to wait for answers from all executors.
    all_answers_s: float = 20.0
    #: How long to retry the removal of a run if the cluster rejects the removal.
    closing_s: float = 15.0
