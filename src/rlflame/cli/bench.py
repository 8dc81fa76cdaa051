"""`rlflame bench`. Must not know: how anything is timed or worded."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rlflame.cli.errors import handle_errors
from rlflame.cli.options import Debug, Json, Sets

FLEETS = ("local", "flame", "inline")
_MAX_COUNT = 4096
_MAX_TRANSITIONS, _MAX_EPISODE_MS = 1_000_000_000, 600_000.0
#: As rlflame.bench.published_dppo has them.
RACES = ("dppo", "dsac")
#: In comparing results, what still counts as equal.
MARGIN = 0.1

Counts = Annotated[
    str | None,
    typer.Option("--workers", metavar="N,N,...", help="Numbers of workers, or of executors."),
]
Compare = Annotated[
    str | None,
    typer.Option(
        metavar="NAME,NAME,...",
        help="Fleets to compare: local, flame, inline. [default: local, and flame where one is "
        "configured]",
    ),
]
Out = Annotated[
    str | None,
    typer.Option(
        "-o",
        "--out",
        metavar="DIR",
        help="A folder for JSON and Markdown, and what has a table has it and its picture.",
    ),
]
Algo = Annotated[
    str | None, typer.Option(metavar="ALGO", help="ppo, reinforce or sac. [default: ppo]")
]
Preset = Annotated[
    str | None, typer.Option(metavar="NAME", help="A preset, not the environment's own.")
]
Iterations = Annotated[
    int | None, typer.Option(metavar="N", min=1, help="Of each repetition; less is sooner over.")
]


def bench(
    context: typer.Context,
    recipe: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Run a published comparison again: flame-readme-ant, flame-report-ant, "
            "flame-report-cartpole; dppo or dsac, by several learners.",
        ),
    ] = None,
    diff: Annotated[
        tuple[Path, Path] | None,
        typer.Option(metavar="OLD.json NEW.json", help="Medians of two results, and percent."),
    ] = None,
    workers: Counts = None,
    compare: Compare = None,
    iterations: Iterations = None,
    steps: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="dppo, dsac: of each training.")
    ] = None,
    learners: Annotated[
        str | None,
        typer.Option(metavar="N,N,...", help="dppo, dsac: numbers of learners. [default: 1,2,4,8]"),
    ] = None,
    repeat: Annotated[int, typer.Option(metavar="N", min=1, help="Repetitions.")] = 1,
    sets: Sets = None,
    out: Out = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Measure rollouts, scaling and the replay on this machine and on Flame, warm-up apart.

    What was measured is kept when it is interrupted.
    """
    from rlflame.errors import ConfigError, format_shell
    from rlflame.experiment import run_settings

    if (name := context.invoked_subcommand) is not None:
        options = (recipe, diff, workers, compare, iterations, steps, learners, sets)
        if any((*options, out is not None, as_json, debug, repeat > 1)):
            raise ConfigError(
                f"Options before {name} are of bench itself, and would not count.",
                f"rlflame bench {name} --help, and options behind {name}",
            )
        return
    if recipe is None and diff is None:
        raise ConfigError(
            "bench needs one thing to do, and has options alone.",
            "rlflame bench rollouts, scaling, replay or learners, --recipe NAME or --diff OLD NEW",
        )
    if recipe is not None and diff is not None:
        raise ConfigError(
            f"--recipe {recipe} measures, and {format_shell('--diff', *diff)} compares two "
            "results.",
            "leave one of them out",
        )
    if diff is not None and (
        any((workers, compare, iterations, steps, learners, sets, out is not None, repeat > 1))
    ):
        raise ConfigError(
            "--diff measures nothing, and takes two results alone.",
            format_shell("rlflame", "bench", "--diff", *diff),
        )
    run_settings.limit_threads(1)
    if diff is not None:
        _print_diff(*diff, as_json=as_json)
        return
    if recipe in RACES:
        from rlflame.cli.bench_race import race

        if (workers, iterations) != (None, None):
            raise ConfigError(
                f"--recipe {recipe} has as many workers as learners, and counts steps.",
                "--learners 1,2 --steps 10000",
            )
        counts = parse_counts(learners, [1, 2, 4, 8], "--learners")
        kinds = _check_fleets((compare or "local").split(","))
        race(
            recipe, counts, kinds, steps, repeat, sets or (), parse_folder(out), as_json=as_json,
            debug=debug,
        )  # fmt: skip
        return
    from rlflame.bench import run, workloads
    from rlflame.bench.published import RECIPES

    published_recipe = RECIPES.get(recipe or "")
    if published_recipe is None:
        raise ConfigError(
            f"There is no recipe {recipe!r}.", f"--recipe {', '.join((*RECIPES, *RACES))}"
        )
    if steps is not None:
        raise ConfigError(
            f"--steps is {steps}, and {recipe} counts iterations of whole episodes.",
            f"--iterations {published_recipe.iterations} in its place, or fewer",
        )
    if learners is not None:
        raise ConfigError(
            f"--learners is {learners}, and {recipe} is learned by one.",
            f"leave it out, or rlflame bench learners --learners {learners}",
        )
    case, runtime = workloads.make_published_case(
        published_recipe, iterations=iterations, sets=sets or ()
    )
    run.run_scaling(
        [case], runtime, _parse_fleets(compare), parse_counts(workers, [_count_cores()]), repeat,
        parse_folder(out),
        published=published_recipe, as_json=as_json, debug=debug,
    )  # fmt: skip


