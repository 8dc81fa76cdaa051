"""SAC whose updates stay on one device."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlflame.config.algorithms import SacSettings
from rlflame.rollout.policy import make_clip_bounds
from rlflame.rollout.seeding import Role, make_stream
from rlflame.rollout.task import PolicyArrays
from rlflame.terminal_text import format_size

from ..base import Metrics, ReplayBatch, State
from ..buffers.replay_buffer import ReplayBuffer
from ..device.chunks import ChunkBuffers
from ..device.graph import Mirror, UpdateGraph
from ..device.optim import DeviceAdam, DeviceGuard, clip, replace_if
from ..device.replay import DeviceReplay, TransitionLayout, count_replay_bytes, measure_free_bytes
from ..networks.flat_vector import FlatVector
from ..networks.mlp import BATCH_EPSILON, MOMENT_RATE
from ..parallel.thread_pair import ThreadPair
from ..torch_gradients import TorchNetworks, multiply
from .loss_torch import make_critic_objective, sample_actions
from .networks import CRITICS, SacNetworks
from .sac import Sac

_METRICS = ("critic_loss", "ent_coef_loss", "actor_loss")


class CriticPair:
    """Two critics of equal shape, whose layers are batched matrix products."""

    def __init__(self, vector: FlatVector, mirror: Mirror, tanh: bool, precision: str) -> None:
        self._precision = precision
        #: Both critics, one per row.
        self.values = mirror.add(vector.data).view(len(CRITICS), -1)
        self._tanh = tanh
        prefix, start = CRITICS[0], 0
        self._leaves: list[Tensor] = []
        for name, shape in vector.shapes.items():
            if name.startswith(prefix):
                end = start + math.prod(shape)
                part = self.values[:, start:end].view(len(CRITICS), *shape)
                self._leaves.append(part.detach().requires_grad_())
                start = end

    def compute_gradient(self, loss: Tensor) -> Tensor:
        """Return the gradient of both critics, one per row."""
        gradients = torch.autograd.grad(loss, self._leaves)
        return torch.cat([gradient.flatten(1) for gradient in gradients], dim=1)

    def compute_values(self, inputs: Tensor, moments: PairMoments | None, batch: bool) -> Tensor:
        """Return `[critics, rows, outputs]`; with `batch`, use the moments of these rows."""
        x = inputs.expand(len(CRITICS), *inputs.shape)
        for layer, (weight, bias) in enumerate(
            zip(self._leaves[::2], self._leaves[1::2], strict=True)
        ):
            if layer:
                x = torch.tanh(x) if self._tanh else torch.relu(x)
            if moments is not None:
                x = moments.standardise(layer, x, batch)
            x = multiply(x, weight, bias[:, None], self._precision)
        return x


class PairMoments:
    """The running and latest moments of the inputs of each layer of both critics."""

    def __init__(self, running: FlatVector, mirror: Mirror) -> None:
        self._running = mirror.add(running.data).view(len(CRITICS), -1)
        sizes = [shape[0] for name, shape in running.shapes.items() if name.startswith(CRITICS[0])]
        self._parts = torch.split(self._running, sizes, dim=1)
        self._latest: list[Tensor] = [torch.empty(0)] * len(sizes)

    def standardise(self, layer: int, x: Tensor, batch: bool) -> Tensor:
        mean, variance = self._parts[2 * layer : 2 * layer + 2]
        if batch:
            mean, variance = x.mean(dim=1), x.var(dim=1, correction=0)
            self._latest[2 * layer : 2 * layer + 2] = mean.detach(), variance.detach()
        return (x - mean[:, None]) / (variance[:, None] + BATCH_EPSILON).sqrt()

    def join_latest(self) -> Tensor:
        return torch.cat(self._latest, dim=1)

    def update(self, latest: Tensor, mask: Tensor) -> None:
        replace_if(mask, self._running, torch.lerp(self._running, latest, MOMENT_RATE))


class DeviceSac(Sac):
    """SAC, with the networks and the optimizers on one device.

    The host draws the transitions and the noise of many updates, and sends them in one copy.
    """

    def __init__(
        self,
        settings: SacSettings,
        networks: SacNetworks,
        *,
        seed: int,
        device: str = "cpu",
        dtype: torch.dtype = torch.float32,
        precision: str = "float32",
    ) -> None:
        super().__init__(settings, networks, [], ThreadPair(1), seed=seed)
        spec = networks.spec
        self._mirror = mirror = Mirror(device, dtype)
        self._actor = TorchNetworks(networks.actor, spec, device, dtype=dtype, precision=precision)
        mirror.add_pair(networks.actor.data, self._actor.values)
        make_pair = partial(
            CriticPair, mirror=mirror, tanh=spec.activation == "tanh", precision=precision
        )
        self._critics = make_pair(networks.critics)
        self._moments: PairMoments | None = None
        self._targets: CriticPair | None = None
        if networks.moments is None:
            self._targets = make_pair(networks.targets)
        else:
            self._moments = PairMoments(networks.moments.running, mirror)
        self._objective = make_critic_objective(networks)
        self._log_weight_tensor = mirror.add(self._log_weight)
        adams = {
            "actor": self._actor_adam,
            "critic": self._critic_adam,
            "entropy": self._entropy_adam,
        }
        self._adams = {name: DeviceAdam(adam, mirror) for name, adam in adams.items()}
        self._guards = [DeviceGuard(guard, mirror) for guard in (self._guard, self._actor_guard)]
        self._update_count = mirror.add(self._updates)
        self._rates = {name: mirror.make_zeros(dtype=torch.float64) for name in adams}
        #: For each metric: its sum over the updates that reported it, and their number.
        self._totals = mirror.make_zeros(len(_METRICS), 2, dtype=torch.float64)
        self._statistics = [mirror.make_zeros(spec.observation_size) for _ in range(2)]
        self._clip: Any = make_clip_bounds(spec)
        if isinstance(self._clip, np.ndarray):
            self._clip = torch.from_numpy(self._clip).to(mirror.device, mirror.dtype)
        self._layout = TransitionLayout(spec.observation_size, spec.action_size)
        self._replay: DeviceReplay | None = None
        self._chunks: ChunkBuffers | None = None
        self._graphs: dict[tuple[bool, bool], UpdateGraph] = {}
        mirror.copy_to_device()

    def get_state(self) -> State:
        self._mirror.copy_to_host()
        return super().get_state()

    def load_state(self, state: Mapping[str, Any]) -> None:
        super().load_state(state)
        self._mirror.copy_to_device()

    def keep_replay(self, buffer: ReplayBuffer) -> str | None:
        """From now on, sample on the device; return a note if the replay does not fit there.

        All later batches must draw from this buffer.
        """
        device, replay_bytes = self._mirror.device, count_replay_bytes(buffer.shape)
        if replay_bytes <= measure_free_bytes(device):
            with suppress(torch.OutOfMemoryError):
                self._replay, self._chunks = DeviceReplay(buffer, device), None
                self._graphs.clear()
                return None
        return (
            f"The replay buffer stays in CPU memory: it takes {format_size(replay_bytes)}, but the "
            f"GPU has only {format_size(measure_free_bytes(device))} free. Only the speed changes."
        )

    def _run_updates(
        self, batch: ReplayBatch, statistics: PolicyArrays, rates: Mapping[str, float]
    ) -> Metrics:
        for name, rate in rates.items():
            self._rates[name].fill_(rate)
        for tensor, array in zip(self._statistics, statistics.values(), strict=False):
            tensor.copy_(torch.from_numpy(array))
        self._totals.zero_()
        if self._chunks is not None:
            self._chunks.discard_unsent()  # an earlier error may have left arrays
        if self._replay is not None:
            assert self._replay.is_source(batch.draw)
            self._replay.send_new()
        numbers: list[int] = []
        for number in range(batch.first_update, batch.first_update + batch.updates):
            chunks = self._add_samples(number, batch)
            numbers.append(number)
            if chunks.is_full:
                self._run_chunk(numbers)
        self._run_chunk(numbers)
        # The policy and the metrics need only these; `get_state` copies everything.
        counts = self._updates, self._guard.counts, self._actor_guard.counts
        self._mirror.copy_to_host(self._networks.actor.data, self._log_weight, *counts)
        for guard in self._guards:
            guard.check()
        totals = zip(_METRICS, self._totals.tolist(), strict=True)
        return {name: total / count for name, (total, count) in totals if count}

    def _add_samples(self, number: int, batch: ReplayBatch) -> ChunkBuffers:
        """Add the samples and the noise of one update to the next chunk."""
        if self._replay is not None:
            # The bits of int32 numbers are sent as float32.
            row_numbers = self._replay.draw_rows(number).view(np.float32)
            chunks = self._open_chunks(row_numbers.shape)
            samples, noise = chunks.add()
            samples[:] = row_numbers
        else:
            transitions = batch.draw(number)
            chunks = self._open_chunks((len(transitions.rewards), self._layout.width))
            samples, noise = chunks.add()
            self._layout.write(transitions, samples)
        stream = make_stream(self._seed, Role.LEARN, number)
        stream.standard_normal(dtype=np.float32, out=noise)
        return chunks

    def _open_chunks(self, shape: tuple[int, ...]) -> ChunkBuffers:
        """Return the chunk buffers for samples of this shape."""
        if self._chunks is None:
            noise = 2, self._networks.spec.action_size, shape[0]
            self._chunks = ChunkBuffers([shape, noise], self._mirror.device)
        return self._chunks

    def _run_chunk(self, numbers: list[int]) -> None:
        """Run the updates whose arrays have been added, and forget their numbers."""
        if not numbers or self._chunks is None:
            return
        self._chunks.send()
        for number in numbers:
            updates_actor = number % self._settings.policy_delay == 0
            updates_targets = (number + 1) % self._settings.target_update_interval == 0
            key = updates_actor, updates_targets
            graph = self._graphs.setdefault(key, UpdateGraph(self._mirror.device))
            graph.run(partial(self._learn, *key), self._list_state())
        numbers.clear()

    def _learn(self, updates_actor: bool, updates_targets: bool) -> None:
        assert self._chunks is not None
        samples, noise = self._chunks.read()
        if self._replay is None:
            fields = self._layout.split(samples)
        else:
            fields = self._replay.gather(samples.view(torch.int32))
        observations, actions, rewards, next_observations, bootstrap, noise = (
            field.to(self._mirror.dtype) for field in (*fields, noise)
        )
        observations = self._normalise(observations)
        next_observations = self._normalise(next_observations)
        sample, log_probs = sample_actions(self._actor, observations, noise[0].T)
        with torch.no_grad():
            weight = self._read_entropy_weight()
            next_actions, next_log_probs = sample_actions(
                self._actor, next_observations, noise[1].T
            )
        pairs = (observations, actions), (next_observations, next_actions)
        values, next_values = self._compute_both_values(*pairs)
        soft = self._objective.compute_target_values(next_values)
        soft = soft - weight * next_log_probs[:, None]
        target = rewards[:, None] + bootstrap[:, None] * soft
        loss = self._objective.compute_loss(values, target) / len(rewards)
        gradient = self._critics.compute_gradient(loss)
        mean_error = values.detach().mean(dim=2) - target.mean(dim=1)
        mask = self._update_critics(gradient, mean_error, log_probs.detach(), updates_targets)
        if updates_actor:
            mask = self._update_actor(observations, sample, log_probs, weight, mask)
        self._update_count += mask

    def _compute_both_values(
        self, pair: tuple[Tensor, Tensor], next_pair: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Return the values of recorded actions, and detached ones of next actions."""
        first, second = torch.cat(pair, dim=1), torch.cat(next_pair, dim=1)
        if self._targets is not None:
            with torch.no_grad():
                next_values = self._targets.compute_values(second, None, batch=False)
            return self._critics.compute_values(first, None, batch=False), next_values
        both = self._critics.compute_values(torch.cat((first, second)), self._moments, batch=True)
        return both[:, : len(first)], both[:, len(first) :].detach()

    @torch.no_grad()
    def _update_critics(
        self, gradient: Tensor, mean_error: Tensor, log_probs: Tensor, updates_targets: bool
    ) -> Tensor:
        """Step the critics and the targets; return whether the gradient was finite."""
        norms = gradient.square().sum(dim=1, keepdim=True).sqrt()
        critic_loss = 0.5 * mean_error.square().sum()
        sums = [critic_loss, log_probs.sum()]
        latest = None if self._moments is None else self._moments.join_latest()
        if latest is not None:
            sums.append(latest.sum())
        mask = self._guards[0].compute_mask(norms.sum(), sums, self._guards[1].compute_allowed())
        gradient = clip(gradient, norms, self._settings.max_gradient_norm)
        critics = self._critics.values.view(-1)
        self._adams["critic"].step(critics, gradient.flatten(), self._rates["critic"], mask)
        if self._moments is not None and latest is not None:
            self._moments.update(latest, mask)
        elif self._targets is not None and updates_targets:
            targets, rate = self._targets.values, self._settings.target_update_rate
            replace_if(mask, targets, torch.lerp(targets, self._critics.values, rate))
        self._report("critic_loss", critic_loss / len(log_probs), mask)
        return mask

    def _update_actor(
        self,
        observations: Tensor,
        sample: Tensor,
        log_probs: Tensor,
        weight: Tensor,
        mask: Tensor,
    ) -> Tensor:
        """Step the entropy coefficient and the actor; return whether the step was accepted."""
        if self._fixed_weight is None:
            with torch.no_grad():
                deficit = log_probs.mean() + self._target_entropy
                self._report("ent_coef_loss", -self._log_weight_tensor[0] * deficit, mask)
                self._adams["entropy"].step(
                    self._log_weight_tensor, -deficit[None], self._rates["entropy"], mask
                )
        inputs = torch.cat((observations, sample), dim=1)
        values = self._critics.compute_values(inputs, self._moments, batch=False)
        loss = (weight * log_probs - self._objective.compute_value(values)).mean()
        gradient = self._actor.compute_device_gradient(loss)
        with torch.no_grad():
            norm = gradient.square().sum().sqrt()
            mask = self._guards[1].compute_mask(norm, [loss.detach()], mask)
            gradient = clip(gradient, norm, self._settings.max_gradient_norm)
            self._adams["actor"].step(self._actor.values, gradient, self._rates["actor"], mask)
            self._report("actor_loss", loss.detach(), mask)
        return mask

    def _read_entropy_weight(self) -> Tensor:
        if self._fixed_weight is None:
            return self._log_weight_tensor[0].exp()
        return torch.full_like(self._log_weight_tensor[0], self._fixed_weight)

    def _normalise(self, observations: Tensor) -> Tensor:
        spec = self._networks.spec
        if not spec.normalise:
            return observations
        mean, scale = self._statistics
        limit = self._clip
        return ((observations - mean) * scale).clamp(-limit, limit)

    def _report(self, name: str, value: Tensor, mask: Tensor) -> None:
        """Add a value to the sum of a metric if `mask` is true."""
        total, count = self._totals[_METRICS.index(name)]
        replace_if(mask, total, total + value)
        count.add_(mask)

    def _list_state(self) -> list[Tensor]:
        assert self._chunks is not None
        guards = [tensor for guard in self._guards for tensor in guard.tensors]
        return [*self._mirror.tensors, *guards, self._totals, self._chunks.index]
