"""The probe: executors are asked what they are, and compared with this machine."""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rlflame.config.runtime import FlameSettings, RuntimeSettings
from rlflame.errors import FleetError
from rlflame.terminal_text import format_count

from ..client import FINAL_STATES, SUCCEED, FlameClient, remove_run
from ..object_cache import Lease
from ..session_starter import (
    PREFIX,
    SessionStarter,
    compare_packages,
    format_versions,
    parse_greeting,
)
from ..timed_call import ClusterCallError
from .findings import Check, CheckTimeouts, Finding, shorten_error
from .stale_runs import CLEAN_COMMAND

_PING_COUNT = 20
#: How often an answer is looked for, and the empty task's, whose round trip is measured.
_POLL_S, _PING_POLL_S = 0.05, 0.001
#: A task lasts at least this long, so that each executor that is up takes one.
_WAIT_S = 0.4
_DELAY_RELEASE_S = 30
#: Void, Idle and Binding on the wire.
_STARTING_STATES = (1, 2, 3)
#: Clocks are compared by the seconds that files and logs show.
_SKEW_S = 1.0
_SLOW_MS = 100.0
_MAX_LINES = 8


@dataclass(frozen=True)
class ExecutorReport:
    """The answer of an executor, with the times of question and answer by this machine's clock."""

    greeting: dict[str, Any]
    sent_at: float
    answered_at: float

    @property
    def executor(self) -> tuple[Any, ...]:
        """Identifies the worker process."""
        return (self.greeting["host"], self.greeting["pid"], self.greeting["folder"])

    @property
    def skew_s(self) -> float:
        """The least error of its clock, which it read between question and answer."""
        clock = float(self.greeting["clock"])
        return max(0.0, clock - self.answered_at) or min(0.0, clock - self.sent_at)


@dataclass
class ProbeResult:
    target: int
    cold_start_s: float | None = None
    reports: list[ExecutorReport] = field(default_factory=list)
    round_trips_s: list[float] = field(default_factory=list)
    #: Whether executors were asked and none answered.
    is_silent: bool = False
    #: The error that ended the probe, and its hint.
    problem: str = ""
    hint: str = ""
    #: The caches that held results.
    caches: set[str] = field(default_factory=set)
    #: Why not everything could be removed afterwards.
    cleanup_problem: str = ""


