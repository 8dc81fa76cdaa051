"""`rlflame train --seeds` and `rlflame resume` of a folder of seeds.

Must not know: how seeds run or are shown.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rlflame.config.recipe import RunConfig
    from rlflame.config.runtime import RuntimeSettings
    from rlflame.console.sweep_base import JobResult, SeedsDisplay
    from rlflame.errors import RlflameError
    from rlflame.training.stop_signal import SignalStop


def check(
    seeds: str, *, seed: int | None, sets: Sequence[str] = (), plot: bool = False
) -> tuple[int, ...]:
    """The seeds of `--seeds`; refuses what means nothing beside it."""
    from rlflame.config.resolve import parse_set
    from rlflame.errors import ConfigError
    from rlflame.storage.sweep_dir import parse

    _alone("rlflame train --seeds without torchrun, or one --seed")
    if seed is not None:
        raise ConfigError(
            f"--seed {seed} and --seeds {seeds} exclude each other.", "leave out --seed"
        )
    for text in sets:
        if parse_set(text)[0] == "learning.seed":
            raise ConfigError(
                f"--set {text} and --seeds {seeds} exclude each other.", f"leave out --set {text}"
            )
    if plot:
        raise ConfigError(
            "--plot draws the episodes of one run; of several seeds a picture is drawn anyway.",
            "leave out --plot; rlflame plot draws any run",
        )
    return parse(seeds)


def check_learners(learners: int) -> None:
    """Seeds need no help: each is one process, and as many run side by side as there are cores."""
    from rlflame.errors import ConfigError

    if learners > 1:
        raise ConfigError(
            f"--seeds has as many seeds side by side as there are cores, each with one learner, "
            f"which uses the machine better than {learners} learners for each.",
            "leave out --learners; or --seed N for one run",
        )


def _alone(hint: str) -> None:
    from rlflame.config import torchrun
    from rlflame.errors import ConfigError

    if torchrun.place() is not None:
        raise ConfigError(
            "The processes that torchrun starts learn in one run, and --seeds are several.", hint
        )


def train(config: RunConfig, preset: str, seeds: tuple[int, ...], init_from: Path | None) -> None:
    from rlflame.console.sweep_views import choose
    from rlflame.experiment.sweep import sweep
    from rlflame.training.stop_signal import SignalStop

    show = choose(config.runtime.progress)
    with SignalStop() as stop:
        result = sweep.train(
            config, seeds, preset=preset, init_from=init_from, show=show, stop=stop
        )
    _end(result, config.runtime, show, stop)


def resume(
    folder: Path, runtime: RuntimeSettings, steps: int | None, *, fresh_replay: bool
) -> None:
    from rlflame.console.sweep_views import choose
    from rlflame.errors import ConfigError, typed
    from rlflame.experiment.sweep import sweep
    from rlflame.training.stop_signal import SignalStop

    _alone(f"{typed('resume', folder)} without torchrun")
    check_learners(runtime.learners)
    if fresh_replay:
        raise ConfigError(
            f"--fresh-replay is for one run, and {folder} is a folder of seeds.",
            "the seed that needs it: " + typed("resume", f"{folder}/seed-0", "--fresh-replay"),
        )
    show = choose(runtime.progress)
    with SignalStop() as stop:
        result = sweep.resume(folder, runtime, steps=steps, show=show, stop=stop)
    _end(result, runtime, show, stop)


def _end(result: JobResult, runtime: RuntimeSettings, show: SeedsDisplay, stop: SignalStop) -> None:
    from rlflame.errors import document

    show.finished(result)
    if result.plot is None and runtime.progress not in ("json", "quiet"):
        _draw(result)
    error = _failure(result, stop)
    if error is not None:
        if runtime.progress == "json":
            document(error)
        raise error


def _failure(result: JobResult, stop: SignalStop) -> RlflameError | None:
    """Why the command does not end well, if it does not."""
    from rlflame.errors import Interrupted, RlflameError, typed
    from rlflame.text import format_count

    again = typed("resume", result.folder)
    if not result.complete and stop.signal_number is not None:
        finished = sum(one.state == "finished" for one in result.summary.seeds)
        return Interrupted(
            f"Stopped with {finished} of {format_count(len(result.summary.seeds), 'seed')} "
            "finished; "
            "everything is saved.",
            again,
            stop.signal_number,
        )
    failures = result.failures
    if not failures:
        if result.complete:
            return None
        return RlflameError("Not all seeds have finished.", again)
    first, error = next(iter(failures.items()))
    others = f", and {len(failures) - 1} more" if len(failures) > 1 else ""
    failure = RlflameError(
        f"{len(failures)} of {format_count(len(result.summary.seeds), 'seed')} failed: seed "
        f"{first} "
        f"({error.message.rstrip('.')}){others}.",
        again if not error.hint else f"{error.hint}; then {again}",
    )
    codes = {one.exit_code for one in failures.values()}
    failure.exit_code = codes.pop() if len(codes) == 1 else 1
    return failure


def _draw(result: JobResult) -> None:
    """The curves in characters, where no picture could be drawn."""
    from rlflame.analysis import curves
    from rlflame.cli.plot import draw_here
    from rlflame.errors import RlflameError
    from rlflame.storage import run_reader

    try:
        runs, _ = run_reader.read_all([result.folder])
        draw_here(curves.picture(runs))
    except RlflameError:
        return  # nothing recorded yet makes no curve
