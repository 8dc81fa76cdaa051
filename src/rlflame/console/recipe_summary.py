"""Describes a recipe and its environment for banners, dry runs and lists."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlflame.terminal_text import format_count, format_return, format_size

if TYPE_CHECKING:
    from rlflame.config.recipe import Recipe
    from rlflame.learning.buffers.replay_buffer import ReplayShape
    from rlflame.rollout.task import EnvSpec, PolicySpec
    from rlflame.training.evaluation import EvaluationRecord


@dataclass(frozen=True, slots=True)
class RecipeSummary:
    """A description of a recipe and its environment."""

    recipe: Recipe
    env: EnvSpec
    preset: str

    @property
    def layers(self) -> tuple[int, ...]:
        """The sizes of the policy's layers, from the observation to the output."""
        spec = self.policy_spec
        return (spec.observation_size, *spec.hidden, spec.output_size)

    @property
    def policy_spec(self) -> PolicySpec:
        from rlflame.storage.checkpoint import build_policy_spec

        return build_policy_spec(self.recipe.learning, self.env)

    @property
    def episodes_per_iteration(self) -> int | None:
        rollout = self.recipe.learning.rollout
        return rollout.columns if rollout.unit == "episodes" else None

    @property
    def iterations(self) -> int | None:
        """The number of iterations; None if it depends on the length of episodes."""
        recipe, rollout = self.recipe, self.recipe.learning.rollout
        limits = [recipe.stop_at_iterations] if recipe.stop_at_iterations else []
        if recipe.stop_at_steps:
            if rollout.unit == "episodes":
                return None
            limits.append(-(-recipe.stop_at_steps // (rollout.columns * rollout.steps)))
        return min(limits)

    @property
    def max_workers(self) -> int:
        return self.recipe.learning.rollout.num_slots

    def format_budget(self) -> str:
        recipe, iterations = self.recipe, self.iterations
        steps = format_count(recipe.stop_at_steps, "step") if recipe.stop_at_steps else ""
        if recipe.stop_at_iterations is None:
            return f"{steps} in {format_count(iterations, 'iteration')}" if iterations else steps
        text = format_count(recipe.stop_at_iterations, "iteration")
        if episodes := self.episodes_per_iteration:
            total = recipe.stop_at_iterations * episodes
            text += f" of {format_count(episodes, 'episode')} ({total:,} episodes)"
        return f"{text}, or {steps}" if steps else text

    @property
    def replay(self) -> ReplayShape | None:
        """The shape of the replay buffer; None for an algorithm without one."""
        from rlflame.learning.buffers.replay_buffer import ReplayShape
        from rlflame.rollout.mujoco.known_spaces import find_episode_limit

        learning, limit = self.recipe.learning, self.env.max_episode_steps
        if learning.replay is None:
            return None
        return ReplayShape(
            learning.replay.buffer_size,
            learning.rollout.columns,
            self.env.observation_size,
            self.env.action_size,
            find_episode_limit(self.env.id) if limit is None else limit,
        )

    def format_lines(self, seeds: str = "") -> list[tuple[str, str]]:
        """Return the recipe as pairs of a name and a text; `seeds` lists the seeds."""
        from rlflame.config.toml_io import describe_type

        env, learning = self.env, self.recipe.learning
        network, rollout, window = learning.network, learning.rollout, learning.policy_average
        actions = self._format_actions()
        kwargs = "".join(
            f", {key}={value!r} ({describe_type(value)})" for key, value in env.kwargs.items()
        )
        kwargs += "".join(f", {wrapper.name.partition(':')[2]}" for wrapper in env.wrappers)
        seed = f"seeds {seeds}" if "-" in seeds or "," in seeds else f"seed {learning.seed}"
        preset = f", preset {self.preset}" if self.preset else ""
        slots = format_count(rollout.num_slots, "slot")
        length = format_count(rollout.steps, "step")
        length = (
            f"x {length}" if rollout.unit == "steps" else f"x 1 whole episode of at most {length}"
        )
        policy = f"{'-'.join(map(str, self.layers))} {network.activation}"
        policy += ", observations normalised" if self.policy_spec.normalise else ""
        policy += f", averaged over {format_count(window, 'iteration')} at most" if window else ""
        learner = f"{learning.provider}, {format_count(learning.threads, 'thread')}"
        learner += f", on {learning.device}" if learning.device != "cpu" else ""
        shards = learning.gradient_shards
        learner += f", {shards} shards" if shards > 1 else ""
        lines = [
            (
                "environment",
                f"{env.id}: {format_count(env.observation_size, 'observation')}, {actions}{kwargs}",
            ),
            ("algorithm", f"{learning.algorithm.upper()}{preset}, {seed}"),
            ("budget", self.format_budget()),
            ("batch", f"{slots} x {format_count(rollout.envs_per_slot, 'environment')} {length}"),
            ("policy", policy),
            ("learner", learner),
        ]
        return [*lines, *self._format_replay()]

    def _format_actions(self) -> str:
        env = self.env
        if env.action_kind == "composite":
            numbers = env.action_counts.count(0)
            actions = format_count(env.action_size - numbers, "choice")
            actions += f" and {format_count(numbers, 'continuous action')}" if numbers else ""
        else:
            actions = format_count(env.action_size, f"{env.action_kind} action")
        places = {"info": "info", "observation": "the observation", "method": "action_masks()"}
        place = places.get(env.mask_source)
        return f"{actions} (masked by {place})" if place else actions

    def _format_replay(self) -> list[tuple[str, str]]:
        """Return lines about updates and replay memory; empty without a replay buffer."""
        settings, replay = self.recipe.learning.replay, self.replay
        if settings is None or replay is None:
            return []
        starts = settings.learning_starts
        updates = f"{settings.updates_per_step:g} per step after the first {starts:,}"
        if self.recipe.stop_at_steps is not None and self.recipe.stop_at_steps <= starts:
            name = f"{self.recipe.learning.algorithm}.learning_starts"
            updates += f": none in this run, unless {name} is reduced"
        transitions = format_count(replay.rows * replay.columns, "transition")
        memory = f"a replay buffer of {transitions} takes {format_size(replay.nbytes)} when full"
        return [("updates", updates), ("memory", memory)]

    def compute_reset_seeds(self) -> list[list[int]]:
        """Return the reset seed of the first episode of every environment, by slot."""
        from rlflame.rollout.seeding import Role, make_reset_seed

        learning = self.recipe.learning
        return [
            [
                make_reset_seed(learning.seed, Role.RESET, slot, row, 0)
                for row in range(learning.rollout.envs_per_slot)
            ]
            for slot in range(learning.rollout.num_slots)
        ]

    def as_dict(self) -> dict[str, Any]:
        """Return the fields for `--dry-run --json` and the `start` event.

        The names of the fields are stable.
        """
        recipe, learning = self.recipe, self.recipe.learning
        return {
            "environment": self.env.id,
            "env_kwargs": dict(self.env.kwargs),
            "obs_dim": self.env.observation_size,
            "act_dim": self.env.action_size,
            "continuous": self.env.action_kind == "continuous",
            "action_mask": self.env.mask_source != "none",
            "algorithm": learning.algorithm,
            "preset": self.preset or None,
            "seed": learning.seed,
            "layers": list(self.layers),
            "stop_at_steps": recipe.stop_at_steps,
            "stop_at_iterations": recipe.stop_at_iterations,
            "iterations": self.iterations,
            "num_slots": learning.rollout.num_slots,
            "envs_per_slot": learning.rollout.envs_per_slot,
            "steps_per_fragment": learning.rollout.steps,
            "unit": learning.rollout.unit,
            "episodes_per_iteration": self.episodes_per_iteration,
            "most_workers": self.max_workers,
            "provider": learning.provider,
            "threads": learning.threads,
            "replay_bytes": self.replay and self.replay.nbytes,
        }


def format_evaluation(record: EvaluationRecord) -> str:
    """Format a score with its interval."""
    return (
        f"{format_return(record.mean)}, 95% interval "
        f"[{format_return(record.low)}, {format_return(record.high)}] "
        f"over {format_count(record.episodes, 'episode')}"
    )