class Probe:
    """Asks executors in a session of its own, and leaves nothing behind."""

    def __init__(
        self,
        client: FlameClient,
        timeouts: CheckTimeouts,
        target: int,
        report_progress: Callable[[str], None],
    ) -> None:
        self.result = ProbeResult(target)
        self._client = client
        self._timeouts = timeouts
        self._report_progress = report_progress

    def run(self, on_silence: Callable[[], None]) -> ProbeResult:
        """`on_silence` looks at the cluster, with the session still open, if none answers."""
        name = f"{PREFIX}check-{uuid.uuid4().hex[:12]}"
        try:
            lease = Lease(name)  # by which a check that is killed can be told from a live one
            try:
                self._ask(name, lease, on_silence)
            finally:
                lease.close()
        except FleetError as error:
            self.result.problem, self.result.hint = error.message, error.hint
        return self.result

    def _ask(self, name: str, lease: Lease, on_silence: Callable[[], None]) -> None:
        result, timeouts = self.result, self._timeouts
        settings = FlameSettings(
            start_deadline_s=timeouts.first_answer_s, delay_release_s=_DELAY_RELEASE_S
        )
        starter = SessionStarter(
            self._client,
            name,
            {},
            RuntimeSettings(workers=result.target, flame=settings),
            lambda event: self._report_progress(event.text),
            timeouts.clock,
        )
        sent_at, started_at = time.time(), timeouts.clock()
        try:
            try:
                flame = starter.start_session(installs=False)
            except FleetError:
                result.is_silent = True
                on_silence()
                raise
            result.cold_start_s = timeouts.clock() - started_at
            result.reports.append(ExecutorReport(flame.greeting, sent_at, time.time()))
            self._ask_executors(flame.session)
            for _ in range(_PING_COUNT):
                asked_at = time.time()
                task = self._client.send_request(flame.session, "ping")
                ((_, answered_at, _),) = self._await_results(flame.session, [task], _PING_POLL_S)
                result.round_trips_s.append(answered_at - asked_at)
        finally:
            with contextlib.suppress(FleetError):
                lease.announce_closing()
            result.cleanup_problem = remove_run(
                self._client,
                name,
                timeouts.closing_s,
                stop_lease=lease.close,
                clock=timeouts.clock,
                sleep=timeouts.sleep,
            )

    def _ask_executors(self, session: Any) -> None:
        """Ask in rounds until every executor that comes has answered once."""
        reports, target = self.result.reports, self.result.target
        executors = {report.executor for report in reports}
        deadline_s = self._timeouts.clock() + self._timeouts.all_answers_s
        while len(executors) < target and self._timeouts.clock() < deadline_s:
            number, sent_at = len(executors), {}
            for _ in range(target):
                now = time.time()
                sent_at[self._client.send_request(session, "greet", _WAIT_S)] = now
            for task, answered_at, content in self._await_results(session, sent_at, _POLL_S):
                report = ExecutorReport(parse_greeting(content), sent_at[task], answered_at)
                if report.executor not in executors:
                    executors.add(report.executor)
                    reports.append(report)
            states = [
                executor.status.state
                for executor in self._client.call("list_executors")
                if executor.status.session_id == session.id
            ]
            has_more = len(states) > number or any(state in _STARTING_STATES for state in states)
            if len(executors) == number and not has_more:
                break

    def _await_results(
        self, session: Any, tasks: Iterable[str], interval_s: float
    ) -> Iterator[tuple[str, float, memoryview]]:
        """Each task with its result and when that was seen."""
        open_tasks, limit_s = list(tasks), self._timeouts.all_answers_s
        deadline_s = self._timeouts.clock() + limit_s
        while open_tasks:
            if self._timeouts.clock() > deadline_s:
                raise ClusterCallError(
                    f"{format_count(len(open_tasks), 'small task')} not answered in {limit_s:g} s."
                )
            for task in list(open_tasks):
                status = self._client.poll_task(session, task)
                now = time.time()
                if status.state not in FINAL_STATES:
                    continue
                if status.state != SUCCEED:
                    raise FleetError(
                        f"A small task failed ({status.message or 'no reason given'}).",
                        "the executor's log is under FLAME_HOME; rlflame cluster-check again",
                    )
                open_tasks.remove(task)
                reference, content = self._client.fetch_result(session, status)
                self.result.caches.add(reference.endpoint)
                yield task, now, content
            self._timeouts.sleep(interval_s)


def make_findings(result: ProbeResult, local: Mapping[str, Any], cache: str = "") -> list[Finding]:
    """Findings of a probe; `local` describes this machine, and `cache` is the address in
    references that this machine makes."""
    findings = [_check_answers(result)]
    other_caches = sorted(result.caches - {cache})
    if cache and other_caches:
        check = Check("results", caches=[*other_caches, cache])
        findings.append(
            check.make_warning(
                f"executors put theirs into {', '.join(other_caches)}, this machine puts weights "
                f"into {cache} and fetches results from there alone",
                f"export FLAME_CACHE_ENDPOINT={other_caches[0]}",
            )
        )
    if result.reports:
        findings += [
            _check_machines(result.reports, local),
            _check_packages(result.reports, local["packages"]),
            _check_clocks(result.reports),
        ]
    if result.round_trips_s:
        findings.append(_check_round_trips(result.round_trips_s))
    return findings


def _check_answers(result: ProbeResult) -> Finding:
    hosts = sorted({report.greeting["host"] for report in result.reports})
    number = len(result.reports)
    check = Check("probe", executors=number, hosts=hosts)
    check.facts |= {"wanted": result.target, "cold_start_s": result.cold_start_s}
    if result.problem:
        fixes = [result.hint] if result.hint and "cluster-check" not in result.hint else []
        if result.is_silent:
            fixes.append(
                "the checks of nodes, executors and scheduling say why, where they can; else see "
                "the executor manager's log under FLAME_HOME/logs; its Python must be of the same "
                "minor version as here"
            )
        fixes = fixes or ["rlflame cluster-check again"]
        return check.make_failure(shorten_error(result.problem), *fixes)
    seen = f"{format_count(number, 'executor')} on {format_count(len(hosts), 'host')} answered"
    if number < result.target and not result.cleanup_problem:
        seen += f" of {result.target} that there is room for"
    seen += f", the first after {result.cold_start_s or 0.0:.1f} s"
    if result.cleanup_problem:
        return check.make_warning(
            f"{seen}; its session could not be removed: {result.cleanup_problem}",
            f"in half a minute: {CLEAN_COMMAND}",
        )
    return check.make_ok(seen)


