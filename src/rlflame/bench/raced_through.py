"""A whole race: what is measured is told and kept, however it ends.

Must not know: the command line, how anything is timed.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rlflame.bench.conducted import draw, tell
from rlflame.bench.distributed import Variant
from rlflame.bench.files import Folder
from rlflame.bench.raced import Raced
from rlflame.bench.racing import Racing
from rlflame.bench.session import session
from rlflame.bench.surroundings import look


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
    found = look()
    complete = False
    with session(variants[0].config.runtime, debug) as here:
        racing = Racing(
            variants, repeat, variants[0].config.runtime, lambda count: here.open(kind, count),
            here.stop, here.tell, here.note,
        )  # fmt: skip
        try:
            complete = racing.run()
        finally:
            here.tell("")
            measured = [runner for runner in racing.runners if runner.races]
            if measured:
                result = Raced(name, measured, found, complete)
                files: list[Path] = []
                if folder is not None:
                    files = folder.write(result.facts(), result.document(), result.table())
                tell(result.facts(), result.document(), files, as_json=as_json)
                if folder is not None:
                    draw(folder, result.curves())
        if not complete:
            here.check(bool(measured))
