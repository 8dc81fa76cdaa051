"""Which fleet a runtime means: the light half of the composition root.

Apart from build.py so that worker processes can start, and load what they need, while the driver
is still loading its own parts. Must not know: recipes, environments, learners.
"""

from __future__ import annotations

from rlflame.config import RuntimeSettings
from rlflame.fleet import Fleet, Observer, ignore
from rlflame.fleet.local import LocalFleet
from rlflame.rollout import blas


def fleet(runtime: RuntimeSettings, tasks: int | None = None, observer: Observer = ignore) -> Fleet:
    """Where rollouts run; never more workers than there can be tasks at once."""
    if runtime.fleet == "inline":
        from rlflame.fleet.inline import InlineFleet  # loads Gymnasium, as its worker does

        return InlineFleet(observer)
    count = runtime.workers or blas.usable_cores()
    return LocalFleet(
        count if tasks is None else min(count, tasks),
        step_deadline_s=runtime.step_deadline_s,
        max_retries=runtime.max_retries,
        show_output=runtime.debug,
        observer=observer,
    )
