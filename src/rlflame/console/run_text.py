"""What there is to say about a run, whichever way it is shown. Must not know: how it is shown."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlflame import __version__
from rlflame.console.recipe_summary import format_evaluation
from rlflame.console.run_progress import RunProgress
from rlflame.terminal_text import format_count, format_duration

if TYPE_CHECKING:
    from rlflame.console.base import RunResult, RunStart
    from rlflame.fleet.base import FleetEvent


def format_headline(run: RunStart) -> str:
    """The first line: what runs, and where, if that was for rlflame to choose."""
    place = " on this machine: no Flame cluster is configured" if run.no_cluster else ""
    if run.candidates:
        place = " on this machine and on Flame in turn, and then on the faster of them"
    return f"rlflame {__version__}{place}"


def format_start_lines(run: RunStart, progress: RunProgress) -> list[tuple[str, str]]:
    """What is about to run, as pairs of a word and what there is to say about it."""
    recipe_summary = progress.recipe_summary
    assert recipe_summary is not None
    fleets = run.candidates or ((run.fleet, run.workers),)
    workers = " and ".join(
        format_count(number, "Flame executor" if name == "flame" else "local worker")
        for name, number in fleets
    )
    if run.fleet == "inline":
        workers = "in this process"
    elif max(number for _, number in fleets) < recipe_summary.max_workers:
        workers += f"; at most {recipe_summary.max_workers} can help (learning.rollout.num_slots)"
    else:
        workers += ", the most that can help (learning.rollout.num_slots)"
    lines = [*recipe_summary.format_lines(), ("rollouts", workers), ("folder", str(run.folder))]
    if run.resumed:
        position = (
            f"at step {progress.steps:,}, after {format_count(progress.iteration, 'iteration')}"
        )
        lines.append(("resumed", position))
    return lines


def format_result_lines(result: RunResult, progress: RunProgress) -> list[tuple[str, str]]:
    """How it ended, the same way."""
    lines = []
    if result.has_trained:
        elapsed_s, mean = max(progress.elapsed_s, 1e-9), progress.final_return
        speed = (
            f"{format_count(progress.steps_since_start, 'step')} "
            f"({progress.steps_since_start / elapsed_s:,.0f}/s), "
            f"{format_count(progress.episodes_since_start, 'episode')} "
            f"({progress.episodes_since_start / elapsed_s:,.1f}/s)"
        )
        lines.append(("time", f"{format_duration(elapsed_s)}, {speed}"))
        if mean is not None:
            lines.append(("reward", f"{mean:,.2f} (final mean, exploring)"))
    if result.complete and result.evaluation is not None:
        lines.append(("evaluation", format_evaluation(result.evaluation)))
    if result.best is not None and result.best != result.evaluation:
        lines.append(("best", format_evaluation(result.best)))
    lines.append(("files", str(result.folder)))
    if not result.has_trained:
        lines.append(("to go on", result.resume_command))
    if result.complete and result.best is not None:
        lines.append(("next", result.evaluation_command))
    return lines


def format_status(result: RunResult) -> str:
    if not result.has_trained:
        return f"This run was finished already, at step {result.progress.steps:,}"
    if result.complete and result.progress.reached:
        return f"Finished: --until-return is reached at step {result.progress.steps:,}"
    return "Finished" if result.complete else "Stopped"


def format_retry(event: FleetEvent) -> str:
    return f"Slot {event.slot} is collected again; its worker: {event.text}."
