"""`rlflame bench`: rollouts, scaling, replay, learners, and the comparison of two results."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from rlflame.cli.options import ALGO_HELP, Debug, Json, Sets
from rlflame.console.output import as_json_text, print_result_lines
from rlflame.errors import ConfigError, format_shell
from rlflame.rollout.blas import limit_threads

FLEETS = ("local", "flame", "inline")
_MAX_COUNT = 4096
_MAX_TRANSITIONS, _MAX_EPISODE_MS = 1_000_000_000, 600_000.0
#: The difference of two results that still counts as none.
MARGIN = 0.1
#: PPO's updates where they are large enough to be worth sharing among learners.
LARGE_UPDATES = (
    "network.hidden=[256,256]",
    "ppo.minibatch_size=8192",
    "rollout.num_slots=8",
    "rollout.envs_per_slot=8",
    "rollout.steps=256",
)

Counts = Annotated[
    str | None,
    typer.Option("--workers", metavar="N,N,...", help="Numbers of workers, or of executors."),
]
Compare = Annotated[
    str | None,
    typer.Option(
        metavar="NAME,...", help="local, flame, inline. [default: local, and a configured flame]"
    ),
]
Out = Annotated[
    str | None,
    typer.Option(
        "-o", "--out", metavar="DIR", help="A folder for JSON, Markdown, tables and pictures."
    ),
]
Env = Annotated[str, typer.Option(metavar="ENV", help="An alias of `rlflame envs`, or an id.")]
Algo = Annotated[str | None, typer.Option(metavar="ALGO", help=ALGO_HELP)]
Preset = Annotated[
    str | None, typer.Option(metavar="NAME", help="A preset, not the environment's own.")
]
Iterations = Annotated[
    int | None, typer.Option(metavar="N", min=1, help="The length of each repetition.")
]
Repeat = Annotated[int, typer.Option(metavar="N", min=1, help="Repetitions of each, in turn.")]


def bench(
    context: typer.Context,
    diff: Annotated[
        tuple[Path, Path] | None,
        typer.Option(metavar="OLD.json NEW.json", help="Medians of two results, and percent."),
    ] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Measure rollouts, scaling and the replay on this machine and on Flame, warm-up apart.

    What was measured is kept when it is interrupted.
    """
    if (name := context.invoked_subcommand) is not None:
        if diff or as_json or debug:
            raise ConfigError(
                f"Options before {name} are of bench itself, and would not count.",
                f"rlflame bench {name} --help, and options behind {name}",
            )
        return
    if diff is None:
        raise ConfigError(
            "bench needs one thing to do, and has options alone.",
            "rlflame bench rollouts, scaling, replay or learners, or --diff OLD NEW",
        )
    limit_threads(1)
    _print_diff(*diff, as_json=as_json)


