"""Asks executors to describe their machines, and compares them with this machine."""

from __future__ import annotations

import contextlib
import time
import uuid
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlflame.config.runtime import FlameSettings, RuntimeSettings
from rlflame.errors import FleetError
from rlflame.terminal_text import format_count

from ..client import FlameClient, remove_run
from ..object_cache import Lease
from ..session_starter import (
    PREFIX,
    SessionStarter,
    compare_packages,
    format_versions,
    parse_greeting,
)
from .findings import CheckTimeouts, Finding, shorten_error
from .stale_runs import CLEAN_COMMAND

_PING_COUNT = 20
#: The polling intervals for answers and for pings, whose round trips are measured.
_POLL_S, _PING_POLL_S = 0.05, 0.001
#: The minimum duration of a task, so that every running executor takes one.
_WAIT_S = 0.4
_DELAY_RELEASE_S = 30
_SLOW_MS = 100.0
#: Differences in these fields can change the last bits of results. With another Python version,
#: workers may even fail to start.
_MACHINE_FIELDS = {"processor": "", "libc": "libc ", "system": "system ", "python": "Python "}


@dataclass
class ProbeResult:
    """The answers of executors, and the error that ended the probe, if any."""

    target: int
    cold_start_s: float | None = None
    greetings: list[dict[str, Any]] = field(default_factory=list)
    round_trips_s: list[float] = field(default_factory=list)
    problem: str = ""
    hint: str = ""
    #: Why the probe's session could not be removed completely.
    cleanup_problem: str = ""


def run_probe(
    client: FlameClient,
    timeouts: CheckTimeouts,
    target: int,
    report_progress: Callable[[str], None],
    on_silence: Callable[[], None],
) -> ProbeResult:
    """Query executors in a temporary session, and remove it afterwards.

    `on_silence` is called, with the session still open, if no executor answers.
    """
    result, name = ProbeResult(target), f"{PREFIX}check-{uuid.uuid4().hex[:12]}"
    flame = FlameSettings(
        start_deadline_s=timeouts.first_answer_s, delay_release_s=_DELAY_RELEASE_S
    )
    runtime = RuntimeSettings(workers=target, flame=flame)
    starter = SessionStarter(client, name, {}, runtime, lambda event: report_progress(event.text))
    lease = None
    try:
        lease = Lease(name)  # if this check is killed, later checks can detect that
        started_at = time.monotonic()
        try:
            session = starter.start_session()
        except FleetError:
            on_silence()
            raise
        result.cold_start_s = time.monotonic() - started_at
        result.greetings.append(session.greeting)
        _ask_executors(client, session.session, result, timeouts.all_answers_s)
        for _ in range(_PING_COUNT):
            asked_at = time.monotonic()
            task = client.send_request(session.session, "ping")
            client.wait_for_answer(session.session, task, timeouts.all_answers_s, _PING_POLL_S)
            result.round_trips_s.append(time.monotonic() - asked_at)
    except FleetError as error:
        result.problem, result.hint = error.message, error.hint
    finally:
        if lease is not None:
            with contextlib.suppress(FleetError):
                lease.announce_closing()
            problem = remove_run(client, name, timeouts.closing_s, stop_lease=lease.close)
            result.cleanup_problem = problem
            lease.close()
    return result


def _ask_executors(
    client: FlameClient, session: Any, result: ProbeResult, timeout_s: float
) -> None:
    """Query the session's executors in rounds until all have answered."""
    processes = {_get_process(greeting) for greeting in result.greetings}
    deadline = time.monotonic() + timeout_s
    while len(processes) < result.target and time.monotonic() < deadline:
        count = len(processes)
        for task in [client.send_request(session, "greet", _WAIT_S) for _ in range(result.target)]:
            greeting = parse_greeting(client.wait_for_answer(session, task, timeout_s, _POLL_S))
            if _get_process(greeting) not in processes:
                processes.add(_get_process(greeting))
                result.greetings.append(greeting)
        executors = client.call("list_executors")
        has_more = sum(executor.status.session_id == session.id for executor in executors) > count
        if len(processes) == count and not has_more:
            return


def _get_process(greeting: Mapping[str, Any]) -> tuple[Any, ...]:
    return (greeting["host"], greeting["pid"], greeting["folder"])


def make_findings(result: ProbeResult, local: Mapping[str, Any]) -> list[Finding]:
    """Return the findings of a probe; `local` describes this machine."""
    findings = [_check_answers(result)]
    if result.greetings:
        findings += [
            _check_machines(result.greetings, local),
            _check_packages(result.greetings, local["packages"]),
        ]
    if result.round_trips_s:
        findings.append(_check_round_trips(result.round_trips_s))
    return findings


