"""Which fleet a runtime means: the light half of the composition root.

Apart from build.py so that worker processes can start, and load what they need, while the driver
is still loading its own parts. Must not know: recipes, environments, learners.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlflame.config import env_file
from rlflame.config.runtime import RuntimeSettings
from rlflame.fleet.auto import ChoosingFleet
from rlflame.fleet.base import Fleet, Observer, ignore
from rlflame.fleet.local import LocalFleet
from rlflame.fleet.prestart import HeadStart
from rlflame.rollout import blas

if TYPE_CHECKING:
    from rlflame.fleet.inline import InlineFleet


def fleet(
    runtime: RuntimeSettings,
    tasks: int | None = None,
    observer: Observer = ignore,
    environment: str | None = None,
    early: HeadStart | None = None,
) -> Fleet:
    """Where rollouts run; never more workers than there can be tasks at once.

    Workers here load what the named environment needs before there are tasks, and those that began
    early are among them.
    """
    if runtime.env_file is not None:
        env_file.admit(runtime.env_file)
    kind = choice(runtime)
    if kind == "inline":
        return inline(observer)
    if kind == "flame":
        return _flame(runtime, tasks, observer)
    count = runtime.workers or blas.usable_cores()
    count = count if tasks is None else min(count, tasks)
    return _local(runtime, count, observer, environment, early)


def for_training(
    runtime: RuntimeSettings,
    slots: int,
    observer: Observer = ignore,
    environment: str | None = None,
    early: HeadStart | None = None,
) -> Fleet:
    """As `fleet`; but where `auto` has a cluster to choose, both sides are timed."""
    if runtime.fleet != "auto" or choice(runtime) != "flame":
        return fleet(runtime, slots, observer, environment, early)
    if runtime.env_file is not None:
        env_file.admit(runtime.env_file)
    # First, so that a cluster that cannot be reached ends it before anything has begun.
    away = _flame(runtime, slots, observer, advises=False)
    try:
        cores = blas.usable_cores()
        workers = min(runtime.workers or cores, cores, slots)
        home = _local(runtime, workers, observer, environment, early)
    except BaseException:
        away.close()
        raise
    return ChoosingFleet(home, away, observer=observer)


def inline(observer: Observer = ignore) -> InlineFleet:
    """Inside this process; named, for those who watch where it stands."""
    from rlflame.fleet.inline import InlineFleet  # loads Gymnasium, as its worker does

    return InlineFleet(observer)


def choice(runtime: RuntimeSettings) -> str:
    """What `auto` comes to: Flame where one is configured, never silently something else."""
    if runtime.fleet != "auto":
        return runtime.fleet
    from rlflame.fleet.flame.endpoint import configured

    return "flame" if configured() else "local"


def found_no_cluster(runtime: RuntimeSettings) -> bool:
    """Whether `auto` came to this machine."""
    return runtime.fleet == "auto" and choice(runtime) == "local"


def candidates(fleet: Fleet) -> tuple[tuple[str, int], ...]:
    """Names and capacities of the fleets among which one is still to be chosen."""
    return fleet.candidates if isinstance(fleet, ChoosingFleet) else ()


def _local(
    runtime: RuntimeSettings,
    workers: int,
    observer: Observer,
    environment: str | None = None,
    early: HeadStart | None = None,
) -> Fleet:
    return LocalFleet(
        workers,
        step_deadline_s=runtime.step_deadline_s,
        max_retries=runtime.max_retries,
        show_output=runtime.debug,
        observer=observer,
        environment=environment,
        begun=early.take(workers) if early is not None else (),
    )


def _flame(
    runtime: RuntimeSettings, tasks: int | None, observer: Observer, *, advises: bool = True
) -> Fleet:
    from rlflame.fleet.flame.fleet import FlameFleet
    from rlflame.fleet.flame.session_start import Wishes

    wanted = runtime.flame
    return FlameFleet(
        tasks,
        Wishes(
            most=runtime.workers,
            least=wanted.min_executors,
            cpu=wanted.cpu,
            memory_bytes=_bytes(wanted.memory) if wanted.memory else None,
            python_version=wanted.python_version,
            dependencies=wanted.dependencies,
            extra_dependencies=wanted.extra_dependencies,
            template=wanted.template,
            env_file=runtime.env_file,
            start_deadline_s=wanted.start_deadline_s,
            delay_release_s=wanted.delay_release_s,
        ),
        step_deadline_s=runtime.step_deadline_s,
        task_deadline_s=wanted.task_deadline_s,
        reconnect_s=wanted.reconnect_s,
        max_retries=runtime.max_retries,
        observer=observer,
        advises=advises,
    )


def _bytes(text: str) -> int:
    """`512m` in bytes, with binary units as Flame has them."""
    units = {"k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
    unit = units.get(text[-1].lower(), 1)
    return int(text.rstrip("kmgtKMGT")) * unit
