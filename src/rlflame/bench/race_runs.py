"""A whole race: what is measured is told and kept, however it ends.

Must not know: the command line, how anything is timed.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rlflame.bench.machine_load import LoadMonitor
from rlflame.bench.output import ResultFolder
from rlflame.bench.published_dppo import Variant
from rlflame.bench.race import RaceBenchmark, Runner
from rlflame.bench.race_report import RaceResult
from rlflame.bench.run import report_tabular
from rlflame.bench.session import BenchSession, run_measurement
from rlflame.console.output import print_note


def run_race(
    name: str,
    variants: Sequence[Variant],
    kind: str,
    repeat: int,
    out: Path | None,
    *,
    as_json: bool = False,
    debug: bool = False,
) -> None:
    folder = ResultFolder(out, name) if out is not None else None
    watch, runtime = LoadMonitor([kind]), variants[0].config.runtime
    runners: list[Runner] = []

    def measure(session: BenchSession) -> bool:
        return RaceBenchmark(
            variants, repeat, runtime, lambda count: session.open(kind, count),
            session.stop, session.show_status, session.note, session.take_retried, runners=runners,
        ).run()  # fmt: skip

    def report(complete: bool) -> bool:
        some = [runner for runner in runners if runner.races]
        if some:
            result = RaceResult(name, some, watch.finish(), complete)
            curves = result.to_panels() if folder is not None else None
            report_tabular(result, folder, curves, as_json=as_json)
            if folder is not None and curves is None:
                print_note("No episode has ended, so there are no curves of returns.")
        return bool(some)

    run_measurement(runtime, debug, measure, report, out)
