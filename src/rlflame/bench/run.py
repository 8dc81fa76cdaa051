"""Whole benchmarks: what is measured is kept as it comes, and told at the end, however it ends.

Must not know: the command line, how anything is timed.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Protocol

from rlflame.analysis.plots.chart import Drawing
from rlflame.analysis.plots.matplotlib_backend import PlotUnavailable
from rlflame.analysis.report import markdown
from rlflame.analysis.report.document import Document
from rlflame.bench import scaling_result, scaling_runs
from rlflame.bench.action_trace import Script
from rlflame.bench.base import Case, Cell
from rlflame.bench.learners import Side, Together
from rlflame.bench.learners_result import Learned
from rlflame.bench.machine_load import Watch
from rlflame.bench.output import Folder
from rlflame.bench.physics_limit import WAYS, Bare
from rlflame.bench.published import Comparison
from rlflame.bench.replay import Filling, fill_in_turn
from rlflame.bench.replay_result import Filled
from rlflame.bench.rollouts import Collecting, Limit, Rate, SideBySide, alternate
from rlflame.bench.rollouts_result import Rates
from rlflame.bench.scaling import Scaling
from rlflame.bench.session import Session, measured
from rlflame.config.runtime import RuntimeSettings
from rlflame.console.output import as_json_text, say_aside, say_lines
from rlflame.errors import RlflameError, after_results
from rlflame.training.trainer import StopNow


def scale(
    work: Sequence[Case],
    runtime: RuntimeSettings,
    kinds: Sequence[str],
    counts: Sequence[int],
    repeat: int,
    out: Path | None,
    *,
    theirs: Comparison | None = None,
    as_json: bool = False,
    debug: bool = False,
) -> None:
    folder = Folder(out, "scaling") if out is not None else None
    watch = Watch(kinds)
    cells: list[Cell] = []

    def result(complete: bool) -> scaling_result.Result:
        return scaling_result.Result(work, cells, watch.over(), complete, theirs)

    def kept(here: Session) -> None:
        so_far = result(False)
        _keep(
            here,
            folder,
            scaling_runs.facts(so_far),
            scaling_result.document(so_far),
            scaling_runs.table(so_far),
        )

    def measure(here: Session) -> bool:
        return Scaling(
            work, kinds, counts, repeat, here.open, here.stop,
            tell=here.tell, note=here.note, kept=partial(kept, here), retried=here.retried,
            cells=cells,
        ).run()  # fmt: skip

    def told(complete: bool) -> bool:
        if cells:
            whole = result(complete)
            facts, document = scaling_runs.facts(whole), scaling_result.document(whole)
            tell(facts, document, folder, scaling_runs.table(whole), as_json=as_json)
        return bool(cells)

    measured(runtime, debug, measure, told, out)


def collect(
    case: Case,
    runtime: RuntimeSettings,
    kind: str,
    counts: Sequence[int],
    seconds: float,
    repeat: int,
    out: Path | None,
    *,
    limited: bool = True,
    as_json: bool = False,
    debug: bool = False,
) -> None:
    folder = Folder(out, "rollouts") if out is not None else None
    watch = Watch([kind])
    rates: list[Rate] = []

    def result(complete: bool) -> Rates:
        some = [rate for rate in rates if rate.steps_per_s]
        return Rates(case, some, watch.over(), complete)

    def with_count(here: Session, count: int) -> bool:
        rate = Rate(kind, count)
        if not _rate(here, case, rate, rates, seconds, repeat, limited):
            return False
        said = f"{median(rate.steps_per_s):,.0f} steps/s (median of {len(rate.steps_per_s)})"
        here.note(f"{kind} with {count}: {said}")
        so_far = result(False)
        _keep(here, folder, so_far.facts(), so_far.document())
        return True

    def measure(here: Session) -> bool:
        return all(with_count(here, count) for count in counts)

    def told(complete: bool) -> bool:
        whole = result(complete)
        if whole.rates:
            tell(whole.facts(), whole.document(), folder, as_json=as_json)
        return bool(whole.rates)

    measured(runtime, debug, measure, told, out)


def fill(
    case: Case,
    runtime: RuntimeSettings,
    kinds: Sequence[str],
    counts: Sequence[int],
    repeat: int,
    out: Path | None,
    *,
    as_json: bool = False,
    debug: bool = False,
) -> None:
    folder = Folder(out, "replay") if out is not None else None
    watch = Watch(kinds)
    fillings: list[Filling] = []

    def result(complete: bool) -> Filled:
        some = [filling for filling in fillings if filling.fills]
        return Filled(case, some, watch.over(), complete)

    def with_count(here: Session, count: int) -> bool:
        with ExitStack() as stack:
            # This process is one worker, whatever it is asked for.
            mine = [kind for kind in kinds if kind != "inline" or count == min(counts)]
            opened = {kind: stack.enter_context(here.open(kind, count)) for kind in mine}
            return fill_in_turn(
                case, opened, count, repeat, here.stop, fillings, here.tell, here.retried
            )

    def told(complete: bool) -> bool:
        whole = result(complete)
        if whole.fillings:
            tell(whole.facts(), whole.document(), folder, as_json=as_json)
        return bool(whole.fillings)

    def measure(here: Session) -> bool:
        for count in counts:
            if not with_count(here, count):
                return False
            so_far = result(False)
            _keep(here, folder, so_far.facts(), so_far.document())
        return True

    measured(runtime, debug, measure, told, out)


def learn(
    case: Case,
    runtime: RuntimeSettings,
    counts: Sequence[int],
    repeat: int,
    out: Path | None,
    *,
    as_json: bool = False,
    debug: bool = False,
) -> None:
    folder = Folder(out, "learners") if out is not None else None
    watch = Watch()
    sides: list[Side] = []

    def measure(here: Session) -> bool:
        return Together(
            case, counts, repeat, runtime, lambda: here.open("inline", 1), here.stop, here.tell,
            sides=sides,
        ).run()  # fmt: skip

    def told(complete: bool) -> bool:
        some = [side for side in sides if side.runs]
        if some:
            whole = Learned(case, some, watch.over(), complete)
            tell_whole(whole, folder, as_json=as_json)
        return bool(some)

    measured(runtime, debug, measure, told, out)


class Whole(Protocol):
    """What has a table of its own, from which a picture is drawn."""

    def facts(self) -> dict[str, Any]: ...

    def document(self) -> Document: ...

    def table(self) -> list[tuple[object, ...]]: ...


def tell_whole(
    result: Whole, folder: Folder | None, curves: Drawing | None = None, *, as_json: bool
) -> None:
    facts, document, table = result.facts(), result.document(), result.table()
    tell(facts, document, folder, table, curves, as_json=as_json)


def _keep(
    here: Session,
    folder: Folder | None,
    facts: dict[str, Any],
    document: Document,
    table: Sequence[Sequence[object]] = (),
) -> None:
    """What there is so far. Where that fails it goes on: there is another writing at the end."""
    if folder is None:
        return
    try:
        folder.write(facts, document, table)
    except (OSError, RlflameError) as error:
        here.note(f"Nothing is kept yet: {error}")


def _rate(
    here: Session,
    case: Case,
    rate: Rate,
    into: list[Rate],
    seconds: float,
    repeat: int,
    limited: bool,
) -> bool:
    into.append(rate)
    here.tell(f"{rate.fleet} with {rate.workers}: starting")
    apart = rate.fleet == "inline" and rate.workers > 1
    with ExitStack() as stack:
        try:
            fleet = stack.enter_context(here.open(rate.fleet, rate.workers))
            collecting = stack.enter_context(Collecting(case, fleet, here.stop))
            limits = {}
            if limited:
                collecting.warm()
                limits = _limits(here, collecting.script, rate.workers, seconds, stack)
            elif not apart:
                collecting.settle()
            measure = collecting.measure
            if apart:
                measure = stack.enter_context(SideBySide(case, rate.workers, here.stop)).measure
        except StopNow:
            return False
        counted = partial(measure, seconds, rate)
        return alternate(counted, rate, limits, repeat, here.tell, here.retried)


def _limits(
    here: Session, script: Script, workers: int, seconds: float, stack: ExitStack
) -> dict[str, Limit]:
    """Bare stepping, where it is possible, of what a script has."""
    file = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "script.npz"
    script.save(file)
    bare = {way: stack.enter_context(Bare(file, way, workers, seconds, here.stop)) for way in WAYS}
    return {way: one.rate for way, one in bare.items() if one.possible}


def _draw(folder: Folder, curves: Drawing | None) -> None:
    """Last, so that nothing measured is lost where it cannot be drawn."""
    try:
        say_aside(f"written: {folder.draw()}")
        if curves is not None:
            say_aside(f"written: {folder.draw_curves(curves)}")
    except PlotUnavailable as error:
        say_aside(f"no picture: {error.message} {error.hint}")


def tell(
    facts: dict[str, Any],
    document: Document,
    folder: Folder | None,
    table: Sequence[Sequence[object]] = (),
    curves: Drawing | None = None,
    *,
    as_json: bool,
) -> None:
    """Said and written, and each also where the other fails; of a table there is a picture."""
    try:
        say_lines(as_json_text(facts, indent=1) if as_json else markdown.written(document).rstrip())
    finally:
        with after_results():
            if folder is not None:
                for file in folder.write(facts, document, table):
                    say_aside(f"written: {file}")
                if table:
                    _draw(folder, curves)
