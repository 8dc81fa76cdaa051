"""Makes the algorithm and the buffer that a recipe specifies.

To add an algorithm, write a function that makes it and add an entry to ALGORITHMS.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from importlib import metadata
from typing import Any

import numpy as np

from rlflame.config.algorithms import PpoSettings, ReinforceSettings, SacSettings
from rlflame.config.recipe import LearningSettings
from rlflame.learning.base import Algorithm, Buffer, GradientProvider
from rlflame.learning.buffers.replay_buffer import ReplayBuffer, ReplayShape
from rlflame.learning.buffers.rollout_buffer import RolloutBuffer
from rlflame.learning.networks.flat_vector import FlatVector, build_network
from rlflame.learning.parallel.process_group import ShardedAlgorithm, Shards
from rlflame.learning.parallel.thread_pair import ThreadPair
from rlflame.learning.ppo.compiled_loss import make_ppo
from rlflame.learning.ppo.loss import PpoProvider
from rlflame.learning.ppo.ppo import Ppo
from rlflame.learning.reinforce.reinforce import NumpyReinforce, Reinforce
from rlflame.learning.sac.compiled_sac import make_sac
from rlflame.learning.sac.loss import SacGradientProvider
from rlflame.learning.sac.networks import build_sac_networks
from rlflame.learning.sac.sac import Sac
from rlflame.rollout.machine import read_cpu_vendor, read_fingerprint, read_versions
from rlflame.rollout.task import Array, EnvSpec, PolicyArrays, PolicySpec


def make_algorithm(
    learning: LearningSettings,
    spec: PolicySpec,
    start_policy: PolicyArrays | None = None,
    shards: Shards | None = None,
) -> ShardedAlgorithm:
    """Make a recipe's algorithm, with new weights or those of `start_policy`.

    The learners of a group divide the `shards` among themselves. By default, this process computes
    all of them.
    """
    shards = shards or Shards(learning.gradient_shards)
    result = ALGORITHMS[learning.algorithm](learning, spec, start_policy or {}, shards)
    if start_policy is not None and "normaliser.mean" in start_policy:
        result.load_state({**result.get_state(), **make_normaliser_state(start_policy)})
    return result


def make_buffer(learning: LearningSettings, env: EnvSpec) -> Buffer[Any]:
    """Make the buffer that turns rollouts into batches for the algorithm."""
    replay = learning.replay
    if replay is None:
        return RolloutBuffer()
    columns = learning.rollout.columns
    shape = ReplayShape(replay.buffer_size, columns, env.observation_size, env.action_size)
    return ReplayBuffer(
        shape,
        seed=learning.seed,
        batch_size=replay.batch_size,
        discount=replay.discount,
        n_step=replay.n_step,
        updates_per_step=replay.updates_per_step,
        learning_starts=replay.learning_starts,
    )


def keep_replay(
    learning: LearningSettings, algorithm: Algorithm[Any], buffer: Buffer[Any]
) -> str | None:
    """Let a GPU sample from its own copy of the replay; return a note if it does not fit there."""
    if not learning.stays_on_device or not isinstance(buffer, ReplayBuffer):
        return None
    from rlflame.learning.sac.sac_device import DeviceSac

    return algorithm.keep_replay(buffer) if isinstance(algorithm, DeviceSac) else None


def count_blas_threads(learning: LearningSettings) -> int:
    """Return the number of threads that BLAS uses for a matrix product."""
    return learning.threads if learning.traits.uses_blas_threads else 1


def has_device(learning: LearningSettings) -> bool:
    """Return whether this machine has the device of a recipe."""
    if learning.device == "cpu":
        return True
    from rlflame.learning.torch_gradients import is_cuda_available

    return is_cuda_available()


def resolve_device(learning: LearningSettings, rank: int) -> str:
    """Return a learner's device; for CUDA, also set environment variables."""
    if learning.provider != "torch":
        return "cpu"
    from rlflame.learning.torch_gradients import select_device, set_precision

    set_precision(learning.precision)
    if learning.device == "cpu":
        return "cpu"
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    # Makes a failed exchange between GPUs raise an error instead of ending the process.
    os.environ.setdefault("TORCH_NCCL_BLOCKING_WAIT", "1")
    return select_device(learning.device, rank)


def compute_fingerprint(learning: LearningSettings) -> dict[str, str]:
    """Return the properties of this machine that all learners must share."""
    facts = {"python": platform.python_version(), **read_fingerprint()}
    if learning.provider == "torch":
        facts |= {**_read_torch_facts(), "device": learning.device}
    return facts


