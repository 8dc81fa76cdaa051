"""The `rlflame bench` commands, and the comparison of two results."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rlflame.cli.options import ALGO_HELP, Debug, Json, Sets
from rlflame.console.output import as_json_text, print_result_lines
from rlflame.errors import ConfigError
from rlflame.rollout.blas import limit_threads
from rlflame.rollout.machine import count_usable_cores

if TYPE_CHECKING:
    from rlflame.bench.runner import Benchmark
    from rlflame.config.runtime import RuntimeSettings

FLEETS = ("local", "flame", "inline")
_MAX_COUNT, _MAX_TRANSITIONS, _MAX_EPISODE_MS = 4096, 1_000_000_000, 600_000
#: The largest relative difference between two results that counts as equivalent.
MARGIN = 0.1
#: The minimum number of gradient shards per update.
_BENCH_SHARDS = 8
#: Settings that make PPO's updates large enough for several learners.
LARGE_UPDATES = (
    "network.hidden=[256,256]",
    "ppo.minibatch_size=8192",
    "rollout.num_slots=8",
    "rollout.envs_per_slot=8",
    "rollout.steps=256",
)

Counts = Annotated[
    str | None,
    typer.Option("--workers", metavar="N,N,...", help="Worker or executor counts to measure."),
]
Compare = Annotated[
    str | None,
    typer.Option(
        metavar="NAME,...",
        help="Fleets: local, flame, inline. [default: local, and flame if configured]",
    ),
]
Out = Annotated[
    Path | None,
    typer.Option("-o", "--out", metavar="DIR", help="Output folder (JSON, Markdown, CSV, plots)."),
]
Env = Annotated[str, typer.Option(metavar="ENV", help="Environment alias or Gymnasium id.")]
Algo = Annotated[str | None, typer.Option(metavar="ALGO", help=ALGO_HELP)]
Preset = Annotated[
    str | None, typer.Option(metavar="NAME", help="Preset. [default: depends on ENV and ALGO]")
]
Iterations = Annotated[
    int | None, typer.Option(metavar="N", min=1, help="Training iterations per repetition.")
]
Repeat = Annotated[int, typer.Option(metavar="N", min=1, help="Number of repetitions.")]


def bench(
    context: typer.Context,
    diff: Annotated[
        tuple[Path, Path] | None,
        typer.Option(metavar="OLD.json NEW.json", help="Compare the medians of two result files."),
    ] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Benchmark rollouts, scaling, replay and learners.

    The warm-up is not timed. If a benchmark is interrupted, its results so far are kept.
    """
    limit_threads(1)  # before numpy is imported
    name = context.invoked_subcommand
    if (name is None) == (diff is None) or (name and (as_json or debug)):
        raise ConfigError(
            "bench needs a command, followed by its options, or --diff.",
            "commands: rollouts, scaling, replay, learners; or: rlflame bench --diff OLD NEW",
        )
    if diff is not None:
        _print_diff(*diff, as_json=as_json)


def scaling(
    workers: Counts = None,
    compare: Compare = None,
    episode_ms: Annotated[
        str | None,
        typer.Option(metavar="MS,MS,...", help="Sleep per episode in ms. [default: 1,15,50,100]"),
    ] = None,
    env: Annotated[
        str | None, typer.Option(metavar="ENV", help="Real environment to use instead of sleeping.")
    ] = None,
    algo: Algo = None,
    preset: Preset = None,
    episodes: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Episodes per iteration. [default: enough for 5 s]"),
    ] = None,
    iterations: Iterations = None,
    repeat: Repeat = 5,
    sets: Sets = None,
    out: Out = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Time the same work with different fleets and numbers of workers.

    Episodes only sleep unless --env is set. Reports the speed-up, the overhead, and the episode
    length above which Flame is faster.
    """
    from rlflame.bench.case import make_env_case, make_sleeping_cases
    from rlflame.bench.scaling import ScalingBenchmark

    if (algo or preset) if env is None else episode_ms:
        raise ConfigError(
            "--algo and --preset need --env, which cannot be combined with --episode-ms.",
            "--env ant",
        )
    counts, fleets = parse_counts(workers or _list_counts()), parse_fleets(compare)
    work: dict[str, Any] = {"episodes": episodes, "iterations": iterations, "sets": sets or ()}
    if env is None:
        lengths_ms = _parse_numbers(
            "--episode-ms", episode_ms or "1,15,50,100", float, 0, _MAX_EPISODE_MS
        )
        cases, runtime = make_sleeping_cases(lengths_ms, max(counts), **work)
    else:
        case, runtime = make_env_case(env, algorithm=algo, preset=preset, **work)
        cases = [case]
    _run(ScalingBenchmark(cases, fleets, counts, repeat), runtime, out, as_json, debug)


def rollouts(
    env: Env = "hopper",
    workers: Counts = None,
    fleet: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="Fleet: local, flame or inline (with several workers, a process for each).",
        ),
    ] = "local",
    seconds: Annotated[
        float, typer.Option(metavar="S", min=0.0, max=3600.0, help="Seconds per measurement.")
    ] = 2.0,
    repeat: Repeat = 3,
    limit: Annotated[
        bool,
        typer.Option("--limit/--no-limit", help="Also measure without a policy (not on Flame)."),
    ] = True,
    algo: Algo = None,
    preset: Preset = None,
    sets: Sets = None,
    out: Out = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Measure environment steps per second, with and without a policy.

    Also reports the time per episode.
    """
    from rlflame.bench.case import make_env_case
    from rlflame.bench.rollouts import RolloutsBenchmark

    kind, *words = parse_fleets(fleet)
    if words:
        raise ConfigError(f"--fleet is {fleet}, but must be a single fleet.", f"--fleet {kind}")
    case, runtime = make_env_case(env, algorithm=algo, preset=preset, sets=sets or ())
    counts, has_limits = parse_counts(workers or _list_counts()), limit and kind != "flame"
    benchmark = RolloutsBenchmark(
        [case], [kind], counts, repeat, seconds=seconds, has_limits=has_limits
    )
    _run(benchmark, runtime, out, as_json, debug)


