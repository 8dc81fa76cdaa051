"""What crosses to an executor in Flame's own wrapping: calls, the class it loads, its command line.

Flame takes pickles; nothing that comes back is ever loaded as one by us. Must not know:
connections, tasks.
"""

from __future__ import annotations

import json
from typing import Any

from rlflame.errors import FleetError

from . import bundle


def add_supervisor(arguments: list[str]) -> list[str]:
    """The template's command line with our own service at its end, where it had flamepy's."""
    if arguments[-2:] == ["-m", "flamepy.runner.runpy"]:
        return [*arguments[:-2], "-c", bundle.read_source("rlflame.fleet.flame.supervisor")]
    return arguments  # somebody's own template: it knows best


def make_request(method: str, *arguments: Any) -> bytes:
    """A call of a method of the object that executors hold, as flamepy spells it."""
    import cloudpickle
    from flamepy.runner.types import RunnerRequest

    packed: bytes = cloudpickle.dumps(RunnerRequest(method, tuple(arguments)))
    return packed


def parse_greeting(content: memoryview) -> dict[str, Any]:
    """What an executor answers to `greet`, read as JSON."""
    try:
        greeting = json.loads(bytes(content))
    except (ValueError, RecursionError) as error:
        raise FleetError(
            f"An executor's answer about itself is no JSON ({error}).", "rlflame cluster-check"
        ) from error
    if not isinstance(greeting, dict) or not isinstance(greeting.get("packages"), dict):
        raise FleetError(
            "An executor's answer about itself does not list its packages.",
            "rlflame cluster-check",
        )
    return greeting


def make_context(service: type) -> bytes:
    """What executors load: a loader as text, which every Python reads.

    Bytecode of another version would crash the worker process, and with it wedge its executor.
    """
    import inspect
    import io

    import cloudpickle
    from flamepy.runner.types import RunnerContext

    from . import executor_bootstrap

    text = inspect.getsource(executor_bootstrap)

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
        def reducer_override(self, obj: Any) -> Any:
            if obj is executor_bootstrap.Loader:
                scope = {"__name__": "rlflame_loader"}
                return eval, (f"(lambda own: exec({text!r}, own) or own['Loader'])({scope!r})",)
            if obj is service:
                attributes = {name: getattr(service, name) for name in ("archive", "settings")}
                return type, (service.__name__, service.__bases__, attributes)
            return super().reducer_override(obj)

    packed = io.BytesIO()
    Pickler(packed).dump(RunnerContext(service))
    return packed.getvalue()
