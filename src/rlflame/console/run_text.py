"""Formats information about a run or a sweep for all displays."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from rlflame import __version__
from rlflame.console.base import RunResult, RunStart, SweepResult
from rlflame.console.output import format_table, shorten_tracebacks
from rlflame.console.recipe_summary import format_evaluation
from rlflame.errors import RlflameError, format_command
from rlflame.fleet.factory import get_worker_noun, has_workers, is_remote
from rlflame.statistics import FEWEST_SEEDS, compute_interquartile_means
from rlflame.storage.sweep_folder import format_seeds
from rlflame.terminal_text import escape_line, format_count, format_duration

if TYPE_CHECKING:
    from rlflame.console.run_progress import RunProgress
    from rlflame.storage.sweep_folder import SweepSummary

Pairs = list[tuple[str, str]]


def format_headline(start: RunStart) -> str:
    """Format the first line: the version, and where rlflame chose to run."""
    place = " on this machine: no Flame cluster is configured" if start.no_cluster else ""
    if start.candidates:
        place = " on this machine and on Flame in turn, then on the faster of the two"
    return f"rlflame {__version__}{place}"


def format_start_lines(start: RunStart, progress: RunProgress) -> Pairs:
    """Format the information at the start of a run, as pairs of a name and a text."""
    lines = start.summary.format_lines(format_seeds(tuple(start.checkpoints)))
    lines += [("rollouts", _format_place(start)), ("folder", str(start.folder))]
    if start.is_resume and start.resources is not None:
        count = len(start.finished_seeds)
        position = f"{count} of {len(start.checkpoints)} seeds had already finished"
        lines.append(("resumed", position))
    elif start.is_resume:
        iterations = format_count(progress.row.iteration, "iteration")
        lines.append(("resumed", f"at step {progress.steps:,}, after {iterations}"))
    return lines


def _format_place(start: RunStart) -> str:
    """Describe where the environments of a run are stepped."""
    resources, max_workers = start.resources, start.summary.max_workers
    if resources is not None:
        place = "each in its own process"
        if start.workers:
            place = f"on one fleet: {format_count(start.workers, 'executor')} at most"
        elif resources.workers_per_seed:
            place = f"each with {format_count(resources.workers_per_seed, 'local worker')}"
        seeds = format_count(len(start.checkpoints), "seed")
        return f"{seeds}, {resources.concurrent_seeds} at a time, {place}"
    if not has_workers(start.fleet):
        return "in this process"
    fleets = start.candidates or ((start.fleet, start.workers),)
    workers = " and ".join(
        format_count(number, f"{name.title() if is_remote(name) else name} {get_worker_noun(name)}")
        for name, number in fleets
    )
    return f"{workers}; at most {max_workers} can help (learning.rollout.num_slots)"


def format_note(event: Mapping[str, Any], seed: int | None = None) -> str:
    """Return the sentence that describes an event; empty if it needs none."""
    text = ""
    if event["event"] == "note":
        text = event["text"]
    elif event["event"] == "retried" and event["reason"]:
        text = f"Slot {event['slot']} is collected again. Reason: {event['reason']}."
    return text if seed is None or not text else f"Seed {seed}: {text}"


def format_absent_return(progress: RunProgress) -> str:
    """Return the text to show instead of the mean return while there is none."""
    is_resumed = progress.row.initial_counts[1] > 0
    return f"no episode has ended {'since the run was resumed' if is_resumed else 'yet'}"


def format_failure(seed: int, error: RlflameError) -> str:
    detail = shorten_tracebacks(error.detail).rstrip()
    return f"Seed {seed} failed: {escape_line(error.message)}" + (f"\n{detail}" if detail else "")


def format_seed_counts(progress: RunProgress) -> str:
    """Format the number of seeds in each state, such as `3 running, 1 failed`."""
    states = [row.state for row in progress.rows.values()]
    return ", ".join(
        f"{states.count(state)} {state}"
        for state in ("running", "waiting", "finished", "stopped", "failed")
        if state in states
    )


def format_interquartile_mean(progress: RunProgress) -> str:
    """Format the interquartile mean of the seeds' latest evaluations."""
    scores = [row.score for row in progress.rows.values() if row.score is not None]
    if not scores:
        return "-"
    mean = float(compute_interquartile_means(np.array(scores, np.float64)))
    return f"{mean:,.1f} over {format_count(len(scores), 'seed')}"


def format_status(result: RunResult | SweepResult) -> str:
    """Format the first line of the final summary."""
    if isinstance(result, SweepResult):
        if not result.has_trained:
            return "All seeds have already finished."
        return "Finished" if result.complete else "Failed" if result.failures else "Stopped"
    if not result.has_trained:
        return f"This run already finished at step {result.progress.steps:,}"
    if result.complete and result.progress.reached:
        return f"Finished: --until-return was reached at step {result.progress.steps:,}"
    return "Finished" if result.complete else "Stopped"


def format_seeds_table(result: RunResult | SweepResult) -> list[str]:
    """Format a table of the seeds of a sweep; return no lines for a single run."""
    if not isinstance(result, SweepResult):
        return []
    rows: list[tuple[str, ...]] = [("  seed", "state", "steps", "evaluation", "best")]
    for seed in result.summary.seeds:
        record, score = seed.evaluation, "-"
        if record is not None:
            score = f"{record['mean']:,.1f} [{record['low']:,.1f}, {record['high']:,.1f}]"
        best = "-" if seed.best_return is None else f"{seed.best_return:,.1f}"
        rows.append((f"  {seed.seed}", seed.state, f"{seed.steps:,}", score, best))
    return format_table(rows)


def format_result_lines(result: RunResult | SweepResult, progress: RunProgress) -> Pairs:
    """Format the result of a run or sweep as pairs of a name and a text."""
    lines, files = [], ("files", str(result.folder))
    if result.has_trained:
        elapsed_s, episodes = max(progress.elapsed_s, 1e-9), progress.episodes_since_start
        speed = (
            f"{format_count(progress.steps_since_start, 'step')} "
            f"({progress.steps_since_start / elapsed_s:,.0f}/s), "
            f"{format_count(episodes, 'episode')} ({episodes / elapsed_s:,.1f}/s)"
        )
        lines.append(("time", f"{format_duration(elapsed_s)}, {speed}"))
    if isinstance(result, SweepResult):
        lines += [*_format_statistics(result.summary), files]
        if result.complete:
            lines.append(("next", format_command("report", result.folder)))
        return lines
    if result.has_trained:
        mean = progress.final_return
        text = "" if mean is None else f"{mean:,.2f} (final mean, with exploration)"
        lines.append(("return", text or format_absent_return(progress)))
    if result.complete and result.evaluation is not None:
        lines.append(("evaluation", format_evaluation(result.evaluation)))
    if result.best is not None and result.best != result.evaluation:
        lines.append(("best", format_evaluation(result.best)))
    lines.append(files)
    if not result.has_trained:
        lines.append(("to continue", result.resume_command))
    if result.complete and result.best is not None:
        lines.append(("next", result.evaluation_command))
    return lines


def _format_statistics(summary: SweepSummary) -> Pairs:
    final = summary.final
    if final is None:
        return []
    seeds = f"{final.seeds} of {format_count(len(summary.seeds), 'seed')}"
    interval = ""
    if final.seeds >= FEWEST_SEEDS:
        interval = f", 95% interval [{final.iqm.low:,.1f}, {final.iqm.high:,.1f}]"
    return [("IQM", f"{final.iqm.value:,.1f}{interval} over {seeds}, final evaluations")]
