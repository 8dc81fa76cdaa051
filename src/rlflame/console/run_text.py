"""What there is to say about a run, whichever way it is shown. Must not know: how it is shown."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlflame import __version__
from rlflame.console.progress import Board
from rlflame.console.recipe_summary import interval
from rlflame.text import format_count, format_duration

if TYPE_CHECKING:
    from rlflame.console.base import RunResult, RunStart
    from rlflame.fleet.base import FleetEvent


def headline(run: RunStart) -> str:
    """The first line: what runs, and where, if that was for rlflame to choose."""
    chosen = " on this machine: no Flame cluster is configured" if run.no_cluster else ""
    if run.candidates:
        chosen = " on this machine and on Flame in turn, and then on the faster of them"
    return f"rlflame {__version__}{chosen}"


def banner(run: RunStart, board: Board) -> list[tuple[str, str]]:
    """What is about to run, as pairs of a word and what there is to say about it."""
    facts = board.facts
    assert facts is not None
    sides = run.candidates or ((run.fleet, run.workers),)
    workers = " and ".join(
        format_count(number, "Flame executor" if name == "flame" else "local worker")
        for name, number in sides
    )
    if run.fleet == "inline":
        workers = "in this process"
    elif max(number for _, number in sides) < facts.most_workers:
        workers += f"; at most {facts.most_workers} can help (learning.rollout.num_slots)"
    else:
        workers += ", the most that can help (learning.rollout.num_slots)"
    lines = [*facts.lines(), ("rollouts", workers), ("folder", str(run.folder))]
    if run.resumed:
        where = f"at step {board.steps:,}, after {format_count(board.iteration, 'iteration')}"
        lines.append(("resumed", where))
    return lines


def closing(result: RunResult, board: Board) -> list[tuple[str, str]]:
    """How it ended, the same way."""
    lines = []
    if result.began:
        seconds, mean = max(board.elapsed_s, 1e-9), board.final_return
        speed = (
            f"{format_count(board.own_steps, 'step')} ({board.own_steps / seconds:,.0f}/s), "
            f"{format_count(board.own_episodes, 'episode')} ({board.own_episodes / seconds:,.1f}/s)"
        )
        lines.append(("time", f"{format_duration(seconds)}, {speed}"))
        if mean is not None:
            lines.append(("reward", f"{mean:,.2f} (final mean, exploring)"))
    if result.complete and result.evaluation is not None:
        lines.append(("evaluation", interval(result.evaluation)))
    if result.best is not None and result.best != result.evaluation:
        lines.append(("best", interval(result.best)))
    lines.append(("files", str(result.folder)))
    if not result.began:
        lines.append(("to go on", result.onward))
    if result.complete and result.best is not None:
        lines.append(("next", result.scoring))
    return lines


def ending(result: RunResult) -> str:
    if not result.began:
        return f"This run was finished already, at step {result.progress.steps:,}"
    if result.complete and result.progress.reached:
        return f"Finished: --until-return is reached at step {result.progress.steps:,}"
    return "Finished" if result.complete else "Stopped"


def again(event: FleetEvent) -> str:
    return f"Slot {event.slot} is collected again; its worker: {event.text}."