def scaling(
    workers: Counts = None,
    compare: Compare = None,
    episode_ms: Annotated[
        str | None,
        typer.Option(metavar="MS,MS,...", help="Sleeping episodes. [default: 1,15,50,100]"),
    ] = None,
    env: Annotated[
        str | None,
        typer.Option(metavar="ENV", help="A real environment's preset, not sleeping episodes."),
    ] = None,
    algo: Algo = None,
    preset: Preset = None,
    episodes: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Episodes an iteration. [default: 5 s of work]"),
    ] = None,
    iterations: Iterations = None,
    repeat: Repeat = 5,
    sets: Sets = None,
    out: Out = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Time the same work with several numbers of workers and fleets.

    Theoretical and actual speed-up, what a task costs, where Flame pays, and what to do.
    """
    folder = _prepare(out)
    from rlflame.bench.case import make_env_case, make_sleeping_cases
    from rlflame.bench.runner import BenchRunner
    from rlflame.bench.scaling import ScalingBenchmark

    if env is not None and episode_ms is not None:
        raise ConfigError("--env and --episode-ms exclude each other.", "leave one out")
    if env is None and (algo, preset) != (None, None):
        raise ConfigError("--algo and --preset are for --env.", "--env ant")
    counts, fleets = parse_counts(workers, _list_counts()), parse_fleets(compare)
    if env is None:
        lengths_ms = _parse_lengths(episode_ms or "1,15,50,100")
        cases, runtime = make_sleeping_cases(
            lengths_ms, max(counts), episodes=episodes, iterations=iterations, sets=sets or ()
        )
    else:
        case, runtime = make_env_case(
            env,
            algorithm=algo,
            preset=preset,
            episodes=episodes,
            iterations=iterations,
            sets=sets or (),
        )
        cases = [case]
    benchmark = ScalingBenchmark(cases, fleets, counts, repeat)
    BenchRunner(benchmark, runtime, folder, as_json=as_json, debug=debug).run()


def rollouts(
    env: Env = "hopper",
    workers: Counts = None,
    fleet: Annotated[
        str,
        typer.Option(metavar="NAME", help="local, flame, or inline: processes without workers."),
    ] = "local",
    seconds: Annotated[
        float, typer.Option(metavar="S", min=0.0, max=3600.0, help="Of each measurement.")
    ] = 2.0,
    repeat: Repeat = 3,
    limit: Annotated[
        bool,
        typer.Option("--limit/--no-limit", help="Measure bare stepping too; not on flame."),
    ] = True,
    algo: Algo = None,
    preset: Preset = None,
    sets: Sets = None,
    out: Out = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Environment steps a second, beside what the physics alone could do.

    And the milliseconds of an episode.
    """
    folder = _prepare(out)
    from rlflame.bench.case import make_env_case
    from rlflame.bench.rollouts import RolloutsBenchmark
    from rlflame.bench.runner import BenchRunner

    kind, *more = parse_fleets(fleet)
    if more:
        raise ConfigError(f"--fleet is {fleet}, and rollouts takes one.", f"--fleet {kind}")
    case, runtime = make_env_case(env, algorithm=algo, preset=preset, sets=sets or ())
    counts, has_limits = parse_counts(workers, _list_counts()), limit and kind != "flame"
    benchmark = RolloutsBenchmark(case, kind, counts, seconds, repeat, has_limits=has_limits)
    BenchRunner(benchmark, runtime, folder, as_json=as_json, debug=debug).run()


