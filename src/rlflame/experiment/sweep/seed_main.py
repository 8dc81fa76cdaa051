"""The process of one seed: trains it as a single run, and reports events and the end.

After its order it receives STOP and the answers of a shared fleet. It sends EVENTs, then RESULT,
FAILED or BROKEN, and its requests to such a fleet.
"""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rlflame.config.module_trust import allow_modules
from rlflame.config.recipe import RunConfig
from rlflame.config.validation import validate_config
from rlflame.console.json_lines import JsonDisplay
from rlflame.errors import (
    DamagedCheckpointsError,
    EnvironmentFailure,
    RlflameError,
    WriteError,
    format_shell,
    from_os_error,
)
from rlflame.experiment.run import RunHost, open_run, start_run
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
    """`python -m rlflame.experiment.sweep.seed_main ANSWERS`, where ANSWERS is an open
    descriptor."""
    channel = ParentChannel.open()
    order = channel.receive_order()
    with SignalStop() as stop:
        try:
            _train(order, channel, stop)
        except DamagedCheckpointsError as error:
            command = format_shell("rm", "-r", order["folder"])
            error.hint = f"restore one from a copy, or begin the seed anew: {command}"
            _report_failure(channel, error)
        except WriteError as error:
            error.hint = error.remedy  # what to type is one for all seeds
            _report_failure(channel, error)
        except RlflameError as error:
            _report_failure(channel, error)
        except KeyboardInterrupt:
            _report_failure(channel, RlflameError("Interrupted."))
        except MemoryError:
            _report_failure(
                channel, RlflameError("Memory ran out.", "fewer seeds side by side: --workers 1")
            )
        except OSError as error:
            _report_failure(channel, from_os_error(error))
        except BaseException:  # a bug, but an answer all the same
            channel.send(MessageKind.BROKEN, {"traceback": traceback.format_exc()})


def _train(order: Mapping[str, Any], channel: ParentChannel, stop: SignalStop) -> None:
    user_code.load_from_environment()
    allow_modules(order["modules"])
    config = validate_config(order["config"])
    show = JsonDisplay(write=lambda text: _send_event(channel, text))
    counts = EventCounter(show.show_fleet_event)
    with _open_fleet(order["fleet"], config, counts, channel) as fleet:
        host = RunHost(view=show, stop=stop, fleet=fleet, counts=counts, shared=True)
        if order["resume"]:
            opening = open_run(
                Path(order["folder"]), config.runtime, steps=order["steps"], host=host
            )
        else:
            init_from = Path(order["init_from"]) if order["init_from"] else None
            opening = start_run(config, preset=order["preset"], init_from=init_from, host=host)
        with opening as run:
            result = run.train()
    show.show_result(result)
    channel.send(MessageKind.RESULT, {"complete": result.complete})


def _send_event(channel: ParentChannel, text: str) -> None:
    channel.send(MessageKind.EVENT, {"text": text})


def _report_failure(channel: ParentChannel, error: RlflameError) -> None:
    channel.send(MessageKind.FAILED, error.as_dict())


@contextmanager
def _open_fleet(
    order: Mapping[str, Any], config: RunConfig, counts: EventCounter, channel: ParentChannel
) -> Iterator[Fleet]:
    """In this process, in worker processes where there are cores to spare, or the sweep's."""
    if order["kind"] == "lent":
        remote_fleet = FleetClient(channel, order["name"], order["capacity"])
        channel.start_listening(remote_fleet.receive)
        with remote_fleet:
            yield remote_fleet
        return
    channel.start_listening()
    if order["kind"] == "inline":
        with factory.make_inline_fleet(counts) as inline:
            _watch_env(lambda: inline.current_position, config.runtime.step_deadline_s, channel)
            yield inline
        return
    runtime = config.runtime.model_copy(update={"fleet": "local", "workers": order["workers"]})
    with factory.make_fleet(runtime, config.learning.rollout.num_slots, counts) as local:
        yield local


def _watch_env(
    read_position: Callable[[], TaskPosition | None], deadline_s: float, channel: ParentChannel
) -> None:
    """An environment that never answers holds this thread for good: another ends the process."""

    def poll() -> None:
        previous, since = read_position(), time.monotonic()
        while True:
            time.sleep(_POLL_S)
            current = read_position()
            if current is None or current != previous:
                previous, since = current, time.monotonic()
            elif time.monotonic() - since > deadline_s:
                slot, row, seed, step = current
                _report_failure(channel, EnvironmentFailure(
                    f"The environment did not answer within {deadline_s:g} s "
                    f"(slot {slot}, row {row}, seed {seed}, step {step}).",
                    "if its steps really take that long: --set runtime.step_deadline_s=600",
                ))  # fmt: skip
                exit_with_group()

    threading.Thread(target=poll, name="rlflame-watch", daemon=True).start()


if __name__ == "__main__":
    main()
