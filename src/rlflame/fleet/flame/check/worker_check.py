"""What the executors' answers mean, compared with this machine.

Pure: answers in, findings out. Must not know: how executors are asked.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from rlflame.fleet.flame.bundle import PINNED
from rlflame.fleet.flame.check.findings import Finding, brief, failed, ok, warning
from rlflame.fleet.flame.check.probe import Answers, Greeting
from rlflame.fleet.flame.check.stale_runs import CLEAN
from rlflame.text import format_count

#: Clocks are compared by the seconds that files and logs show.
_SKEW_S = 1.0
_SLOW_MS = 100.0
_SHOWN = 8


def findings(answers: Answers, here: dict[str, Any], cache: str = "") -> list[Finding]:
    """All that was learned; `cache` is what references carry that this machine puts there."""
    found = [_answered(answers)]
    if cache and answers.caches - {cache}:
        found.append(_elsewhere(sorted(answers.caches - {cache}), cache))
    if answers.greetings:
        found += [
            _machines(answers.greetings, here),
            _packages(answers.greetings, here),
            _clocks(answers.greetings),
        ]
    if answers.round_trips_s:
        found.append(_tasks(answers.round_trips_s))
    return found


def not_asked(why: str, *fixes: str) -> Finding:
    return warning("probe", f"no executor was asked: {why}", *fixes)


def _answered(answers: Answers) -> Finding:
    hosts = {greeting.said["host"] for greeting in answers.greetings}
    facts: dict[str, Any] = {
        "executors": len(answers.greetings),
        "hosts": sorted(hosts),
        "wanted": answers.wanted,
        "cold_start_s": answers.cold_start_s,
    }
    if answers.problem:
        fixes = [answers.hint] if answers.hint and "cluster-check" not in answers.hint else []
        if answers.silence:
            fixes.append(
                "the checks of nodes, executors and scheduling say why, where they can; else see "
                "the executor manager's log under FLAME_HOME/logs; its Python must be of the same "
                "minor version as here"
            )
        return failed(
            "probe", brief(answers.problem), *(fixes or ["rlflame cluster-check again"]), **facts
        )
    came = (
        f"{format_count(len(answers.greetings), 'executor')} on "
        f"{format_count(len(hosts), 'host')} answered"
    )
    cold = f"the first after {answers.cold_start_s or 0.0:.1f} s"
    if answers.left:
        return warning(
            "probe",
            f"{came}, {cold}; its session could not be removed: {answers.left}",
            f"in half a minute: {CLEAN}",
            **facts,
        )
    if len(answers.greetings) < answers.wanted:
        return ok("probe", f"{came} of {answers.wanted} that there is room for, {cold}", **facts)
    return ok("probe", f"{came}, {cold}", **facts)


def _elsewhere(theirs: Sequence[str], ours: str) -> Finding:
    return warning(
        "results",
        f"executors put theirs into {', '.join(theirs)}, this machine puts weights into {ours} "
        "and fetches results from there alone",
        f"export FLAME_CACHE_ENDPOINT={theirs[0]}",
        caches=[*theirs, ours],
    )


def _machines(greetings: Sequence[Greeting], here: dict[str, Any]) -> Finding:
    lines, differing = [], set()
    by_host: dict[str, list[Greeting]] = {}
    for greeting in greetings:
        by_host.setdefault(greeting.said["host"], []).append(greeting)
    for host, group in by_host.items():
        said = group[0].said
        lines.append(
            f"{host}: {format_count(len(group), 'executor')}, Python {said['python']}, "
            f"{said['processor']}, {said['cores']} processors, "
            f"{said['memory_bytes'] / (1 << 30):.1f} GiB, "
            f"renderers: {', '.join(said.get('graphics', [])) or 'none'}"
        )
        differing |= {
            f"{word} {said[name]} (here {here[name]}) on {host}"
            for name, word in (("processor", ""), ("libc", "libc"), ("system", "system"))
            if said[name] != here[name]
        }
    notes = lines[:_SHOWN] + ([f"and {len(lines) - _SHOWN} more"] * (len(lines) > _SHOWN))
    facts: dict[str, Any] = {
        "executors": [{**greeting.said, "skew_s": greeting.skew_s} for greeting in greetings]
    }
    if not differing:
        return ok("workers", "machines like this one", notes=notes, **facts)
    return warning(
        "workers",
        f"differ in {', '.join(sorted(text.strip() for text in differing))}; results can differ "
        "in their last bits from those of this machine",
        "none needed where bits may differ; for equal bits use machines of one kind",
        notes=notes,
        **facts,
    )


def _packages(greetings: Sequence[Greeting], here: dict[str, Any]) -> Finding:
    """What a run would look at: the packages that environments are made of."""
    mine = here["packages"]
    lacks: dict[str, list[str]] = {}
    has: dict[str, list[str]] = {}
    for host, said in {greeting.said["host"]: greeting.said for greeting in greetings}.items():
        theirs = said["packages"]
        absent = [name for name in PINNED if name in mine and name not in theirs]
        other = [
            f"{name} {theirs[name]} (here {mine[name]})"
            for name in PINNED
            if name in mine and name in theirs and theirs[name] != mine[name]
        ]
        if absent:
            lacks.setdefault(f"{', '.join(absent)} absent", []).append(host)
        if other:
            has.setdefault(", ".join(other), []).append(host)
    if not lacks and not has:
        return ok("packages", "as on this machine: a run installs nothing", differ={})
    differ = {**lacks, **has}
    seen = "; ".join(f"{text} on {', '.join(hosts)}" for text, hosts in differ.items())
    bits = "; used as they are, they can change the last bits of results" if has else ""
    return warning(
        "packages",
        f"{seen}: each run installs them first{bits}",
        "none needed where executors reach a package index; to spare runs the wait, give the "
        "executors an image like compose/executor.Dockerfile",
        differ=differ,
    )


def _clocks(greetings: Sequence[Greeting]) -> Finding:
    worst = max(greetings, key=lambda greeting: abs(greeting.skew_s))
    skew_s = worst.skew_s
    if abs(skew_s) < _SKEW_S:
        return ok("clocks", "agree to the second", skew_s=skew_s)
    return warning(
        "clocks",
        f"that of {worst.said['host']} is {abs(skew_s):.0f} s {'ahead' if skew_s > 0 else 'behind'}"
        "; results do not depend on it, logs and certificates do",
        f"on {worst.said['host']}: timedatectl set-ntp true",
        skew_s=skew_s,
    )


def _tasks(round_trips_s: Sequence[float]) -> Finding:
    p50_ms, p95_ms = (1000 * percentile(round_trips_s, share) for share in (0.5, 0.95))
    facts: dict[str, Any] = {"number": len(round_trips_s), "p50_ms": p50_ms, "p95_ms": p95_ms}
    seen = f"round trip of an empty task {p50_ms:.0f} ms, 95% within {p95_ms:.0f} ms"
    if p50_ms <= _SLOW_MS:
        return ok("tasks", seen, **facts)
    return warning(
        "tasks",
        f"{seen}: the cluster is far away, or busy",
        "bigger tasks hide it: more rollout.steps or rollout.envs_per_slot",
        **facts,
    )


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least this share of all do not exceed."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]
