"""Which algorithm a recipe means, with the experience it learns from.

One of few modules that name concrete classes.
"""

from __future__ import annotations

import os
import platform
from importlib import metadata
from typing import Any

import numpy as np

from rlflame.config.algorithms import PpoSettings, ReinforceSettings, SacSettings
from rlflame.config.recipe import LearningSettings
from rlflame.learning.base import Algorithm, Buffer, GradientProvider
from rlflame.learning.buffers.replay_buffer import ReplayBuffer, ReplayShape
from rlflame.learning.buffers.rollout_buffer import RolloutBuffer
from rlflame.learning.networks.flat_params import FlatVector, build_network
from rlflame.learning.parallel.gradient_shards import Shards
from rlflame.learning.parallel.thread_pair import ThreadPair
from rlflame.learning.ppo.loss import NumpyPpo, PpoProvider
from rlflame.learning.ppo.ppo import Ppo
from rlflame.learning.ppo.split_update import SplitAlgorithm
from rlflame.learning.reinforce.reinforce import NumpyReinforce, Reinforce
from rlflame.learning.sac.loss import NumpyCrossQ, NumpySac, SacGradientProvider
from rlflame.learning.sac.networks import build_sac_networks
from rlflame.learning.sac.sac import Sac
from rlflame.rollout.machine import read_fingerprint, read_versions
from rlflame.rollout.spec import Array, EnvSpec, PolicyArrays, PolicySpec


def make_algorithm(
    learning: LearningSettings,
    spec: PolicySpec,
    start_policy: PolicyArrays | None = None,
    shards: Shards | None = None,
) -> Algorithm[Any]:
    """The learner of a recipe, at its beginning; with `start_policy`, from that policy's weights.

    `shards` are those of a group of learners; otherwise this learner works on all of them.
    """
    shards = shards or Shards(learning.gradient_shards)
    settings = learning.ppo or learning.reinforce or learning.sac
    assert settings is not None
    result: Algorithm[Any]
    if isinstance(settings, SacSettings):
        result = _make_sac(settings, learning, spec, start_policy or {}, shards)
    elif isinstance(settings, PpoSettings):
        result = _make_ppo(settings, learning, spec, start_policy or {}, shards)
    else:
        result = _make_reinforce(settings, learning, spec, start_policy or {}, shards)
    if start_policy is not None and "normaliser.mean" in start_policy:
        result.load_state({**result.get_state(), **make_normaliser_state(start_policy)})
    return result


def as_split_algorithm(learner: Algorithm[Any]) -> SplitAlgorithm:
    """The same learner, as one that a critic helper can go through as well."""
    if not isinstance(learner, Ppo):
        raise ValueError(f"{type(learner).__name__} does not come in halves")
    return learner


def make_buffer(learning: LearningSettings, env: EnvSpec) -> Buffer[Any]:
    """What becomes of the fragments of a recipe."""
    settings = learning.sac
    if settings is None:
        return RolloutBuffer()
    columns = learning.rollout.columns
    return ReplayBuffer(
        ReplayShape(settings.buffer_size, columns, env.observation_size, env.action_size),
        seed=learning.seed,
        batch_size=settings.batch_size,
        discount=settings.discount,
        n_step=settings.n_step,
        updates_per_step=settings.updates_per_step,
        learning_starts=settings.learning_starts,
    )


def count_blas_threads(learning: LearningSettings) -> int:
    """Threads inside a matrix product; lanes take the place of those."""
    return 1 if learning.sac is not None else learning.threads


def resolve_device(learning: LearningSettings, rank: int) -> str:
    """Where a learner's gradients are made; the first card that is touched reads the variables."""
    if learning.device == "cpu":
        return "cpu"
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # An exchange between cards that fails is an error then, and not the end of the process.
    os.environ.setdefault("TORCH_NCCL_BLOCKING_WAIT", "1")
    from rlflame.learning.networks.torch_networks import select_device

    return select_device(learning.device, rank)


