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

from rlflame.analysis.plots.chart import Plot
from rlflame.analysis.plots.matplotlib_backend import PlotUnavailableError
from rlflame.analysis.report.document import Document, to_markdown
from rlflame.bench import scaling_report, scaling_runs
from rlflame.bench.action_trace import ActionTrace
from rlflame.bench.base import Case, Cell
from rlflame.bench.learners import LearnersBenchmark, LearnerSide
from rlflame.bench.learners_report import LearnersResult
from rlflame.bench.machine_load import LoadMonitor
from rlflame.bench.output import ResultFolder
from rlflame.bench.physics_limit import WAYS, RawSteppingProcesses
from rlflame.bench.published import PublishedComparison
from rlflame.bench.replay import FillSeries, fill_in_turn
from rlflame.bench.replay_report import ReplayResult
from rlflame.bench.rollouts import CollectorProcesses, Limit, RolloutRate, TimedRounds, alternate
from rlflame.bench.rollouts_report import RolloutsResult
from rlflame.bench.scaling import ScalingBenchmark
from rlflame.bench.session import BenchSession, run_measurement
from rlflame.config.runtime import RuntimeSettings
from rlflame.console.output import as_json_text, print_note, print_result_lines
from rlflame.errors import RlflameError, mark_errors_documented
from rlflame.training.trainer import StopInterrupt


def run_scaling(
    work: Sequence[Case],
    runtime: RuntimeSettings,
    kinds: Sequence[str],
    counts: Sequence[int],
    repeat: int,
    out: Path | None,
    *,
    published: PublishedComparison | None = None,
    as_json: bool = False,
    debug: bool = False,
) -> None:
    folder = ResultFolder(out, "scaling") if out is not None else None
    watch = LoadMonitor(kinds)
    cells: list[Cell] = []

    def make_result(complete: bool) -> scaling_report.ScalingResult:
        return scaling_report.ScalingResult(work, cells, watch.finish(), complete, published)

    def save_partial(session: BenchSession) -> None:
        so_far = make_result(False)
        _save_partial(
            session,
            folder,
            scaling_runs.make_facts(so_far),
            scaling_report.make_document(so_far),
            scaling_runs.make_table(so_far),
        )

    def measure(session: BenchSession) -> bool:
        return ScalingBenchmark(
            work, kinds, counts, repeat, session.open, session.stop,
            show_status=session.show_status, note=session.note,
            save_partial=partial(save_partial, session), take_retried=session.take_retried,
            cells=cells,
        ).run()  # fmt: skip

    def report(complete: bool) -> bool:
        if cells:
            final = make_result(complete)
            facts, document = scaling_runs.make_facts(final), scaling_report.make_document(final)
            report_results(facts, document, folder, scaling_runs.make_table(final), as_json=as_json)
        return bool(cells)

    run_measurement(runtime, debug, measure, report, out)


