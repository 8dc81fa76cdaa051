"""`rlflame train --seeds`, and `rlflame resume` for a sweep folder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rlflame.errors import ConfigError, Interruption, RlflameError, format_command, mark_documented
from rlflame.storage import sweep_folder
from rlflame.terminal_text import format_count

if TYPE_CHECKING:
    from rlflame.config.recipe import RunConfig
    from rlflame.config.runtime import RuntimeSettings
    from rlflame.console.base import SweepResult
    from rlflame.training.stop_signal import SignalStop


def parse_seeds(
    seeds: str, *, seed: int | None, sets: Sequence[str] = (), plot: bool = False
) -> tuple[int, ...]:
    """Parse `--seeds`; raise ConfigError for options that cannot be combined with it."""
    from rlflame.config.validation import parse_set

    if seed is not None or plot or any(parse_set(text)[0] == "learning.seed" for text in sets):
        raise ConfigError(
            "--seeds cannot be combined with --seed, --set learning.seed or --plot.", "omit them"
        )
    return sweep_folder.parse_seeds(seeds)


def train(config: RunConfig, preset: str, seeds: tuple[int, ...], init_from: Path | None) -> None:
    from rlflame.experiment.sweep import sweep_run

    run = partial(sweep_run.train, config, seeds, preset=preset, init_from=init_from)
    _run_sweep(run, config.runtime)


def resume(
    folder: Path,
    runtime: RuntimeSettings,
    steps: int | None,
    iterations: int | None,
    *,
    fresh_replay: bool,
) -> None:
    from rlflame.experiment.sweep import sweep_run

    if fresh_replay:
        raise ConfigError(
            f"--fresh-replay is for a single run, but {folder} is a sweep folder.",
            f"resume the seed that needs it: {folder}/seed-N",
        )
    run = partial(sweep_run.resume, folder, runtime, steps=steps, iterations=iterations)
    _run_sweep(run, runtime)


def _run_sweep(run: Callable[..., SweepResult], runtime: RuntimeSettings) -> None:
    from rlflame.console.display import make_display
    from rlflame.training.stop_signal import SignalStop

    display = make_display(runtime.progress, sweep=True)
    with SignalStop() as stop:
        result = run(show=display, stop=stop)
    display.show_result(result)
    error = _make_failure(result, stop)
    if error is not None:
        if runtime.progress == "json":
            mark_documented(error)
        raise error


def _make_failure(result: SweepResult, stop: SignalStop) -> RlflameError | None:
    """Return the error that ends the command, or None if all seeds have finished."""
    resume_command = format_command("resume", result.folder)
    seeds = format_count(len(result.summary.seeds), "seed")
    if result.complete:
        return None
    if stop.signal_number is not None:
        finished_count = sum(entry.state == "finished" for entry in result.summary.seeds)
        return Interruption(
            f"Stopped with {finished_count} of {seeds} finished; everything is saved.",
            resume_command,
            stop.signal_number,
        )
    failures = result.failures
    if not failures:
        return RlflameError("Not all seeds have finished.", resume_command)
    seed, error = next(iter(failures.items()))
    failure = RlflameError(
        f"{len(failures)} of {seeds} failed; seed {seed}: {error.message}",
        resume_command if not error.hint else f"{error.hint}; then {resume_command}",
    )
    codes = {entry.exit_code for entry in failures.values()}
    failure.exit_code = codes.pop() if len(codes) == 1 else 1
    return failure