def scaling(
    workers: Counts = None,
    compare: Compare = None,
    episode_ms: Annotated[
        str | None,
        typer.Option(
            "--episode-ms",
            metavar="MS,MS,...",
            help="Episodes that sleep so long, one a task. [default: 1,15,50,100]",
        ),
    ] = None,
    env: Annotated[
        str | None,
        typer.Option(metavar="ENV", help="A real environment's preset, not sleeping episodes."),
    ] = None,
    algo: Algo = None,
    preset: Preset = None,
    episodes: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="Episodes an iteration. [default: some 5 s of one worker, at most 100]",
        ),
    ] = None,
    iterations: Iterations = None,
    repeat: Annotated[
        int, typer.Option(metavar="N", min=1, help="Repetitions of each, in turn.")
    ] = 5,
    sets: Sets = None,
    out: Out = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Time the same work with several numbers of workers and fleets.

    Theoretical and actual speed-up, what a task costs, where Flame pays, and what to do.
    """
    from rlflame.errors import ConfigError
    from rlflame.experiment import run_settings

    run_settings.limit_threads(1)
    from rlflame.bench import run, workloads

    if env is not None and episode_ms is not None:
        raise ConfigError("--env and --episode-ms exclude each other.", "leave one out")
    if env is None and (algo, preset) != (None, None):
        raise ConfigError("--algo and --preset are for --env.", "--env ant")
    counts = parse_counts(workers, list(dict.fromkeys((1, _count_cores()))))
    kinds = _parse_fleets(compare)
    if env is not None:
        case, runtime = workloads.make_env_case(
            env, algorithm=algo, preset=preset, episodes=episodes, iterations=iterations,
            sets=sets or (),
        )  # fmt: skip
        work = [case]
    else:
        work, runtime = workloads.make_sleeping_cases(
            _parse_lengths(episode_ms or "1,15,50,100"), max(counts), episodes=episodes,
            iterations=iterations, sets=sets or (),
        )  # fmt: skip
    run.run_scaling(
        work, runtime, kinds, counts, repeat, parse_folder(out), as_json=as_json, debug=debug
    )


def rollouts(
    env: Annotated[
        str, typer.Option(metavar="ENV", help="An alias of `rlflame envs`, or an id.")
    ] = "hopper",
    workers: Counts = None,
    fleet: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="Where: local, flame, or inline: this process, or several that each have rounds "
            "of their own, as seeds side by side have.",
        ),
    ] = "local",
    seconds: Annotated[
        float, typer.Option(metavar="S", min=0.0, max=3600.0, help="Of each measurement.")
    ] = 2.0,
    repeat: Annotated[int, typer.Option(metavar="N", min=1, help="Measurements, in turn.")] = 3,
    limit: Annotated[
        bool,
        typer.Option(
            "--limit/--no-limit", help="Measure bare stepping beside it; where local or inline."
        ),
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
    from rlflame.experiment import run_settings

    run_settings.limit_threads(1)
    from rlflame.bench import run, workloads

    (kind,) = _check_fleets([fleet])
    counts = parse_counts(workers, list(dict.fromkeys((1, _count_cores()))))
    case, runtime = workloads.make_env_case(env, algorithm=algo, preset=preset, sets=sets or ())
    run.run_rollouts(
        case, runtime, kind, counts, seconds, repeat, parse_folder(out),
        limited=limit and kind != "flame", as_json=as_json, debug=debug,
    )  # fmt: skip


def replay(
    transitions: Annotated[
        int,
        typer.Option(
            metavar="N",
            min=1,
            max=_MAX_TRANSITIONS,
            help="Taken into the replay, in whole rounds.",
        ),
    ] = 500_000,
    env: Annotated[
        str,
        typer.Option(metavar="ENV", help="One whose actions are numbers."),
    ] = "Pendulum-v1",
    workers: Counts = None,
    compare: Compare = None,
    repeat: Annotated[
        int, typer.Option(metavar="N", min=1, help="Repetitions of each, in turn.")
    ] = 3,
    sets: Sets = None,
    out: Out = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Transitions a second into a replay and out of it, random actions, nothing learned.

    Cut as the published example of Flame's has it, whose figures stand beside.
    """
    from rlflame.experiment import run_settings

    run_settings.limit_threads(1)
    from rlflame.bench import run, workloads

    kinds, counts = _parse_fleets(compare), parse_counts(workers, [_count_cores()])
    case, runtime = workloads.make_replay_case(env, transitions, sets=sets or ())
    run.run_replay(
        case, runtime, kinds, counts, repeat, parse_folder(out), as_json=as_json, debug=debug
    )