def run_rollouts(
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
    folder = ResultFolder(out, "rollouts") if out is not None else None
    watch = LoadMonitor([kind])
    rates: list[RolloutRate] = []

    def make_result(complete: bool) -> RolloutsResult:
        some = [rate for rate in rates if rate.steps_per_s]
        return RolloutsResult(case, some, watch.finish(), complete)

    def measure_count(session: BenchSession, count: int) -> bool:
        rate = RolloutRate(kind, count)
        if not _measure_rate(session, case, rate, rates, seconds, repeat, limited):
            return False
        message = f"{median(rate.steps_per_s):,.0f} steps/s (median of {len(rate.steps_per_s)})"
        session.note(f"{kind} with {count}: {message}")
        so_far = make_result(False)
        _save_partial(session, folder, so_far.to_facts(), so_far.to_document())
        return True

    def measure(session: BenchSession) -> bool:
        return all(measure_count(session, count) for count in counts)

    def report(complete: bool) -> bool:
        final = make_result(complete)
        if final.rates:
            report_results(final.to_facts(), final.to_document(), folder, as_json=as_json)
        return bool(final.rates)

    run_measurement(runtime, debug, measure, report, out)


def run_replay(
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
    folder = ResultFolder(out, "replay") if out is not None else None
    watch = LoadMonitor(kinds)
    fillings: list[FillSeries] = []

    def make_result(complete: bool) -> ReplayResult:
        some = [filling for filling in fillings if filling.fills]
        return ReplayResult(case, some, watch.finish(), complete)

    def measure_count(session: BenchSession, count: int) -> bool:
        with ExitStack() as stack:
            # This process is one worker, whatever it is asked for.
            open_kinds = [kind for kind in kinds if kind != "inline" or count == min(counts)]
            opened = {kind: stack.enter_context(session.open(kind, count)) for kind in open_kinds}
            return fill_in_turn(
                case,
                opened,
                count,
                repeat,
                session.stop,
                fillings,
                session.show_status,
                session.take_retried,
            )

    def report(complete: bool) -> bool:
        final = make_result(complete)
        if final.fillings:
            report_results(final.to_facts(), final.to_document(), folder, as_json=as_json)
        return bool(final.fillings)

    def measure(session: BenchSession) -> bool:
        for count in counts:
            if not measure_count(session, count):
                return False
            so_far = make_result(False)
            _save_partial(session, folder, so_far.to_facts(), so_far.to_document())
        return True

    run_measurement(runtime, debug, measure, report, out)


def run_learners(
    case: Case,
    runtime: RuntimeSettings,
    counts: Sequence[int],
    repeat: int,
    out: Path | None,
    *,
    as_json: bool = False,
    debug: bool = False,
) -> None:
    folder = ResultFolder(out, "learners") if out is not None else None
    watch = LoadMonitor()
    sides: list[LearnerSide] = []

    def measure(session: BenchSession) -> bool:
        return LearnersBenchmark(
            case, counts, repeat, runtime, lambda: session.open("inline", 1), session.stop,
            session.show_status,
            sides=sides,
        ).run()  # fmt: skip

    def report(complete: bool) -> bool:
        some = [side for side in sides if side.runs]
        if some:
            final = LearnersResult(case, some, watch.finish(), complete)
            report_tabular(final, folder, as_json=as_json)
        return bool(some)

    run_measurement(runtime, debug, measure, report, out)


class TabularResult(Protocol):
    """What has a table of its own, from which a picture is drawn."""

    def to_facts(self) -> dict[str, Any]: ...

    def to_document(self) -> Document: ...

    def to_table(self) -> list[tuple[object, ...]]: ...


def report_tabular(
    result: TabularResult, folder: ResultFolder | None, curves: Plot | None = None, *, as_json: bool
) -> None:
    facts, document, table = result.to_facts(), result.to_document(), result.to_table()
    report_results(facts, document, folder, table, curves, as_json=as_json)


def _save_partial(
    session: BenchSession,
    folder: ResultFolder | None,
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
        session.note(f"Nothing is kept yet: {error}")


def _measure_rate(
    session: BenchSession,
    case: Case,
    rate: RolloutRate,
    into: list[RolloutRate],
    seconds: float,
    repeat: int,
    limited: bool,
) -> bool:
    into.append(rate)
    session.show_status(f"{rate.fleet} with {rate.workers}: starting")
    is_parallel = rate.fleet == "inline" and rate.workers > 1
    with ExitStack() as stack:
        try:
            fleet = stack.enter_context(session.open(rate.fleet, rate.workers))
            collecting = stack.enter_context(TimedRounds(case, fleet, session.stop))
            limits = {}
            if limited:
                collecting.record_trace()
                limits = _make_limits(session, collecting.trace, rate.workers, seconds, stack)
            elif not is_parallel:
                collecting.warm_up()
            measure = collecting.measure
            if is_parallel:
                measure = stack.enter_context(
                    CollectorProcesses(case, rate.workers, session.stop)
                ).measure
        except StopInterrupt:
            return False
        counted = partial(measure, seconds, rate)
        return alternate(counted, rate, limits, repeat, session.show_status, session.take_retried)


def _make_limits(
    session: BenchSession, trace: ActionTrace, workers: int, seconds: float, stack: ExitStack
) -> dict[str, Limit]:
    """Bare stepping, where it is possible, of what a script has."""
    file = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "script.npz"
    trace.save(file)
    bare = {
        way: stack.enter_context(RawSteppingProcesses(file, way, workers, seconds, session.stop))
        for way in WAYS
    }
    return {way: processes.measure_rate for way, processes in bare.items() if processes.is_possible}


def _draw_charts(folder: ResultFolder, curves: Plot | None) -> None:
    """Last, so that nothing measured is lost where it cannot be drawn."""
    try:
        print_note(f"written: {folder.draw_table()}")
        if curves is not None:
            print_note(f"written: {folder.draw_curves(curves)}")
    except PlotUnavailableError as error:
        print_note(f"no picture: {error.message} {error.hint}")


def report_results(
    facts: dict[str, Any],
    document: Document,
    folder: ResultFolder | None,
    table: Sequence[Sequence[object]] = (),
    curves: Plot | None = None,
    *,
    as_json: bool,
) -> None:
    """Said and written, and each also where the other fails; of a table there is a picture."""
    try:
        print_result_lines(
            as_json_text(facts, indent=1) if as_json else to_markdown(document).rstrip()
        )
    finally:
        with mark_errors_documented():
            if folder is not None:
                for file in folder.write(facts, document, table):
                    print_note(f"written: {file}")
                if table:
                    _draw_charts(folder, curves)