def compute_fingerprint(learning: LearningSettings) -> dict[str, str]:
    """What several learners must have in common to end in the same bits."""
    facts = {"python": platform.python_version(), **read_fingerprint()}
    if learning.provider == "torch":
        facts |= {"torch": metadata.version("torch"), "device": learning.device}
    return facts


def compute_environment_fingerprint(learning: LearningSettings) -> dict[str, str]:
    """What the bits of a run depend on here, with what makes its gradients."""
    facts = read_versions()
    if learning.provider == "torch":
        facts["torch"] = metadata.version("torch")
    if learning.device == "cuda":
        from rlflame.learning.networks.torch_networks import read_gpu_name

        facts["card"] = read_gpu_name()
    return facts


def _make_ppo(
    settings: PpoSettings,
    learning: LearningSettings,
    spec: PolicySpec,
    start_policy: PolicyArrays,
    shards: Shards,
) -> Ppo:
    network, parameters = build_network(spec, learning.network, learning.seed, critic=True)
    _load_start_weights(parameters, start_policy)
    provider: PpoProvider
    if learning.provider == "torch":
        from rlflame.learning.torch_gradients import TorchPpo

        torch_device = resolve_device(learning, shards.rank)
        provider = TorchPpo(parameters, network, learning.threads, torch_device)
    else:
        provider = NumpyPpo(parameters, network)
    columns = learning.rollout.columns
    return Ppo(settings, network, parameters, provider, shards, seed=learning.seed, columns=columns)


def _make_reinforce(
    settings: ReinforceSettings,
    learning: LearningSettings,
    spec: PolicySpec,
    start_policy: PolicyArrays,
    shards: Shards,
) -> Reinforce:
    network, parameters = build_network(spec, learning.network, learning.seed, critic=False)
    _load_start_weights(parameters, start_policy)
    provider: GradientProvider[Any]
    if learning.provider == "torch":
        from rlflame.learning.torch_gradients import TorchReinforce

        provider = TorchReinforce(
            parameters, network, learning.threads, resolve_device(learning, shards.rank)
        )
    else:
        provider = NumpyReinforce(parameters, network)
    return Reinforce(settings, network, parameters, provider, shards)


def _make_sac(
    settings: SacSettings,
    learning: LearningSettings,
    spec: PolicySpec,
    start_policy: PolicyArrays,
    shards: Shards,
) -> Sac:
    networks = build_sac_networks(
        spec,
        learning.network,
        learning.seed,
        settings.critic_norm,
        settings.quantiles,
        settings.dropped_quantiles,
    )
    _load_start_weights(networks.actor, start_policy)
    thread_pair = ThreadPair(learning.threads)
    providers: list[SacGradientProvider]
    if learning.provider == "torch":
        from rlflame.learning.sac.loss_torch import TorchCrossQ, TorchSac

        torch_class = TorchSac if networks.moments is None else TorchCrossQ
        torch_device = resolve_device(learning, shards.rank)
        providers = [
            torch_class(networks, learning.threads, torch_device) for _ in range(shards.count)
        ]
    else:
        numpy_class = NumpySac if networks.moments is None else NumpyCrossQ
        providers = [numpy_class(networks, thread_pair) for _ in range(shards.count)]
    return Sac(settings, networks, providers, thread_pair, shards, seed=learning.seed)


def _load_start_weights(parameters: FlatVector, start_policy: PolicyArrays) -> None:
    for name, array in start_policy.items():
        if name in parameters.shapes:
            parameters[name][:] = array


def make_normaliser_state(start_policy: PolicyArrays) -> dict[str, Array]:
    """Normaliser statistics behind a policy's mean and scale, as if of a thousand samples.

    A policy file has no count; a thousand holds the old statistics long enough for the weights to
    follow, and lets new observations move them within a few iterations.
    """
    count = 1000.0
    scale = start_policy["normaliser.scale"].astype(np.float64)
    return {
        "normaliser.count": np.array(count, np.float64),
        "normaliser.mean": start_policy["normaliser.mean"].astype(np.float64),
        "normaliser.squares": count / np.square(scale),
    }
