"""Names of settings in other libraries, and the settings of rlflame that they mean.

This module imports nothing slow, because errors about options must appear immediately.
"""

from __future__ import annotations

from collections.abc import Sequence

#: Several settings are those of different algorithms.
SYNONYMS: dict[str, tuple[str, ...]] = {
    "activation_fn": ("network.activation",),
    "batch_size": ("minibatch_size",),
    "clip_coef": ("clip_range",),
    "clip_range_vf": ("clip_range_value",),
    "clip_ratio": ("clip_range",),
    "ent_coef": ("entropy_weight", "entropy_coefficient"),
    "eval_freq": ("evaluation.every_steps",),
    "gamma": ("discount",),
    "gradient_steps": ("updates_per_step",),
    "hidden_sizes": ("network.hidden",),
    "lr": ("learning_rate",),
    "max_grad_norm": ("max_gradient_norm",),
    "n_envs": ("rollout.envs_per_slot",),
    "n_epochs": ("epochs",),
    "n_eval_episodes": ("evaluation.episodes",),
    "n_steps": ("rollout.steps",),
    "net_arch": ("network.hidden",),
    "normalize_advantage": ("normalise_advantages",),
    "num_envs": ("rollout.envs_per_slot",),
    "num_steps": ("rollout.steps",),
    "ortho_init": ("network.orthogonal_init",),
    "polyak": ("target_update_rate",),
    "sde_sample_freq": ("network.exploration_interval",),
    "tau": ("target_update_rate",),
    "total_timesteps": ("stop_at_steps",),
    "use_sde": ("network.exploration",),
    "vf_coef": ("value_weight",),
}


def find_synonyms(name: str) -> tuple[str, ...]:
    """Return the settings that a name of another library means, if any."""
    return SYNONYMS.get(name.lstrip("-").replace("-", "_").lower(), ())


def format_synonym_hint(settings: Sequence[str]) -> str:
    """Return a hint with the option that changes one of the settings."""
    return " or ".join(
        "--steps N" if name == "stop_at_steps" else f"--set {name}=VALUE" for name in settings
    )
