"""What the executors' answers mean, compared with this machine.

Pure: answers in, findings out. Must not know: how executors are asked.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from rlflame.fleet.flame.bundle import PINNED
from rlflame.fleet.flame.check.findings import (
    Finding,
    make_failure,
    make_ok,
    make_warning,
    shorten_error,
)
from rlflame.fleet.flame.check.probe import ExecutorReport, ProbeResult
from rlflame.fleet.flame.check.stale_runs import CLEAN_COMMAND
from rlflame.terminal_text import format_count

#: Clocks are compared by the seconds that files and logs show.
_SKEW_S = 1.0
_SLOW_MS = 100.0
_MAX_LINES = 8


def make_findings(
    result: ProbeResult, local_greeting: dict[str, Any], cache: str = ""
) -> list[Finding]:
    """All that was learned; `cache` is what references carry that this machine puts there."""
    findings = [_check_answers(result)]
    if cache and result.caches - {cache}:
        findings.append(_make_cache_warning(sorted(result.caches - {cache}), cache))
    if result.reports:
        findings += [
            _check_machines(result.reports, local_greeting),
            _check_packages(result.reports, local_greeting),
            _check_clocks(result.reports),
        ]
    if result.round_trips_s:
        findings.append(_check_round_trips(result.round_trips_s))
    return findings


def make_skipped_finding(reason: str, *fixes: str) -> Finding:
    return make_warning("probe", f"no executor was asked: {reason}", *fixes)


def _check_answers(result: ProbeResult) -> Finding:
    hosts = {report.greeting["host"] for report in result.reports}
    facts: dict[str, Any] = {
        "executors": len(result.reports),
        "hosts": sorted(hosts),
        "wanted": result.target,
        "cold_start_s": result.cold_start_s,
    }
    if result.problem:
        fixes = [result.hint] if result.hint and "cluster-check" not in result.hint else []
        if result.is_silent:
            fixes.append(
                "the checks of nodes, executors and scheduling say why, where they can; else see "
                "the executor manager's log under FLAME_HOME/logs; its Python must be of the same "
                "minor version as here"
            )
        return make_failure(
            "probe",
            shorten_error(result.problem),
            *(fixes or ["rlflame cluster-check again"]),
            **facts,
        )
    summary = (
        f"{format_count(len(result.reports), 'executor')} on "
        f"{format_count(len(hosts), 'host')} answered"
    )
    cold = f"the first after {result.cold_start_s or 0.0:.1f} s"
    if result.cleanup_problem:
        return make_warning(
            "probe",
            f"{summary}, {cold}; its session could not be removed: {result.cleanup_problem}",
            f"in half a minute: {CLEAN_COMMAND}",
            **facts,
        )
    if len(result.reports) < result.target:
        return make_ok(
            "probe", f"{summary} of {result.target} that there is room for, {cold}", **facts
        )
    return make_ok("probe", f"{summary}, {cold}", **facts)


def _make_cache_warning(other_caches: Sequence[str], local_cache: str) -> Finding:
    return make_warning(
        "results",
        f"executors put theirs into {', '.join(other_caches)}, this machine puts weights into "
        f"{local_cache} "
        "and fetches results from there alone",
        f"export FLAME_CACHE_ENDPOINT={other_caches[0]}",
        caches=[*other_caches, local_cache],
    )


def _check_machines(reports: Sequence[ExecutorReport], local_greeting: dict[str, Any]) -> Finding:
    lines, differing = [], set()
    by_host: dict[str, list[ExecutorReport]] = {}
    for report in reports:
        by_host.setdefault(report.greeting["host"], []).append(report)
    for host, group in by_host.items():
        greeting = group[0].greeting
        lines.append(
            f"{host}: {format_count(len(group), 'executor')}, Python {greeting['python']}, "
            f"{greeting['processor']}, {greeting['cores']} processors, "
            f"{greeting['memory_bytes'] / (1 << 30):.1f} GiB, "
            f"renderers: {', '.join(greeting.get('graphics', [])) or 'none'}"
        )
        differing |= {
            f"{word} {greeting[name]} (here {local_greeting[name]}) on {host}"
            for name, word in (("processor", ""), ("libc", "libc"), ("system", "system"))
            if greeting[name] != local_greeting[name]
        }
    notes = lines[:_MAX_LINES] + (
        [f"and {len(lines) - _MAX_LINES} more"] * (len(lines) > _MAX_LINES)
    )
    facts: dict[str, Any] = {
        "executors": [{**report.greeting, "skew_s": report.skew_s} for report in reports]
    }
    if not differing:
        return make_ok("workers", "machines like this one", notes=notes, **facts)
    return make_warning(
        "workers",
        f"differ in {', '.join(sorted(text.strip() for text in differing))}; results can differ "
        "in their last bits from those of this machine",
        "none needed where bits may differ; for equal bits use machines of one kind",
        notes=notes,
        **facts,
    )


def _check_packages(reports: Sequence[ExecutorReport], local_greeting: dict[str, Any]) -> Finding:
    """What a run would look at: the packages that environments are made of."""
    local_packages = local_greeting["packages"]
    lacks: dict[str, list[str]] = {}
    has: dict[str, list[str]] = {}
    for host, greeting in {report.greeting["host"]: report.greeting for report in reports}.items():
        executor_packages = greeting["packages"]
        absent = [
            name for name in PINNED if name in local_packages and name not in executor_packages
        ]
        other = [
            f"{name} {executor_packages[name]} (here {local_packages[name]})"
            for name in PINNED
            if name in local_packages
            and name in executor_packages
            and executor_packages[name] != local_packages[name]
        ]
        if absent:
            lacks.setdefault(f"{', '.join(absent)} absent", []).append(host)
        if other:
            has.setdefault(", ".join(other), []).append(host)
    if not lacks and not has:
        return make_ok("packages", "as on this machine: a run installs nothing", differ={})
    differ = {**lacks, **has}
    seen = "; ".join(f"{text} on {', '.join(hosts)}" for text, hosts in differ.items())
    bits = "; used as they are, they can change the last bits of results" if has else ""
    return make_warning(
        "packages",
        f"{seen}: each run installs them first{bits}",
        "none needed where executors reach a package index; to spare runs the wait, give the "
        "executors an image like compose/executor.Dockerfile",
        differ=differ,
    )


def _check_clocks(reports: Sequence[ExecutorReport]) -> Finding:
    worst = max(reports, key=lambda report: abs(report.skew_s))
    skew_s = worst.skew_s
    if abs(skew_s) < _SKEW_S:
        return make_ok("clocks", "agree to the second", skew_s=skew_s)
    return make_warning(
        "clocks",
        f"that of {worst.greeting['host']} is {abs(skew_s):.0f} s "
        f"{'ahead' if skew_s > 0 else 'behind'}"
        "; results do not depend on it, logs and certificates do",
        f"on {worst.greeting['host']}: timedatectl set-ntp true",
        skew_s=skew_s,
    )


def _check_round_trips(round_trips_s: Sequence[float]) -> Finding:
    p50_ms, p95_ms = (1000 * compute_percentile(round_trips_s, share) for share in (0.5, 0.95))
    facts: dict[str, Any] = {"number": len(round_trips_s), "p50_ms": p50_ms, "p95_ms": p95_ms}
    seen = f"round trip of an empty task {p50_ms:.0f} ms, 95% within {p95_ms:.0f} ms"
    if p50_ms <= _SLOW_MS:
        return make_ok("tasks", seen, **facts)
    return make_warning(
        "tasks",
        f"{seen}: the cluster is far away, or busy",
        "bigger tasks hide it: more rollout.steps or rollout.envs_per_slot",
        **facts,
    )


def compute_percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least this share of all do not exceed."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]