def compute_environment_fingerprint(learning: LearningSettings) -> dict[str, str]:
    """Return the properties of this machine that can change the results of a run."""
    facts = read_versions()
    if learning.provider == "torch":
        facts |= _read_torch_facts()
    if learning.device == "cuda":
        from rlflame.learning.torch_gradients import read_gpu_name

        facts["card"] = read_gpu_name()
    return facts


def _read_torch_facts() -> dict[str, str]:
    return {"torch": metadata.version("torch"), "cpu_vendor": read_cpu_vendor()}


def _make_ppo(
    learning: LearningSettings, spec: PolicySpec, start_policy: PolicyArrays, shards: Shards
) -> Ppo:
    settings = learning.settings
    assert isinstance(settings, PpoSettings)
    parameters = build_network(spec, learning.network, learning.seed, critic=True)
    _load_start_weights(parameters, start_policy)
    provider: PpoProvider
    if learning.provider == "torch":
        from rlflame.learning.torch_gradients import TorchPpo

        device = resolve_device(learning, shards.group.rank)
        provider = torch_provider = TorchPpo(
            parameters, spec, learning.threads, device, precision=learning.precision
        )
        if learning.stays_on_device:
            from rlflame.learning.ppo.ppo_device import DevicePpo

            is_fixed = learning.rollout.unit == "steps"
            return DevicePpo(
                settings, spec, parameters, torch_provider, seed=learning.seed,
                columns=learning.rollout.columns, captures=is_fixed,
            )  # fmt: skip
    else:
        provider = make_ppo(parameters, spec)
    seed, columns = learning.seed, learning.rollout.columns
    return Ppo(settings, spec, parameters, provider, shards, seed=seed, columns=columns)


def _make_reinforce(
    learning: LearningSettings, spec: PolicySpec, start_policy: PolicyArrays, shards: Shards
) -> Reinforce:
    settings = learning.settings
    assert isinstance(settings, ReinforceSettings)
    parameters = build_network(spec, learning.network, learning.seed, critic=False)
    _load_start_weights(parameters, start_policy)
    provider: GradientProvider[Any]
    if learning.provider == "torch":
        from rlflame.learning.torch_gradients import TorchReinforce

        device = resolve_device(learning, shards.group.rank)
        provider = torch_provider = TorchReinforce(
            parameters, spec, learning.threads, device, precision=learning.precision
        )
        if learning.stays_on_device:
            from rlflame.learning.reinforce.reinforce_device import DeviceReinforce

            return DeviceReinforce(settings, spec, parameters, torch_provider)
    else:
        provider = NumpyReinforce(parameters, spec)
    return Reinforce(settings, spec, parameters, provider, shards)


def _make_sac(
    learning: LearningSettings, spec: PolicySpec, start_policy: PolicyArrays, shards: Shards
) -> Sac:
    settings = learning.settings
    assert isinstance(settings, SacSettings)
    critics = settings.critic_norm, settings.quantiles, settings.dropped_quantiles
    networks = build_sac_networks(spec, learning.network, learning.seed, *critics)
    _load_start_weights(networks.actor, start_policy)
    thread_pair = ThreadPair(learning.threads)
    providers: list[SacGradientProvider]
    if learning.provider == "torch":
        from rlflame.learning.sac.loss_torch import TorchSac

        device = resolve_device(learning, shards.group.rank)
        if learning.stays_on_device:
            from rlflame.learning.sac.sac_device import DeviceSac

            return DeviceSac(
                settings, networks, seed=learning.seed, device=device, precision=learning.precision
            )
        providers = [TorchSac(networks, learning.threads, device) for _ in range(shards.count)]
    else:
        providers = [make_sac(networks, thread_pair) for _ in range(shards.count)]
    return Sac(settings, networks, providers, thread_pair, shards, seed=learning.seed)


ALGORITHMS: dict[
    str, Callable[[LearningSettings, PolicySpec, PolicyArrays, Shards], ShardedAlgorithm]
] = {"ppo": _make_ppo, "reinforce": _make_reinforce, "sac": _make_sac}


def _load_start_weights(parameters: FlatVector, start_policy: PolicyArrays) -> None:
    for name, array in start_policy.items():
        if name in parameters.shapes:
            parameters[name][:] = array


def make_normaliser_state(start_policy: PolicyArrays) -> dict[str, Array]:
    """Make the state of a normaliser from the mean and scale of a policy.

    A policy file does not store the number of observations, so 1,000 is assumed. This number
    preserves the old statistics long enough for the weights to adapt, but lets new observations
    change the statistics within a few iterations.
    """
    count = 1000.0
    scale = start_policy["normaliser.scale"].astype(np.float64)
    return {
        "normaliser.count": np.array(count, np.float64),
        "normaliser.mean": start_policy["normaliser.mean"].astype(np.float64),
        "normaliser.squares": count / np.square(scale),
    }