def parse_folder(out: str | None) -> Path | None:
    """Where results go; an empty name is a variable of the shell that was never set."""
    from rlflame.errors import ConfigError

    if out is not None and (not out.strip(" -") or not out.isprintable()):
        raise ConfigError(
            f"-o is {out!r}, and results go into a folder.",
            "-o bench, or leave it out and read them here; --json is for programs",
        )
    return Path(out) if out is not None else None


def _count_cores() -> int:
    from rlflame.rollout import blas

    return blas.count_usable_cores()


def _parse_fleets(compare: str | None) -> list[str]:
    """What is compared; Flame is never left out silently where it was asked for."""
    if compare is not None:
        return _check_fleets(compare.split(","))
    from rlflame.fleet.flame.endpoint import find_configuration

    return ["local", "flame"] if find_configuration() else ["local"]


def _check_fleets(names: list[str]) -> list[str]:
    from rlflame.errors import ConfigError

    fleets = list(dict.fromkeys(name.strip() for name in names))
    for name in fleets:
        if name not in FLEETS:
            raise ConfigError(f"There is no fleet {name!r}.", f"one of {', '.join(FLEETS)}")
    return fleets


def parse_counts(text: str | None, default: list[int], flag: str = "--workers") -> list[int]:
    from rlflame.errors import ConfigError

    if text is None:
        return default
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and 0 < int(word) <= _MAX_COUNT for word in words):
        raise ConfigError(
            f"{flag} {text!r} is no list of numbers from 1 to {_MAX_COUNT:,}.", f"{flag} 1,2,4"
        )
    return sorted({int(word) for word in words})


def _parse_lengths(text: str) -> list[float]:
    from rlflame.errors import ConfigError

    try:
        lengths_ms = sorted({float(word) for word in text.split(",")})
    except ValueError:
        lengths_ms = [-1.0]
    if not all(0.0 <= length_ms <= _MAX_EPISODE_MS for length_ms in lengths_ms):
        raise ConfigError(
            f"--episode-ms {text!r} is no list of milliseconds from 0 to {_MAX_EPISODE_MS:,.0f}.",
            "--episode-ms 1,15,50,100",
        )
    return lengths_ms


def _print_diff(old: Path, new: Path, *, as_json: bool) -> None:
    from rlflame.analysis.report import bench_comparison, build, markdown
    from rlflame.console.output import as_json_text, print_result_lines
    from rlflame.errors import ConfigError, format_shell

    results = [bench_comparison.find_results(path) or path for path in (old, new)]
    for path, file in zip((old, new), results, strict=True):
        if path.suffix != ".json":
            examples = results if file != path else ["old/scaling.json", "new/scaling.json"]
            raise ConfigError(
                f"{path} is no result of a benchmark, which ends in .json.",
                format_shell("rlflame", "bench", "--diff", *examples),
            )
    content = build.build_report([new], [old], MARGIN)
    text = (
        as_json_text(content.facts, indent=1) if as_json else markdown.to_markdown(content.document)
    )
    print_result_lines(text.rstrip())


group = typer.Typer(invoke_without_command=True, no_args_is_help=True, rich_markup_mode=None)
group.callback()(handle_errors(bench))
group.command("rollouts")(handle_errors(rollouts))
group.command("scaling")(handle_errors(scaling))
group.command("replay")(handle_errors(replay))