def replay(
    transitions: Annotated[
        int,
        typer.Option(metavar="N", min=1, max=_MAX_TRANSITIONS, help="Added, in whole rounds."),
    ] = 500_000,
    env: Annotated[
        str, typer.Option(metavar="ENV", help="One whose actions are numbers.")
    ] = "Pendulum-v1",
    workers: Counts = None,
    compare: Compare = None,
    repeat: Repeat = 3,
    sets: Sets = None,
    out: Out = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Transitions a second into a replay and out of it, random actions, nothing learned."""
    folder = _prepare(out)
    from rlflame.bench.case import make_replay_case
    from rlflame.bench.replay import ReplayBenchmark
    from rlflame.bench.runner import BenchRunner

    fleets, counts = parse_fleets(compare), parse_counts(workers, _list_counts()[-1:])
    case, runtime = make_replay_case(env, transitions, sets=sets or ())
    benchmark = ReplayBenchmark(case, fleets, counts, repeat)
    BenchRunner(benchmark, runtime, folder, as_json=as_json, debug=debug).run()


def learners(
    learners: Annotated[
        str, typer.Option(metavar="N,N,...", help="Numbers of learners, in turn.")
    ] = "1,2",
    env: Env = "hopper",
    algo: Algo = None,
    preset: Preset = None,
    iterations: Annotated[
        int, typer.Option(metavar="N", min=1, help="Of each run, after one to warm up.")
    ] = 2,
    repeat: Repeat = 5,
    sets: Sets = None,
    out: Out = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Time the same training with several numbers of learners.

    An update's computing and exchanging apart. PPO is measured where it is most of the work:
    256x256 units and minibatches of 8,192 samples, unless --set says otherwise.
    """
    folder = _prepare(out)
    from rlflame.bench.case import make_env_case
    from rlflame.bench.learners import LearnersBenchmark, find_shard_count
    from rlflame.bench.runner import BenchRunner
    from rlflame.config.recipe import DEFAULT_SHARDS

    counts = parse_counts(learners, [], "--learners")
    shards = f"learning.gradient_shards={find_shard_count(counts, DEFAULT_SHARDS)}"
    settings = [shards, *(LARGE_UPDATES if algo in (None, "ppo") else ()), *(sets or ())]
    case, runtime = make_env_case(
        env, algorithm=algo, preset=preset, iterations=iterations + 1, sets=settings
    )
    benchmark = LearnersBenchmark(case, counts, repeat)
    BenchRunner(benchmark, runtime, folder, as_json=as_json, debug=debug).run()


def _prepare(out: str | None) -> Path | None:
    """Limit threads before numpy is loaded, and check the folder of results."""
    limit_threads(1)
    return parse_folder(out)


def parse_folder(out: str | None) -> Path | None:
    """The folder of `-o`; an empty name is a variable of the shell that was never set."""
    if out is not None and (not out.strip(" -") or not out.isprintable()):
        raise ConfigError(
            f"-o is {out!r}, and results go into a folder.",
            "-o bench, or leave it out and read them here; --json is for programs",
        )
    return Path(out) if out is not None else None


def _list_counts() -> list[int]:
    """One worker, and a worker for each core."""
    from rlflame.rollout.machine import count_usable_cores

    return [1, count_usable_cores()]


def parse_fleets(compare: str | None) -> list[str]:
    """The fleets to compare: by default local, and Flame where one is configured."""
    if compare is None:
        from rlflame.fleet.flame.cluster_config import find_configuration

        compare = "local,flame" if find_configuration() else "local"
    fleets = list(dict.fromkeys(name.strip() for name in compare.split(",")))
    for name in fleets:
        if name not in FLEETS:
            raise ConfigError(f"There is no fleet {name!r}.", f"one of {', '.join(FLEETS)}")
    return fleets


def parse_counts(text: str | None, default: Sequence[int], flag: str = "--workers") -> list[int]:
    """Whole numbers in ascending order."""
    try:
        values = default if text is None else [int(word) for word in text.split(",")]
        if not all(1 <= value <= _MAX_COUNT for value in values):
            raise ValueError
    except ValueError:
        message = f"{flag} {text!r} is no list of numbers from 1 to {_MAX_COUNT:,}."
        raise ConfigError(message, f"{flag} 1,2,4") from None
    return sorted(set(values))


def _parse_lengths(text: str) -> list[float]:
    try:
        values = [float(word) for word in text.split(",")]
        if not all(0.0 <= value <= _MAX_EPISODE_MS for value in values):
            raise ValueError
    except ValueError:
        limits = f"from 0 to {_MAX_EPISODE_MS:,.0f}"
        message = f"--episode-ms {text!r} is no list of milliseconds {limits}."
        raise ConfigError(message, "--episode-ms 1,15,50,100") from None
    return sorted(set(values))


def _print_diff(old: Path, new: Path, *, as_json: bool) -> None:
    from rlflame.analysis.report import bench_comparison, build, document

    results = [bench_comparison.find_results(path) or path for path in (old, new)]
    for path, file in zip((old, new), results, strict=True):
        if path.suffix != ".json":
            examples = results if file != path else ["old/scaling.json", "new/scaling.json"]
            raise ConfigError(
                f"{path} is no result of a benchmark, which ends in .json.",
                format_shell("rlflame", "bench", "--diff", *examples),
            )
    content = build.build_report([new], [old], MARGIN)
    text = document.to_markdown(content.document)
    print_result_lines(as_json_text(content.facts, indent=1) if as_json else text.rstrip())
