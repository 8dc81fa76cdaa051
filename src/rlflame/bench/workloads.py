"""Which pieces of training are timed: of sleeping episodes, of an environment, of a published one.

Must not know: fleets, clocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rlflame.bench.base import Case
from rlflame.bench.published import REPLAY, PublishedComparison
from rlflame.config import resolve, user_env_file
from rlflame.config.recipe import Recipe, RunConfig
from rlflame.config.runtime import RuntimeSettings
from rlflame.errors import ConfigError
from rlflame.experiment import components, run_settings

SLEEPING = str(Path(__file__).with_name("shipped") / "sleeping.py")
#: One worker's time for an iteration of sleeping episodes, unless their number is given.
_ROUND_MS = 5000.0
_FEWEST, _MOST = 8, 100
_SLEEPING_ITERATIONS, _ITERATIONS = 1, 3


def make_sleeping_cases(
    episode_ms: Sequence[float],
    most_workers: int,
    *,
    episodes: int | None = None,
    iterations: int | None = None,
    sets: Sequence[str] = (),
) -> tuple[list[Case], RuntimeSettings]:
    """REINFORCE on episodes that sleep, each a task of its own, as Flame's example has it."""
    for name, _, value in (word.partition("=") for word in sets):
        if name.strip().endswith("kwargs.episode_ms"):
            raise ConfigError(
                f"{name} is {value}, and how long episodes take has an option of its own.",
                f"--episode-ms {value} in its place",
            )
    user_env_file.load_env_file(SLEEPING)
    cases, runtime = [], RuntimeSettings()
    for length in episode_ms:
        config, _ = resolve.resolve(
            environment="sleeping:Sleeping-v0",
            algorithm="reinforce",
            preset="reinforce-classic",
            sets=sets,
            flags={"learning.environment.kwargs.episode_ms": length},
            continuous=components.has_continuous_actions,
        )
        config = run_settings.copy_with_episodes(
            config, episodes or _count_episodes(length, most_workers)
        )
        name = f"{float(length)} ms".replace(".0 ", " ")
        cases.append(_make_case(name, config, iterations or _SLEEPING_ITERATIONS, length))
        runtime = _resolve_runtime(config).model_copy(update={"env_file": SLEEPING})
    return cases, runtime


def _count_episodes(episode_ms: float, most_workers: int) -> int:
    """Episodes that every worker has some of, and that do not take all day."""
    fitting = int(_ROUND_MS / max(episode_ms, 1.0))
    return max(_FEWEST, 2 * most_workers, min(_MOST, fitting))


def make_env_case(
    environment: str,
    *,
    algorithm: str | None = None,
    preset: str | None = None,
    episodes: int | None = None,
    iterations: int | None = None,
    sets: Sequence[str] = (),
) -> tuple[Case, RuntimeSettings]:
    """Some iterations of an environment's preset."""
    config, name = resolve.resolve(
        environment=environment, algorithm=algorithm, preset=preset, sets=sets,
        continuous=components.has_continuous_actions,
    )  # fmt: skip
    if episodes is not None:
        if config.learning.rollout.unit != "episodes":
            raise ConfigError(
                f"--episodes is {episodes}, and {name} collects steps, not whole episodes.",
                "leave it out, or --algo reinforce",
            )
        config = run_settings.copy_with_episodes(config, episodes)
    case = _make_case(f"{environment} {name}", config, iterations or _ITERATIONS, None)
    return case, _resolve_runtime(config)


def make_replay_case(
    environment: str, transitions: int, *, sets: Sequence[str] = ()
) -> tuple[Case, RuntimeSettings]:
    """Random actions into a replay that holds all of them, cut as the published example has it."""
    config, name = resolve.resolve(
        environment=environment,
        algorithm="sac",
        sets=[
            f"rollout.num_slots={REPLAY.collections}",
            "rollout.envs_per_slot=1",
            f"rollout.steps={REPLAY.steps}",
            f"sac.batch_size={REPLAY.batch}",
            f"sac.buffer_size={transitions}",
            *sets,
        ],
        continuous=components.has_continuous_actions,
    )
    rollout = config.learning.rollout
    round_steps = rollout.columns * rollout.steps
    case = _make_case(f"{environment} {name}", config, max(1, -(-transitions // round_steps)), None)
    try:
        components.make_policy_spec(case.recipe.learning, case.env)
    except ConfigError as error:
        raise ConfigError(
            error.message, "--env pendulum, or another whose actions are numbers with bounds"
        ) from error
    try:
        components.check_memory(case.recipe, case.env, resumed=False)
    except ConfigError as error:
        raise ConfigError(error.message, "fewer --transitions") from error
    return case, _resolve_runtime(config)


def make_published_case(
    comparison: PublishedComparison, *, iterations: int | None = None, sets: Sequence[str] = ()
) -> tuple[Case, RuntimeSettings]:
    """The same work as theirs: their algorithm, hyperparameters, iterations and episodes."""
    return make_env_case(
        comparison.environment,
        algorithm="reinforce",
        preset="reinforce-classic",
        episodes=comparison.episodes_per_iteration,
        iterations=iterations or comparison.iterations,
        sets=sets,
    )


def _resolve_runtime(config: RunConfig) -> RuntimeSettings:
    """But for what has options of its own here, and would count for nothing."""
    usual = RuntimeSettings()
    for name, options in (("fleet", "--fleet or --compare"), ("workers", "--workers")):
        value = getattr(config.runtime, name)
        if value != getattr(usual, name):
            raise ConfigError(
                f"runtime.{name} is {value}, and what is measured has options of its own.",
                f"{options} in its place",
            )
    return config.runtime


def _make_case(name: str, config: RunConfig, iterations: int, episode_ms: float | None) -> Case:
    recipe = config.recipe.copy_with_horizon()
    quiet = recipe.evaluation.model_copy(update={"every_steps": None, "until_return": None})
    changes = {"stop_at_steps": None, "stop_at_iterations": iterations, "evaluation": quiet}
    short: Recipe = recipe.model_copy(update=changes)
    return Case(name, short, components.make_env_spec(short.learning.environment), episode_ms)