def format_machine(greeting: Mapping[str, Any]) -> str:
    """The description that `describe_host` makes, in one line."""
    return (
        f"{greeting['host']}: Python {greeting['python']}, {greeting['processor']}, "
        f"{greeting['cores']} processors, {greeting['memory_bytes'] / (1 << 30):.1f} GiB"
    )


def _check_machines(reports: Sequence[ExecutorReport], local: Mapping[str, Any]) -> Finding:
    facts = [{**report.greeting, "skew_s": report.skew_s} for report in reports]
    check = Check("workers", executors=facts)
    by_host: dict[str, list[ExecutorReport]] = {}
    for report in reports:
        by_host.setdefault(report.greeting["host"], []).append(report)
    notes, differing = [], set()
    for host, group in by_host.items():
        greeting = group[0].greeting
        notes.append(f"{format_machine(greeting)}, {format_count(len(group), 'executor')}")
        differing |= {
            f"{word}{greeting[name]} (here {local[name]}) on {host}"
            for name, word in (("processor", ""), ("libc", "libc "), ("system", "system "))
            if greeting[name] != local[name]
        }
    if len(notes) > _MAX_LINES:
        notes[_MAX_LINES:] = [f"and {len(notes) - _MAX_LINES} more"]
    if not differing:
        return check.make_ok("machines like this one", notes=notes)
    return check.make_warning(
        f"differ in {', '.join(sorted(differing))}; results can differ in their last bits from "
        "those of this machine",
        "none needed where bits may differ; for equal bits use machines of one kind",
        notes=notes,
    )


def _check_packages(reports: Sequence[ExecutorReport], local: Mapping[str, str]) -> Finding:
    """The packages that environments use, as a run compares them."""
    hosts: dict[str, list[str]] = {}
    can_change_bits = False
    for host, greeting in {report.greeting["host"]: report.greeting for report in reports}.items():
        remote = greeting["packages"]
        absent, different = compare_packages(remote, local)
        can_change_bits |= bool(different)
        if absent:
            hosts.setdefault(f"{', '.join(absent)} absent", []).append(host)
        if different:
            hosts.setdefault(format_versions(different, remote, local), []).append(host)
    check = Check("packages", differ=hosts)
    if not hosts:
        return check.make_ok("as on this machine: a run installs nothing")
    seen = "; ".join(f"{text} on {', '.join(names)}" for text, names in hosts.items())
    bits = "; used as they are, they can change the last bits of results" if can_change_bits else ""
    return check.make_warning(
        f"{seen}: each run installs them first{bits}",
        "none needed where executors reach a package index; to spare runs the wait, give the "
        "executors an image like compose/executor.Dockerfile",
    )


def _check_clocks(reports: Sequence[ExecutorReport]) -> Finding:
    worst = max(reports, key=lambda report: abs(report.skew_s))
    skew_s, host = worst.skew_s, worst.greeting["host"]
    check = Check("clocks", skew_s=skew_s)
    if abs(skew_s) < _SKEW_S:
        return check.make_ok("agree to the second")
    return check.make_warning(
        f"that of {host} is {abs(skew_s):.0f} s {'ahead' if skew_s > 0 else 'behind'}; results do "
        "not depend on it, logs and certificates do",
        f"on {host}: timedatectl set-ntp true",
    )


def _check_round_trips(round_trips_s: Sequence[float]) -> Finding:
    percentiles_s = np.percentile(round_trips_s, (50, 95), method="inverted_cdf")
    p50_ms, p95_ms = (1000.0 * percentiles_s).tolist()
    check = Check("tasks", number=len(round_trips_s), p50_ms=p50_ms, p95_ms=p95_ms)
    seen = f"round trip of an empty task {p50_ms:.0f} ms, 95% within {p95_ms:.0f} ms"
    if p50_ms <= _SLOW_MS:
        return check.make_ok(seen)
    return check.make_warning(
        f"{seen}: the cluster is far away, or busy",
        "bigger tasks hide it: more rollout.steps or rollout.envs_per_slot",
    )
