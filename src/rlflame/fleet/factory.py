"""The fleet that a runtime asks for.

It imports little, so that worker processes start and load while the driver still loads its parts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlflame.config import user_env_file
from rlflame.config.runtime import RuntimeSettings
from rlflame.fleet.auto import AutoFleet
from rlflame.fleet.base import Fleet, Observer, ignore_event
from rlflame.fleet.local import LocalFleet
from rlflame.fleet.prestart import PrestartPool
from rlflame.rollout import machine

if TYPE_CHECKING:
    from rlflame.fleet.inline import InlineFleet


def make_fleet(
    runtime: RuntimeSettings,
    tasks: int | None = None,
    observer: Observer = ignore_event,
    environment: str | None = None,
    prestart_pool: PrestartPool | None = None,
) -> Fleet:
    """Where rollouts run; never more workers than there can be tasks at once.

    Workers here load what the named environment needs before there are tasks, and those that began
    early are among them.
    """
    if runtime.env_file is not None:
        user_env_file.load_env_file(runtime.env_file)
    kind = resolve_fleet_kind(runtime)
    if kind == "inline":
        return make_inline_fleet(observer)
    if kind == "flame":
        return _make_flame_fleet(runtime, tasks, observer)
    count = runtime.workers or machine.count_usable_cores()
    count = count if tasks is None else min(count, tasks)
    return _make_local_fleet(runtime, count, observer, environment, prestart_pool)


def make_training_fleet(
    runtime: RuntimeSettings,
    slots: int,
    observer: Observer = ignore_event,
    environment: str | None = None,
    prestart_pool: PrestartPool | None = None,
) -> Fleet:
    """As `make_fleet`, but where `auto` finds a cluster, it and this machine are both timed."""
    if runtime.fleet != "auto" or resolve_fleet_kind(runtime) != "flame":
        return make_fleet(runtime, slots, observer, environment, prestart_pool)
    if runtime.env_file is not None:
        user_env_file.load_env_file(runtime.env_file)
    # First, so that a cluster that cannot be reached ends it before anything has begun.
    remote = _make_flame_fleet(runtime, slots, observer, advises=False)
    try:
        cores = machine.count_usable_cores()
        workers = min(runtime.workers or cores, cores, slots)
        local = _make_local_fleet(runtime, workers, observer, environment, prestart_pool)
    except BaseException:
        remote.close()
        raise
    return AutoFleet(local, remote, observer=observer)


def make_inline_fleet(observer: Observer = ignore_event) -> InlineFleet:
    """Inside this process; its type tells where the environments stand."""
    from rlflame.fleet.inline import InlineFleet  # loads Gymnasium, as its worker does

    return InlineFleet(observer)


def resolve_fleet_kind(runtime: RuntimeSettings) -> str:
    """`auto` is Flame where one is configured, else local."""
    if runtime.fleet != "auto":
        return runtime.fleet
    from rlflame.fleet.flame.endpoint import find_configuration

    return "flame" if find_configuration() else "local"


def is_local_fallback(runtime: RuntimeSettings) -> bool:
    """Whether `auto` means this machine."""
    return runtime.fleet == "auto" and resolve_fleet_kind(runtime) == "local"


def list_candidates(fleet: Fleet) -> tuple[tuple[str, int], ...]:
    """Names and capacities of the fleets between which `auto` has not chosen yet."""
    return fleet.candidates if isinstance(fleet, AutoFleet) else ()


def _make_local_fleet(
    runtime: RuntimeSettings,
    workers: int,
    observer: Observer,
    environment: str | None = None,
    prestart_pool: PrestartPool | None = None,
) -> Fleet:
    return LocalFleet(
        workers,
        step_deadline_s=runtime.step_deadline_s,
        max_retries=runtime.max_retries,
        show_output=runtime.debug,
        observer=observer,
        environment=environment,
        processes=prestart_pool.take(workers) if prestart_pool is not None else (),
    )


def _make_flame_fleet(
    runtime: RuntimeSettings, tasks: int | None, observer: Observer, *, advises: bool = True
) -> Fleet:
    from rlflame.fleet.flame.fleet import FlameFleet

    return FlameFleet(tasks, runtime, observer=observer, advises=advises)
