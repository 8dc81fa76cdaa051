"""The cases of the golden table: short runs and the commands that start them.

`golden.py` runs these commands. When rlflame renames a setting or a preset, rename it here too, but
keep the names of the cases, because the table refers to them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

#: Placeholders for the run folder, the environment file and the folder of the case.
OUT, ENV_FILE, FOLDER = "{out}", "{env_file}", "{folder}"

#: Environments with unusual spaces: matrices, integers, and choices that start at -1.
ENV_FILE_TEXT = '''
"""Small environments with unusual spaces."""
import gymnasium
import numpy as np


class Drift(gymnasium.Env):
    def __init__(self, kind="matrix", length=9):
        self.kind, self.length = kind, length
        dtype, shape = (np.int64, (2, 2)) if kind == "choice" else (np.float64, (3, 2))
        self.observation_space = gymnasium.spaces.Box(-100, 100, shape, dtype)
        if kind == "choice":
            self.action_space = gymnasium.spaces.Discrete(3, start=-1)
        else:
            low = np.array([[-1.0, -2.0], [0.0, -0.5]], np.float32)
            self.action_space = gymnasium.spaces.Box(low, low + 2.5, dtype=np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        self.x = self.np_random.normal(0, 3, self.observation_space.shape)
        return self.seen(), {}

    def seen(self):
        return np.clip(self.x, -99, 99).astype(self.observation_space.dtype)

    def step(self, action):
        self.t += 1
        self.x = 0.9 * self.x + np.sum(action) + self.np_random.normal(0, 1, self.x.shape)
        ended = bool(self.t >= self.length + self.np_random.integers(3))
        return self.seen(), float(-np.abs(self.x).mean()), ended, False, {}


gymnasium.register("Drift-v0", Drift, max_episode_steps=11)
'''

EVALUATION = {
    "evaluation.every_steps": 64,
    "evaluation.episodes": 2,
    "evaluation.final_episodes": 3,
    "evaluation.max_episode_steps": 30,
}
#: Settings for iterations of 64 steps.
ROLLOUT = {"rollout.num_slots": 2, "rollout.envs_per_slot": 2, "rollout.steps": 16}
PPO = {
    **ROLLOUT,
    **EVALUATION,
    "stop_at_iterations": 3,
    "ppo.epochs": 2,
    "ppo.minibatch_size": 32,
}
REINFORCE = {
    **EVALUATION,
    "rollout.num_slots": 3,
    "rollout.envs_per_slot": 2,
    "rollout.steps": 40,
    "stop_at_iterations": 3,
}
#: Settings for iterations of 16 steps. Updates begin after the second iteration.
SAC = {
    **ROLLOUT,
    **EVALUATION,
    "rollout.steps": 4,
    "network.hidden": "[24,16]",
    "stop_at_iterations": 6,
    "sac.learning_starts": 32,
    "sac.batch_size": 16,
}


@dataclass(frozen=True)
class Case:
    """Commands that run one after the other and write their runs into one folder."""

    commands: tuple[tuple[str, ...], ...]
    #: A command that prints the recipe as JSON. Its numbers are hashed too.
    recipe: tuple[str, ...] = ()


def list_options(settings: Mapping[str, Any]) -> list[str]:
    """Format settings as `--set` options. A value of None omits the setting."""
    options = []
    for name, value in settings.items():
        if value is not None:
            text = str(value).lower() if isinstance(value, bool) else str(value)
            options += ["--set", f"{name}={text}"]
    return options


def make_train(
    algorithm: str, environment: str, settings: Mapping[str, Any], words: Sequence[str] = ()
) -> tuple[str, ...]:
    """Make a `rlflame train` command."""
    chosen = ("--algo", algorithm, "--env", environment)
    return ("train", *chosen, *list_options(settings), *words, "--out", OUT)


def make_cases() -> dict[str, Case]:
    """Return all cases by name."""
    cases: dict[str, Case] = {}

    def add(name: str, *commands: tuple[str, ...], recipe: tuple[str, ...] = ()) -> None:
        assert name not in cases, name
        cases[name] = Case(commands, recipe)

    def add_train(
        name: str, environment: str, *words: str, settings: Mapping[str, Any] | None = None
    ) -> None:
        algorithm = name.partition("-")[0]
        base = {"ppo": PPO, "reinforce": REINFORCE, "sac": SAC}[algorithm]
        merged = {**base, **(settings or {})}
        add(name, make_train(algorithm, environment, merged, words))

    _add_presets(add)
    _add_environments(add_train)
    _add_ppo(add_train)
    _add_reinforce(add_train)
    _add_sac(add_train)
    _add_several_commands(add)
    return cases


#: Presets and an environment for each. Only the batch size and the budget are reduced.
_PRESETS = [
    ("ant-ppo", "ant"),
    ("ant-reinforce", "ant"),
    ("ant-sac", "ant"),
    ("cartpole-ppo", "cartpole"),
    ("default-ppo", "acrobot"),
    ("default-ppo", "reacher"),
    ("default-reinforce", "cartpole"),
    ("default-reinforce", "halfcheetah"),
    ("default-sac", "reacher"),
    ("hopper-ppo-wide", "hopper"),
    ("hopper-ppo", "hopper"),
    ("hopper-sac", "hopper"),
    ("lunarlander-ppo", "lunarlander"),
    ("mountaincarcontinuous-ppo", "mountaincarcontinuous"),
    ("mujoco-ppo-wide", "halfcheetah"),
    ("mujoco-ppo", "halfcheetah"),
    ("mujoco-sac", "halfcheetah"),
    ("pendulum-ppo", "pendulum"),
    ("pendulum-sac", "pendulum"),
    ("reinforce-classic", "cartpole"),
    ("reinforce-classic", "pendulum"),
    ("swimmer-ppo", "swimmer"),
    ("walker2d-ppo", "walker2d"),
    ("walker2d-sac", "walker2d"),
]


def _add_presets(add: Any) -> None:
    for preset, environment in _PRESETS:
        settings = {
            "evaluation.every_steps": 256,
            "evaluation.episodes": 2,
            "evaluation.final_episodes": 2,
            "evaluation.max_episode_steps": 50,
            "stop_at_iterations": 2,
            "rollout.num_slots": 2,
            "rollout.steps": 64 if "reinforce" in preset else 32,
        }
        algorithm = "ppo"
        if "reinforce" in preset:
            algorithm = "reinforce"
        elif "sac" in preset:
            algorithm = "sac"
            settings |= {"rollout.steps": 16, "sac.learning_starts": 32, "stop_at_iterations": 3}
        if preset == "reinforce-classic":
            settings["rollout.num_slots"] = 5
        if preset == "swimmer-ppo":
            settings["rollout.steps"] = 300
        words = ("--preset", preset)
        add(
            f"preset-{preset}-{environment}",
            make_train(algorithm, environment, settings, words),
            recipe=(
                "train",
                "--algo",
                algorithm,
                "--env",
                environment,
                *words,
                "--dry-run",
                "--json",
            ),
        )


def _add_environments(add_train: Any) -> None:
    """Add the environments with a fast loop, and each way to make other environments."""
    for environment in ("acrobot", "mountaincar", "lunarlander"):
        add_train(f"ppo-{environment}", environment)
    for environment in ("bipedalwalker", "halfcheetah", "humanoid", "inverteddoublependulum"):
        add_train(f"ppo-{environment}", environment, settings={"stop_at_iterations": 2})
    for environment in ("ant", "hopper", "invertedpendulum", "reacher", "swimmer", "walker2d"):
        add_train(f"sac-{environment}", environment)
    add_train("reinforce-pusher", "pusher")
    add_train("reinforce-hopper", "hopper")
    add_train("reinforce-mountaincarcontinuous", "mountaincarcontinuous")
    # Episodes that a time limit truncates. The states of these environments are restored in both
    # ways.
    limit = {"environment.max_episode_steps": 7}
    add_train("ppo-pendulum-time-limit", "pendulum", settings=limit)
    add_train("sac-halfcheetah-time-limit", "halfcheetah", settings=limit)
    add_train("reinforce-pendulum-time-limit", "pendulum", settings=limit)
    add_train(
        "ppo-hopper-arguments",
        "hopper",
        *("--env-kwargs", "terminate_when_unhealthy=false"),
        *("--env-kwargs", "exclude_current_positions_from_observation=false"),
        *("--env-kwargs", "reset_noise_scale=0.1"),
    )
    add_train("ppo-pendulum-gravity", "pendulum", "--env-kwargs", "g=4.5")
    # rlflame has no fast loop for this version of a MuJoCo environment.
    add_train("ppo-hopper-v4", "Hopper-v4")
    own = ("--env-file", ENV_FILE)
    add_train("ppo-own-choice", "Drift-v0", *own, "--env-kwargs", "kind=choice")
    add_train("ppo-own-matrix", "Drift-v0", *own)
    add_train("sac-own-matrix", "Drift-v0", *own)
    add_train("reinforce-own-choice", "Drift-v0", *own, "--env-kwargs", "kind=choice")


def _add_ppo(add_train: Any) -> None:
    variants: list[tuple[str, dict[str, Any]]] = [
        ("", {}),
        ("staleness", {"rollout.staleness": 1}),
        ("raw-observations", {"network.normalise_observations": False}),
        ("observation-clip", {"network.observation_clip": 0.5}),
        ("seed", {"learning.seed": 7}),
        ("gae", {"ppo.gae_lambda": 0.5, "ppo.discount": 0.9}),
        (
            "advantages-batch",
            {
                "ppo.normalise_advantages": "batch",
                "ppo.recompute_advantages": False,
                "ppo.scale_rewards": False,
            },
        ),
        ("advantages-off", {"ppo.normalise_advantages": "off"}),
        ("entropy", {"ppo.entropy_weight": 0.05, "ppo.value_weight": 0.7}),
        ("gradient-norm", {"ppo.max_gradient_norm": 0.01}),
        ("gradient-free", {"ppo.max_gradient_norm": "none", "ppo.adam_epsilon": 1e-3}),
        ("clip", {"ppo.clip_range": 0.05, "ppo.clip_range_value": 0.1, "ppo.learning_rate": 0.02}),
        ("clip-annealed", {"ppo.anneal_clip_range": True, "ppo.anneal_learning_rate": False}),
        ("target-kl", {"ppo.target_kl": 1e-3, "ppo.learning_rate": 0.02, "ppo.epochs": 6}),
        ("discount", {"ppo.final_discount": 0.999}),
        ("discount-later", {"ppo.final_discount": 0.999, "ppo.discount_moves_from": 0.4}),
        ("horizon", {"learning.horizon_iterations": 9}),
        ("steps", {"stop_at_iterations": None, "stop_at_steps": 150}),
        ("uneven-minibatch", {"ppo.minibatch_size": 27}),
        ("episodes", {"rollout.unit": "episodes", "rollout.steps": 25}),
        ("average", {"learning.policy_average": 2, "stop_at_iterations": 5}),
        ("shards", {"learning.gradient_shards": 4}),
        ("threads", {"learning.threads": 2, "network.hidden": "[128,128]"}),
        ("rows-11", {"rollout.envs_per_slot": 11, "rollout.steps": 5}),
        ("rows-24", {"rollout.envs_per_slot": 24, "rollout.steps": 3}),
        ("slots-5", {"rollout.num_slots": 5, "rollout.envs_per_slot": 1}),
        (
            "network",
            {
                "network.hidden": "[16,8,24]",
                "network.activation": "relu",
                "network.orthogonal_init": False,
                "network.last_layer_scale": 1.0,
                "network.log_std_init": 0.3,
            },
        ),
        ("network-linear", {"network.hidden": "[]"}),
        ("network-wide", {"network.hidden": "[512,384]", "ppo.epochs": 1}),
        ("torch", {"learning.provider": "torch"}),
        ("torch-shards", {"learning.provider": "torch", "learning.gradient_shards": 4}),
        (
            "torch-options",
            {
                "learning.provider": "torch",
                "ppo.clip_range_value": 0.1,
                "ppo.entropy_weight": 0.05,
                "network.activation": "relu",
            },
        ),
    ]
    # The Pendulum preset uses gSDE and does not normalise observations.
    gaussian = {
        "network.exploration": "independent",
        "network.exploration_interval": "none",
        "network.log_std_init": -0.5,
        "network.normalise_observations": True,
    }
    both = {"", "staleness", "raw-observations", "advantages-batch", "entropy", "clip", "episodes",
            "average", "shards", "network", "rows-11", "torch", "discount-later", "desired-kl",
            "torch-options"}  # fmt: skip
    for name, settings in variants:
        end = f"-{name}" if name else ""
        add_train(f"ppo-cartpole{end}", "cartpole", settings=settings)
        if name in both:
            add_train(f"ppo-pendulum{end}", "pendulum", settings={**gaussian, **settings})
    noise = {
        "network.exploration": "gsde",
        "network.exploration_interval": "none",
        "network.log_std_init": -1.0,
    }
    held = {**noise, "network.exploration_interval": 5}
    normalised = {**held, "network.normalise_observations": True}
    add_train("ppo-pendulum-gsde-normalised", "pendulum", settings=normalised)
    add_train("ppo-pendulum-gsde", "pendulum", settings=noise)
    add_train("ppo-pendulum-gsde-held", "pendulum", settings={**held, "rollout.staleness": 1})
    add_train("ppo-hopper-gsde-entropy", "hopper", settings={**held, "ppo.entropy_weight": 0.02})
    add_train(
        "ppo-pendulum-gsde-torch", "pendulum", settings={**held, "learning.provider": "torch"}
    )
    add_train(
        "ppo-pendulum-gsde-shards", "pendulum", settings={**noise, "learning.gradient_shards": 2}
    )
    shards = {"learning.gradient_shards": 4, "runtime.compare_learners_every": 1}
    add_train("ppo-cartpole-learners", "cartpole", "--learners", "2", settings=shards)
    shards |= gaussian
    add_train("ppo-pendulum-learners", "pendulum", "--learners", "2", settings=shards)
    torch = {**shards, "learning.provider": "torch"}
    add_train("ppo-pendulum-torch-learners", "pendulum", "--learners", "2", settings=torch)
    scale = ("--learners", "2", "--scale-batch", "--scale-lr")
    scaled = {"ppo.minibatch_size": 16, "learning.gradient_shards": 8}
    add_train("ppo-cartpole-scaled", "cartpole", *scale, settings=scaled)
    pair = {**gaussian, "runtime.learners": 2}
    add_train("ppo-pendulum-units", "pendulum", settings=pair)
    until = {"evaluation.until_return": 3.0, "stop_at_iterations": 6}
    add_train("ppo-cartpole-until-return", "cartpole", settings=until)


def _add_reinforce(add_train: Any) -> None:
    variants: list[tuple[str, dict[str, Any]]] = [
        ("", {}),
        ("raw-observations", {"network.normalise_observations": False}),
        ("returns-off", {"reinforce.normalise_returns": "off"}),
        ("returns-episode", {"reinforce.normalise_returns": "episode"}),
        ("average-episodes", {"reinforce.average": "episodes"}),
        ("continued", {"reinforce.continue_truncated": True, "environment.max_episode_steps": 12}),
        ("entropy", {"reinforce.entropy_weight": 0.05, "reinforce.discount": 0.9}),
        ("gradient-norm", {"reinforce.max_gradient_norm": 0.01}),
        ("annealed", {"reinforce.anneal_learning_rate": True, "reinforce.adam_epsilon": 1e-3}),
        ("average", {"learning.policy_average": 2, "stop_at_iterations": 5}),
        ("shards", {"learning.gradient_shards": 4}),
        ("rows-11", {"rollout.envs_per_slot": 11, "rollout.num_slots": 2}),
        ("torch", {"learning.provider": "torch"}),
        ("network-wide", {"network.hidden": "[512]", "network.activation": "relu"}),
    ]
    for name, settings in variants:
        end = f"-{name}" if name else ""
        add_train(f"reinforce-cartpole{end}", "cartpole", settings=settings)
        if name in {"", "continued", "entropy", "shards", "torch"}:
            add_train(f"reinforce-pendulum{end}", "pendulum", settings=settings)
    noise = {"network.exploration": "gsde", "network.exploration_interval": 6}
    add_train("reinforce-pendulum-gsde", "pendulum", settings=noise)
    add_train("reinforce-cartpole-count", "cartpole", "--episodes-per-iter", "9")
    shards = {"learning.gradient_shards": 4, "runtime.compare_learners_every": 1}
    add_train("reinforce-cartpole-learners", "cartpole", "--learners", "2", settings=shards)


def _add_sac(add_train: Any) -> None:
    variants: list[tuple[str, dict[str, Any]]] = [
        ("", {}),
        ("staleness", {"rollout.staleness": 1}),
        ("normalised", {"network.normalise_observations": True}),
        ("one-thread", {"learning.threads": 1}),
        ("n-step", {"sac.n_step": 3, "environment.max_episode_steps": 6}),
        ("norm-batch", {"sac.critic_norm": "batch", "sac.policy_delay": 3}),
        ("quantiles", {"sac.quantiles": 5, "sac.dropped_quantiles": 1}),
        ("quantiles-norm-batch", {"sac.quantiles": 3, "sac.critic_norm": "batch"}),
        ("targets", {"sac.target_update_rate": 0.2, "sac.target_update_interval": 3}),
        ("delay", {"sac.policy_delay": 2, "sac.updates_per_step": 0.7}),
        ("entropy-fixed", {"sac.entropy_coefficient": 0.2}),
        ("entropy-target", {"sac.target_entropy": -3.5, "sac.initial_entropy_coefficient": 0.5}),
        ("rates", {"sac.critic_learning_rate": 2e-3, "sac.entropy_learning_rate": 1e-2}),
        ("annealed", {"sac.anneal_learning_rate": True, "sac.adam_epsilon": 1e-4}),
        ("gradient-norm", {"sac.max_gradient_norm": 0.1, "sac.discount": 0.9}),
        ("buffer", {"sac.buffer_size": 30}),
        ("average", {"learning.policy_average": 3}),
        ("shards", {"learning.gradient_shards": 4}),
        ("network", {"network.activation": "tanh", "network.orthogonal_init": True}),
        ("network-wide", {"network.hidden": "[400,300]", "stop_at_iterations": 4}),
        ("rows-11", {"rollout.envs_per_slot": 11, "rollout.num_slots": 1, "rollout.steps": 3}),
        ("torch", {"learning.provider": "torch"}),
        ("torch-norm-batch", {"learning.provider": "torch", "sac.critic_norm": "batch"}),
        (
            "torch-quantiles",
            {"learning.provider": "torch", "sac.quantiles": 5, "sac.dropped_quantiles": 1},
        ),
        # The replay buffer seals several segments and deletes the oldest ones.
        (
            "segments",
            {
                "rollout.envs_per_slot": 64,
                "rollout.steps": 16,
                "sac.learning_starts": 4096,
                "sac.updates_per_step": 0.01,
                "sac.buffer_size": 5000,
                "environment.max_episode_steps": 10,
                "evaluation.every_steps": None,
            },
        ),
    ]
    for name, settings in variants:
        end = f"-{name}" if name else ""
        add_train(f"sac-pendulum{end}", "pendulum", settings=settings)
    noise = {"network.exploration": "gsde", "network.log_std_init": -1.0}
    add_train("sac-pendulum-gsde", "pendulum", settings=noise)
    add_train(
        "sac-hopper-gsde-held", "hopper", settings={**noise, "network.exploration_interval": 3}
    )
    add_train(
        "sac-pendulum-gsde-torch", "pendulum", settings={**noise, "learning.provider": "torch"}
    )
    shards = {"learning.gradient_shards": 4, "runtime.compare_learners_every": 1}
    add_train("sac-pendulum-learners", "pendulum", "--learners", "2", settings=shards)
    add_train("sac-hopper-quantiles-average", "hopper", settings={
        "sac.quantiles": 5, "sac.dropped_quantiles": 1, "learning.policy_average": 2,
        "sac.n_step": 2, "rollout.staleness": 1,
    })  # fmt: skip


def _add_several_commands(add: Any) -> None:
    """Add cases with several commands: resumed runs, initial policies, several seeds."""
    half = {"learning.horizon_steps": 256, "stop_at_iterations": None, "stop_at_steps": 128}
    for name, algorithm, environment, settings in (
        ("ppo-cartpole", "ppo", "cartpole", PPO),
        ("ppo-hopper-staleness", "ppo", "hopper", {**PPO, "rollout.staleness": 1}),
        ("sac-hopper", "sac", "hopper", {**SAC, "learning.policy_average": 2}),
        ("reinforce-cartpole", "reinforce", "cartpole", REINFORCE),
    ):
        add(
            f"resume-{name}",
            make_train(algorithm, environment, {**settings, **half}),
            ("resume", OUT, "--steps", "256"),
        )
    add(
        "resume-sac-pendulum-fresh-replay",
        make_train("sac", "pendulum", {**SAC, **half, "stop_at_steps": 64}),
        ("resume", OUT, "--steps", "160", "--fresh-replay"),
    )
    for algorithm, settings in (("ppo", PPO), ("sac", SAC), ("reinforce", REINFORCE)):
        first = make_train(algorithm, "pendulum", settings)
        start = ("--init-from", f"{FOLDER}/first/best.safetensors")
        add(
            f"init-{algorithm}-pendulum",
            (*first[:-1], f"{FOLDER}/first"),
            make_train(algorithm, "pendulum", {**settings, "learning.seed": 3}, start),
        )
    add("seeds-ppo-cartpole", make_train("ppo", "cartpole", PPO, ("--seeds", "0,4")))
