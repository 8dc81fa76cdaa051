"""A whole race: what is measured is told and kept, however it ends.

Must not know: the command line, how anything is timed.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rlflame.bench.machine_load import Watch
from rlflame.bench.output import Folder
from rlflame.bench.published_dppo import Variant
from rlflame.bench.race import Racing, Runner
from rlflame.bench.race_result import Raced
from rlflame.bench.run import tell_whole
from rlflame.bench.session import Session, measured
from rlflame.console.output import say_aside


def race(
    name: str,
    variants: Sequence[Variant],
    kind: str,
    repeat: int,
    out: Path | None,
    *,
    as_json: bool = False,
    debug: bool = False,
) -> None:
    folder = Folder(out, name) if out is not None else None
    watch, runtime = Watch([kind]), variants[0].config.runtime
    runners: list[Runner] = []

    def measure(here: Session) -> bool:
        return Racing(
            variants, repeat, runtime, lambda count: here.open(kind, count),
            here.stop, here.tell, here.note, here.retried, runners=runners,
        ).run()  # fmt: skip

    def told(complete: bool) -> bool:
        some = [runner for runner in runners if runner.races]
        if some:
            result = Raced(name, some, watch.over(), complete)
            curves = result.curves() if folder is not None else None
            tell_whole(result, folder, curves, as_json=as_json)
            if folder is not None and curves is None:
                say_aside("No episode has ended, so there are no curves of returns.")
        return bool(some)

    measured(runtime, debug, measure, told, out)
