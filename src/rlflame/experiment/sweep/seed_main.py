"""The process of one seed: trains it as a lone run is trained, and says what happens.

After its `order` it hears `stop` and what a fleet that is lent answers; it says `event`, then
`ended`, `failed` or `broken`, and what it asks of such a fleet.
Must not know: other seeds, display.
"""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rlflame.config import resolve
from rlflame.config.module_trust import allow_modules
from rlflame.config.recipe import RunConfig
from rlflame.console.json_lines import JsonDisplay
from rlflame.errors import (
    CheckpointsDamaged,
    EnvironmentFailure,
    NotWritten,
    RlflameError,
    of_the_system,
    shell,
)
from rlflame.experiment import run
from rlflame.fleet import factory
from rlflame.fleet.base import EventCount, Fleet
from rlflame.fleet.remote import LentFleet
from rlflame.rollout.envs import user_file
from rlflame.rollout.process.parent_channel import Line, Message, end_here
from rlflame.rollout.spec import Whereabouts
from rlflame.training.stop_signal import SignalStop

_LOOK_S = 1.0


def main() -> None:
    """`python -m rlflame.experiment.sweep.seed_main ANSWERS`, where ANSWERS is an open
    descriptor."""
    line = Line.opened()
    order = line.hear()
    if order is None:
        return
    with SignalStop() as stop:
        try:
            _train(order, line, stop)
        except CheckpointsDamaged as error:
            anew = shell("rm", "-r", order["folder"])
            error.hint = f"restore one from a copy, or begin the seed anew: {anew}"
            _fail(line, error)
        except NotWritten as error:
            error.hint = error.remedy  # what to type is one for all seeds
            _fail(line, error)
        except RlflameError as error:
            _fail(line, error)
        except KeyboardInterrupt:
            _fail(line, RlflameError("Interrupted."))
        except MemoryError:
            _fail(line, RlflameError("Memory ran out.", "fewer seeds side by side: --workers 1"))
        except OSError as error:
            _fail(line, of_the_system(error))
        except BaseException:  # a bug, but an answer all the same
            line.tell("broken", traceback=traceback.format_exc())


def _train(order: Message, line: Line, stop: SignalStop) -> None:
    user_file.load_told()
    allow_modules(order["modules"])
    config = resolve.validated(order["config"])
    show = JsonDisplay(out=lambda text: line.tell("event", text=text))
    counts = EventCount(show.fleet)
    with _fleet(order["fleet"], config, counts, line) as fleet:
        if order["resume"]:
            result = run.resume(
                Path(order["folder"]), config.runtime, steps=order["steps"], fleet=fleet,
                show=show, stop=stop, counts=counts, shared=True,
            )  # fmt: skip
        else:
            start = order["init_from"]
            result = run.train(
                config, preset=order["preset"], init_from=Path(start) if start else None,
                fleet=fleet, show=show, stop=stop, counts=counts, shared=True,
            )  # fmt: skip
    show.ended(result)
    line.tell("ended", complete=result.complete)


def _fail(line: Line, error: RlflameError) -> None:
    line.tell(
        "failed", message=error.message, hint=error.hint, detail=error.detail,
        exit_code=error.exit_code,
    )  # fmt: skip


@contextmanager
def _fleet(wanted: Message, config: RunConfig, counts: EventCount, line: Line) -> Iterator[Fleet]:
    """In this process; worker processes of its own where there are cores to spare; or the job's."""
    if wanted["kind"] == "lent":
        lent = LentFleet(line, wanted["name"], wanted["capacity"])
        line.attend(lent.hear)
        with lent:
            yield lent
        return
    line.attend(lambda message: None)
    if wanted["kind"] == "inline":
        with factory.inline(counts) as inline:
            _watch(lambda: inline.standing, config.runtime.step_deadline_s, line)
            yield inline
        return
    alone = config.runtime.model_copy(update={"fleet": "local", "workers": wanted["workers"]})
    with factory.fleet(alone, config.learning.rollout.num_slots, counts) as local:
        yield local


def _watch(standing: Callable[[], Whereabouts | None], deadline_s: float, line: Line) -> None:
    """An environment that never answers holds this thread for good: another ends the process."""

    def look() -> None:
        before, since = standing(), time.monotonic()
        while True:
            time.sleep(_LOOK_S)
            now = standing()
            if now is None or now != before:
                before, since = now, time.monotonic()
            elif time.monotonic() - since > deadline_s:
                slot, row, seed, step = now
                _fail(line, EnvironmentFailure(
                    f"The environment did not answer within {deadline_s:g} s "
                    f"(slot {slot}, row {row}, seed {seed}, step {step}).",
                    "if its steps really take that long: --set runtime.step_deadline_s=600",
                ))  # fmt: skip
                end_here()

    threading.Thread(target=look, name="rlflame-watch", daemon=True).start()


if __name__ == "__main__":
    main()