def replay(
    transitions: Annotated[
        int, typer.Option(metavar="N", min=1, max=_MAX_TRANSITIONS, help="Transitions to store.")
    ] = 500_000,
    env: Annotated[
        str, typer.Option(metavar="ENV", help="Environment with continuous actions.")
    ] = "Pendulum-v1",
    workers: Counts = None,
    compare: Compare = None,
    repeat: Repeat = 3,
    sets: Sets = None,
    out: Out = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Measure how fast the replay buffer stores and samples data. Actions are random."""
    from rlflame.bench.case import make_replay_case
    from rlflame.bench.replay import ReplayBenchmark

    fleets, counts = parse_fleets(compare), parse_counts(workers or str(count_usable_cores()))
    case, runtime = make_replay_case(env, transitions, sets=sets or ())
    _run(ReplayBenchmark([case], fleets, counts, repeat), runtime, out, as_json, debug)


def learners(
    learners: Annotated[str, typer.Option(metavar="N,N,...", help="Numbers of learners.")] = "1,2",
    env: Env = "hopper",
    algo: Algo = None,
    preset: Preset = None,
    iterations: Annotated[
        int,
        typer.Option(metavar="N", min=1, help="Timed iterations per run, after one for warm-up."),
    ] = 2,
    repeat: Repeat = 5,
    sets: Sets = None,
    out: Out = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Time the same training with different numbers of learners.

    Reports the times for computation and communication. By default, PPO trains networks with two
    layers of 256 units on minibatches of 8,192 samples.
    """
    from rlflame.bench.case import make_env_case
    from rlflame.bench.learners import LearnersBenchmark, find_shard_count

    counts = parse_counts(learners, "--learners")
    shards = f"learning.gradient_shards={find_shard_count(counts, _BENCH_SHARDS)}"
    settings = [shards, *(LARGE_UPDATES if algo in (None, "ppo") else ()), *(sets or ())]
    case, runtime = make_env_case(
        env, algorithm=algo, preset=preset, iterations=iterations + 1, sets=settings
    )
    _run(LearnersBenchmark([case], ["inline"], counts, repeat), runtime, out, as_json, debug)


def _run(
    benchmark: Benchmark, runtime: RuntimeSettings, out: Path | None, as_json: bool, debug: bool
) -> None:
    from rlflame.bench.runner import BenchRunner

    BenchRunner(benchmark, runtime, out, as_json=as_json, debug=debug).run()


def _list_counts() -> str:
    """Return the default worker counts: one, and one per core."""
    return f"1,{count_usable_cores()}"


def parse_fleets(compare: str | None) -> list[str]:
    """Return the fleets to compare: by default local, and flame if it is configured."""
    if compare is None:
        from rlflame.fleet.flame.cluster_config import find_configuration

        compare = "local,flame" if find_configuration() else "local"
    fleets = list(dict.fromkeys(name.strip() for name in compare.split(",")))
    for name in fleets:
        if name not in FLEETS:
            raise ConfigError(f"There is no fleet {name!r}.", f"use one of {', '.join(FLEETS)}")
    return fleets


def parse_counts(text: str, flag: str = "--workers") -> list[int]:
    return [int(value) for value in _parse_numbers(flag, text, int, 1, _MAX_COUNT)]


def _parse_numbers(
    flag: str, text: str, parse: Callable[[str], float], low: int, high: int
) -> list[float]:
    """Parse a list of numbers and return them in ascending order."""
    try:
        values = [parse(word) for word in text.split(",")]
        if not all(low <= value <= high for value in values):
            raise ValueError
    except ValueError:
        message = f"{flag} {text!r} is not a list of numbers from {low} to {high:,}."
        raise ConfigError(message, f"{flag} 1,2,4") from None
    return sorted(set(values))


def _print_diff(old: Path, new: Path, *, as_json: bool) -> None:
    from rlflame.analysis.report import build, document

    if not old.suffix == new.suffix == ".json":
        raise ConfigError(
            f"{old} and {new} must be benchmark results (.json files).",
            "rlflame bench --diff old/scaling.json new/scaling.json",
        )
    content = build.build_report([new], [old], MARGIN)
    text = document.to_markdown(content.document)
    print_result_lines(as_json_text(content.facts, indent=1) if as_json else text.rstrip())
