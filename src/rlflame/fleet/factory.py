"""Creates the fleet that is named in the runtime settings.

To add a fleet, add a module to this package, an entry to FLEETS and a value to `runtime.fleet`.
Modules outside of `config` and `bench` use the properties in FLEETS instead of comparing names.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from rlflame.config.runtime import RuntimeSettings
from rlflame.fleet.auto import AutoFleet
from rlflame.fleet.base import Fleet, Observer, ignore_event
from rlflame.fleet.local import LocalFleet
from rlflame.fleet.prestart import PrestartPool
from rlflame.rollout import machine

if TYPE_CHECKING:
    from rlflame.fleet.inline import InlineFleet


@dataclass(frozen=True, slots=True)
class FleetRequest:
    """The parameters of a new fleet."""

    runtime: RuntimeSettings
    #: The maximum number of tasks at a time; None if unknown.
    tasks: int | None = None
    observer: Observer = ignore_event
    #: The ID of the environment whose code local workers import before they receive tasks.
    environment: str | None = None
    #: Local worker processes that are already running.
    prestart_pool: PrestartPool | None = None


def make_fleet(
    runtime: RuntimeSettings,
    tasks: int | None = None,
    observer: Observer = ignore_event,
    environment: str | None = None,
    prestart_pool: PrestartPool | None = None,
    *,
    is_training: bool = False,
) -> Fleet:
    """Create the configured fleet, with at most one worker per concurrent task.

    If `auto` finds a cluster, a training run times both the cluster and this machine, and keeps the
    faster one.
    """
    name = resolve_fleet_kind(runtime)
    request = FleetRequest(runtime, tasks, observer, environment, prestart_pool)
    if not is_training or runtime.fleet != "auto" or not is_remote(name):
        return FLEETS[name].make(request)
    # Create the remote fleet first: if the cluster is unreachable, no local workers start.
    remote = FLEETS[name].make(request)
    try:
        cores = machine.count_usable_cores()
        workers = min(runtime.workers or cores, cores)
        local_runtime = runtime.model_copy(update={"workers": workers})
        local = _make_local_fleet(replace(request, runtime=local_runtime))
    except BaseException:
        remote.close()
        raise
    return AutoFleet(local, remote, observer=observer)


def make_inline_fleet(observer: Observer = ignore_event) -> InlineFleet:
    """Create an `InlineFleet`, which runs tasks in this process."""
    from rlflame.fleet.inline import InlineFleet  # imports Gymnasium

    return InlineFleet(observer)


def resolve_fleet_kind(runtime: RuntimeSettings) -> str:
    """Return the fleet's name; `auto` becomes a configured remote fleet or `local`."""
    if runtime.fleet != "auto":
        return runtime.fleet
    names = (name for name, kind in FLEETS.items() if kind.is_remote and kind.is_configured())
    return next(names, "local")


def is_remote(name: object) -> bool:
    """Return whether the named fleet runs its workers on other machines."""
    return _get_kind(name).is_remote


def has_workers(name: object) -> bool:
    """Return whether the named fleet has worker processes."""
    return _get_kind(name).has_workers


def get_worker_noun(name: object) -> str:
    """Return what a worker of the named fleet is called, such as `executor`."""
    return _get_kind(name).worker_noun


def _get_kind(name: object) -> FleetKind:
    """Return the entry for `name` in FLEETS, or else the entry for `local`."""
    return FLEETS.get(str(name), FLEETS["local"])


def is_local_fallback(runtime: RuntimeSettings) -> bool:
    """Return whether the fleet is set to `auto`, and `auto` resolves to `local`."""
    return runtime.fleet == "auto" and resolve_fleet_kind(runtime) == "local"


def list_candidates(fleet: Fleet) -> tuple[tuple[str, int], ...]:
    """Return the names and capacities of the fleets that `auto` may still choose."""
    return fleet.candidates if isinstance(fleet, AutoFleet) else ()


def _make_local_fleet(request: FleetRequest) -> Fleet:
    runtime, pool = request.runtime, request.prestart_pool
    count = runtime.workers or machine.count_usable_cores()
    workers = count if request.tasks is None else min(count, request.tasks)
    return LocalFleet(
        workers,
        step_deadline_s=runtime.step_deadline_s,
        max_retries=runtime.max_retries,
        show_output=runtime.debug,
        observer=request.observer,
        environment=request.environment,
        processes=pool.take(workers) if pool is not None else (),
    )


def _make_flame_fleet(request: FleetRequest) -> Fleet:
    from rlflame.fleet.flame.fleet import FlameFleet

    return FlameFleet(request.tasks, request.runtime, observer=request.observer)


def _is_flame_configured() -> bool:
    from rlflame.fleet.flame.cluster_config import find_configuration

    return bool(find_configuration())


@dataclass(frozen=True, slots=True)
class FleetKind:
    """A type of fleet: the function that creates it, and its properties."""

    make: Callable[[FleetRequest], Fleet]
    #: Whether the workers are on other machines. `auto` prefers such a fleet if it is configured.
    is_remote: bool = False
    is_configured: Callable[[], bool] = lambda: True
    worker_noun: str = "worker"
    #: Whether workers are separate processes; otherwise, this process steps the environments.
    has_workers: bool = True


FLEETS: dict[str, FleetKind] = {
    "local": FleetKind(_make_local_fleet),
    "inline": FleetKind(lambda request: make_inline_fleet(request.observer), has_workers=False),
    "flame": FleetKind(
        _make_flame_fleet,
        is_remote=True,
        is_configured=_is_flame_configured,
        worker_noun="executor",
    ),
}
