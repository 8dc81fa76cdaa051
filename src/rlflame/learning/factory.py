"""Which algorithm a recipe means, with the experience it learns from.

With build.py and factory.py the only place that names concrete classes. Must not know:
environments, fleets, files.
"""

from __future__ import annotations

import os
import platform
from importlib import metadata
from typing import Any

import numpy as np

from rlflame.config.algorithms import PpoSettings, ReinforceSettings, SacSettings
from rlflame.config.recipe import LearningSettings
from rlflame.learning.base import Algorithm, Experience, Provider
from rlflame.learning.buffers.replay_buffer import ReplayBuffer
from rlflame.learning.buffers.rollout_buffer import OnPolicyStore
from rlflame.learning.networks.flat_params import FlatVector
from rlflame.learning.networks.network_shape import build_network
from rlflame.learning.parallel.gradient_shards import Shards
from rlflame.learning.parallel.thread_pair import Lanes
from rlflame.learning.ppo.loss import NumpyPpo
from rlflame.learning.ppo.ppo import Ppo
from rlflame.learning.ppo.split_update import InHalves
from rlflame.learning.reinforce.reinforce import NumpyReinforce, Reinforce
from rlflame.learning.sac.loss import NumpyJointSac, NumpySac, SoftProvider
from rlflame.learning.sac.networks import build_soft_networks
from rlflame.learning.sac.sac import Sac
from rlflame.rollout import blas
from rlflame.rollout.process.worker_main import versions
from rlflame.rollout.spec import Array, EnvSpec, PolicyArrays, PolicySpec


def algorithm(
    learning: LearningSettings,
    spec: PolicySpec,
    start: PolicyArrays | None = None,
    shards: Shards | None = None,
) -> Algorithm[Any]:
    """The learner of a recipe, at its beginning; with `start`, from that policy's weights.

    `shards` are those of a group of learners; otherwise this learner works on all of them.
    """
    shards = shards or Shards(learning.gradient_shards)
    settings = learning.ppo or learning.reinforce or learning.sac
    assert settings is not None
    result: Algorithm[Any]
    if isinstance(settings, SacSettings):
        result = _sac(settings, learning, spec, start or {}, shards)
    elif isinstance(settings, PpoSettings):
        result = _ppo(settings, learning, spec, start or {}, shards)
    else:
        result = _reinforce(settings, learning, spec, start or {}, shards)
    if start is not None and "normaliser.mean" in start:
        result.load_state({**result.state(), **adopted_moments(start)})
    return result


def in_halves(found: Algorithm[Any]) -> InHalves:
    """The same learner, as one that a companion can go through as well."""
    if not isinstance(found, Ppo):
        raise ValueError(f"{type(found).__name__} does not come in halves")
    return found


def experience(learning: LearningSettings, env: EnvSpec) -> Experience[Any]:
    """What becomes of the fragments of a recipe."""
    settings = learning.sac
    if settings is None:
        return OnPolicyStore()
    return ReplayBuffer(
        settings.buffer_size,
        learning.rollout.columns,
        env.observation_size,
        env.action_size,
        seed=learning.seed,
        batch_size=settings.batch_size,
        discount=settings.discount,
        n_step=settings.n_step,
        updates_per_step=settings.updates_per_step,
        learning_starts=settings.learning_starts,
    )


def blas_threads(learning: LearningSettings) -> int:
    """Threads inside a matrix product; lanes take the place of those."""
    return 1 if learning.sac is not None else learning.threads


def device(learning: LearningSettings, rank: int) -> str:
    """Where a learner's gradients are made; the first card that is touched reads the variables."""
    if learning.device == "cpu":
        return "cpu"
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # An exchange between cards that fails is an error then, and not the end of the process.
    os.environ.setdefault("TORCH_NCCL_BLOCKING_WAIT", "1")
    from rlflame.learning.networks.torch_params import device_for

    return device_for(learning.device, rank)


def fingerprint(learning: LearningSettings) -> dict[str, str]:
    """What several learners must have in common to end in the same bits."""
    found = {"python": platform.python_version(), **blas.fingerprint()}
    if learning.provider == "torch":
        found |= {"torch": metadata.version("torch"), "device": learning.device}
    return found


def made_with(learning: LearningSettings) -> dict[str, str]:
    """What the bits of a run depend on here, with what makes its gradients."""
    found = versions()
    if learning.provider == "torch":
        found["torch"] = metadata.version("torch")
    if learning.device == "cuda":
        from rlflame.learning.networks.torch_params import card

        found["card"] = card()
    return found


def _ppo(
    settings: PpoSettings,
    learning: LearningSettings,
    spec: PolicySpec,
    start: PolicyArrays,
    shards: Shards,
) -> Ppo:
    network, parameters = build_network(spec, learning.network, learning.seed, critic=True)
    _begin_with(parameters, start)
    provider: Provider[Any]
    if learning.provider == "torch":
        from rlflame.learning.networks.torch_actor_critic import TorchPpo

        where = device(learning, shards.rank)
        provider = TorchPpo(parameters, network, learning.threads, where)
    else:
        provider = NumpyPpo(parameters, network)
    columns = learning.rollout.columns
    return Ppo(settings, network, parameters, provider, shards, seed=learning.seed, columns=columns)


def _reinforce(
    settings: ReinforceSettings,
    learning: LearningSettings,
    spec: PolicySpec,
    start: PolicyArrays,
    shards: Shards,
) -> Reinforce:
    network, parameters = build_network(spec, learning.network, learning.seed, critic=False)
    _begin_with(parameters, start)
    provider: Provider[Any]
    if learning.provider == "torch":
        from rlflame.learning.networks.torch_actor_critic import TorchReinforce

        provider = TorchReinforce(
            parameters, network, learning.threads, device(learning, shards.rank)
        )
    else:
        provider = NumpyReinforce(parameters, network)
    return Reinforce(settings, network, parameters, provider, shards)


def _sac(
    settings: SacSettings,
    learning: LearningSettings,
    spec: PolicySpec,
    start: PolicyArrays,
    shards: Shards,
) -> Sac:
    networks = build_soft_networks(
        spec,
        learning.network,
        learning.seed,
        settings.critic_norm,
        settings.quantiles,
        settings.dropped_quantiles,
    )
    _begin_with(networks.actor, start)
    lanes = Lanes(learning.threads)
    providers: list[SoftProvider]
    if learning.provider == "torch":
        from rlflame.learning.sac.loss_torch import TorchJointSac, TorchSac

        by_torch = TorchSac if networks.moments is None else TorchJointSac
        where = device(learning, shards.rank)
        providers = [by_torch(networks, learning.threads, where) for _ in range(shards.count)]
    else:
        by_hand = NumpySac if networks.moments is None else NumpyJointSac
        providers = [by_hand(networks, lanes) for _ in range(shards.count)]
    return Sac(settings, networks, providers, lanes, shards, seed=learning.seed)


def _begin_with(parameters: FlatVector, start: PolicyArrays) -> None:
    for name, array in start.items():
        if name in parameters.shapes:
            parameters[name][:] = array


def adopted_moments(start: PolicyArrays) -> dict[str, Array]:
    """Normaliser statistics behind a policy's mean and scale, as if of a thousand samples.

    A policy file has no count; a thousand holds the old statistics long enough for the weights to
    follow, and lets new observations move them within a few iterations.
    """
    count = 1000.0
    scale = start["normaliser.scale"].astype(np.float64)
    return {
        "normaliser.count": np.array(count, np.float64),
        "normaliser.mean": start["normaliser.mean"].astype(np.float64),
        "normaliser.squares": count / np.square(scale),
    }
