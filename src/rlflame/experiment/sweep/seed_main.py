"""The process of one seed of a sweep, which trains and reports to the sweep.

The process first receives an ORDER message. Later, it can receive STOP and, if the sweep has a
shared fleet, replies from that fleet. It sends EVENT messages, requests to the shared fleet, and
finally RESULT or FAILURE.
"""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rlflame.config.module_trust import allow_modules
from rlflame.config.recipe import RunConfig
from rlflame.config.validation import validate_config
from rlflame.console.json_lines import JsonDisplay
from rlflame.errors import (
    DamagedCheckpointsError,
    DiskError,
    EnvironmentFailure,
    format_shell,
    from_exception,
)
from rlflame.experiment.resume import Budget
from rlflame.experiment.run import RunHost, resume_run, train_run
from rlflame.fleet import factory
from rlflame.fleet.base import EventCounter, Fleet
from rlflame.fleet.shared_fleet import FleetClient
from rlflame.rollout.envs import user_code
from rlflame.rollout.process.channel import MessageKind
from rlflame.rollout.process.parent_channel import ParentChannel, exit_with_group
from rlflame.rollout.task import TaskPosition
from rlflame.training.stop_signal import SignalStop

_POLL_S = 1.0


def main() -> None:
    """Train one seed, as ordered by the sweep."""
    channel = ParentChannel.open()
    order = channel.receive_order()
    with SignalStop() as stop:
        try:
            _train(order, channel, stop)
        except (Exception, KeyboardInterrupt, SystemExit) as error:
            _report_error(error, Path(order["folder"]), channel)


def _report_error(error: BaseException, folder: Path, channel: ParentChannel) -> None:
    """Send the sweep the error that ended this seed; add a traceback for a bug."""
    failure = from_exception(error)
    if isinstance(error, DamagedCheckpointsError):
        command = format_shell("rm", "-r", folder)
        failure.hint = f"restore one from a copy, or start the seed again: {command}"
    elif isinstance(error, DiskError):
        failure.hint = error.remedy  # the user resumes the sweep, not this seed
    elif failure.__cause__ is error:
        failure.detail = "".join(traceback.format_exception(error))
    channel.send(MessageKind.FAILURE, failure.as_dict())


def _train(order: Mapping[str, Any], channel: ParentChannel, stop: SignalStop) -> None:
    user_code.load_from_environment()
    allow_modules(order["modules"])
    config = validate_config(order["config"])

    def send_event(text: str) -> None:
        channel.send(MessageKind.EVENT, {"text": text})

    show = JsonDisplay(send_event)
    counts = EventCounter(show.show_fleet_event)
    with _open_fleet(order, config, counts, channel) as fleet:
        host = RunHost(view=show, stop=stop, fleet=fleet, counts=counts, is_shared=True)
        if order["resume"]:
            folder = Path(order["folder"])
            budget = Budget(*order["budget"]) if order["budget"] else None
            result = resume_run(folder, config.runtime, host, budget=budget)
        else:
            init_from = Path(order["init_from"]) if order["init_from"] else None
            result = train_run(config, host, order["preset"], init_from)
    show.show_result(result)
    channel.send(MessageKind.RESULT, {"complete": result.complete})


def _open_fleet(
    order: Mapping[str, Any], config: RunConfig, counts: EventCounter, channel: ParentChannel
) -> Fleet:
    """Open the sweep's shared fleet or, without one, a fleet for this seed."""
    if order["fleet"] is not None:
        client = FleetClient(channel, **order["fleet"])
        channel.start_listening(client.receive)
        return client
    channel.start_listening()
    if not order["workers"]:
        inline = factory.make_inline_fleet(counts)
        _watch_env(lambda: inline.current_position, config.runtime.step_deadline_s, channel)
        return inline
    runtime = config.runtime.model_copy(update={"fleet": "local", "workers": order["workers"]})
    return factory.make_fleet(runtime, config.learning.rollout.num_slots, counts)


def _watch_env(
    read_position: Callable[[], TaskPosition | None], deadline_s: float, channel: ParentChannel
) -> None:
    """Start a thread that ends this process if the environment hangs."""

    def poll() -> None:
        previous, start_s = read_position(), time.monotonic()
        while True:
            time.sleep(_POLL_S)
            current = read_position()
            if current is None or current != previous:
                previous, start_s = current, time.monotonic()
            elif time.monotonic() - start_s > deadline_s:
                slot, row, seed, step = current
                error = EnvironmentFailure(
                    f"The environment did not answer within {deadline_s:g} s "
                    f"(slot {slot}, row {row}, seed {seed}, step {step}).",
                    "if its steps take that long: --set runtime.step_deadline_s=600",
                )
                channel.send(MessageKind.FAILURE, error.as_dict())
                exit_with_group()

    threading.Thread(target=poll, name="rlflame-watch", daemon=True).start()


if __name__ == "__main__":
    main()