def _check_answers(result: ProbeResult) -> Finding:
    hosts = sorted({greeting["host"] for greeting in result.greetings})
    number = len(result.greetings)
    facts = {"executors": number, "hosts": hosts, "cold_start_s": result.cold_start_s}
    if result.problem:
        fixes = [result.hint] if result.hint and "cluster-check" not in result.hint else []
        fixes.append(
            "see the nodes, executors and scheduling checks, then the executor manager's log "
            "under FLAME_HOME/logs; its Python must have the same minor version as this one"
        )
        return Finding("probe", "failed", shorten_error(result.problem), tuple(fixes), (), facts)
    text = (
        f"{format_count(number, 'executor')} on {format_count(len(hosts), 'host')} answered, the "
        f"first after {result.cold_start_s or 0.0:.1f} s"
    )
    if result.cleanup_problem:
        text += f"; the probe's session could not be removed: {result.cleanup_problem}"
        fix = f"in 30 seconds, run {CLEAN_COMMAND}"
        return Finding("probe", "warning", text, (fix,), (), facts)
    return Finding("probe", "ok", text, facts=facts)


def format_machine(greeting: Mapping[str, Any]) -> str:
    """Format a description from `describe_host` as one line."""
    return (
        f"{greeting['host']}: Python {greeting['python']}, {greeting['processor']}, "
        f"{greeting['cores']} processors, {greeting['memory_bytes'] / (1 << 30):.1f} GiB"
    )


def _check_machines(greetings: Sequence[dict[str, Any]], local: Mapping[str, Any]) -> Finding:
    counts = Counter(greeting["host"] for greeting in greetings)
    by_host = {greeting["host"]: greeting for greeting in greetings}
    notes = tuple(
        f"{format_machine(greeting)}, {format_count(counts[host], 'executor')}"
        for host, greeting in by_host.items()
    )
    facts = {"executors": list(greetings)}
    differing = {
        f"{word}{greeting[name]} (here {local[name]}) on {host}"
        for host, greeting in by_host.items()
        for name, word in _MACHINE_FIELDS.items()
        if greeting[name] != local[name]
    }
    if not differing:
        return Finding("workers", "ok", "machines of the same kind as this one", (), notes, facts)
    text = f"differ in {', '.join(sorted(differing))}; results may not be bit-identical"
    fix = "needed only for bit-identical results: use machines of the same kind"
    return Finding("workers", "warning", text, (fix,), notes, facts)


def _check_packages(greetings: Sequence[dict[str, Any]], local: Mapping[str, str]) -> Finding:
    """Compare the packages that environments use, as a run does."""
    hosts: dict[str, list[str]] = {}
    for host, remote in {greeting["host"]: greeting["packages"] for greeting in greetings}.items():
        missing, different = compare_packages(remote, local)
        if missing:
            hosts.setdefault(f"{', '.join(missing)} absent", []).append(host)
        if different:
            hosts.setdefault(format_versions(different, remote, local), []).append(host)
    facts = {"differ": hosts}
    if not hosts:
        text = "the same as on this machine: a run installs nothing"
        return Finding("packages", "ok", text, facts=facts)
    text = "; ".join(f"{text} on {', '.join(names)}" for text, names in hosts.items())
    text += "; each run installs them first, because other versions can change the last bits"
    fix = (
        "none needed if executors can reach a package index; to avoid the installation, give the "
        "executors an image built like compose/executor.Dockerfile"
    )
    return Finding("packages", "warning", text, (fix,), (), facts)


def _check_round_trips(round_trips_s: Sequence[float]) -> Finding:
    ordered_ms = sorted(1000.0 * time_s for time_s in round_trips_s)
    p50_ms, p95_ms = (ordered_ms[-(-len(ordered_ms) * share // 100) - 1] for share in (50, 95))
    facts = {"number": len(round_trips_s), "p50_ms": p50_ms, "p95_ms": p95_ms}
    text = f"round trip of an empty task: median {p50_ms:.0f} ms, 95% within {p95_ms:.0f} ms"
    if p50_ms <= _SLOW_MS:
        return Finding("tasks", "ok", text, facts=facts)
    fix = "use larger tasks: raise rollout.steps or rollout.envs_per_slot"
    text += "; the network is slow or the cluster is busy"
    return Finding("tasks", "warning", text, (fix,), (), facts)
