"""SAC's networks, transitions and learners for tests, and a plain torch implementation."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from rlflame.config.algorithms import CriticNorm, SacSettings
from rlflame.config.recipe import NetworkSettings
from rlflame.learning.base import ReplayBatch, Transitions
from rlflame.learning.parallel.thread_pair import ThreadPair
from rlflame.learning.sac.compiled_sac import make_sac
from rlflame.learning.sac.loss import SacGradientProvider, SacMinibatch
from rlflame.learning.sac.loss_torch import TorchSac
from rlflame.learning.sac.networks import SacNetworks, build_sac_networks
from rlflame.learning.sac.sac import Sac
from rlflame.rollout.seeding import Role, make_stream
from rlflame.rollout.task import Exploration, PolicySpec

OBSERVATIONS, ACTIONS, ROWS = 5, 3, 33


def spec(
    activation: str = "relu",
    hidden: tuple[int, ...] = (24, 16),
    exploration: Exploration = "independent",
    actions: int = ACTIONS,
) -> PolicySpec:
    return PolicySpec(
        action_kind="continuous",
        observation_size=OBSERVATIONS,
        action_size=actions,
        action_low=(-1.0, -2.0, 0.0)[:actions],
        action_high=(1.0, 2.0, 4.0)[:actions],
        hidden=hidden,
        activation=activation,  # type: ignore[arg-type]
        normalise=False,
        observation_clip=10.0,
        width=8,
        squash=True,
        exploration=exploration,
    )


def networks(
    seed: int = 0,
    norm: CriticNorm = "none",
    quantiles: int = 1,
    drop_count: int = 0,
    **shape: Any,
) -> SacNetworks:
    settings = NetworkSettings(last_layer_scale=1.0)
    built = build_sac_networks(spec(**shape), settings, seed, norm, quantiles, drop_count)
    generator = np.random.default_rng(seed)
    for vector in (built.actor, built.critics, built.targets):
        # Different biases and targets, so that no error is hidden by zeros or equal values.
        vector.data[:] += generator.normal(0.0, 0.05, len(vector.data))
    if built.moments is not None:
        running = built.moments.running
        running.data[:] += generator.uniform(0.0, 0.3, len(running.data))
    return built


def providers(
    nets: SacNetworks, threads: int = 1
) -> tuple[SacGradientProvider, SacGradientProvider]:
    """The provider with derived gradients and the one with autograd."""
    return make_sac(nets, ThreadPair(threads)), TorchSac(nets)


def transitions(seed: int = 0, rows: int = ROWS, actions: int = ACTIONS) -> Transitions:
    generator = np.random.default_rng(seed)

    def normal(*shape: int) -> Any:
        return generator.standard_normal(shape).astype(np.float32)

    return Transitions(
        observations=normal(rows, OBSERVATIONS),
        actions=np.tanh(normal(rows, actions)),
        rewards=normal(rows),
        next_observations=normal(rows, OBSERVATIONS),
        bootstrap=np.where(generator.random(rows) < 0.2, 0.0, 0.97).astype(np.float32),
    )


def minibatch(seed: int = 0, rows: int = ROWS, actions: int = ACTIONS) -> SacMinibatch:
    drawn = transitions(seed, rows, actions)
    noise = np.random.default_rng(seed + 1).standard_normal((2, actions, rows))
    return SacMinibatch(
        drawn.observations,
        drawn.actions,
        drawn.rewards,
        drawn.next_observations,
        drawn.bootstrap,
        noise.astype(np.float32),
    )


def owed(first: int, updates: int, seed: int = 0) -> ReplayBatch:
    fresh: Any = None
    return ReplayBatch(fresh, first, updates, lambda update: transitions(seed + update))


def learner(settings: SacSettings, nets: SacNetworks, threads: int = 1, seed: int = 7) -> Sac:
    return Sac(settings, nets, [providers(nets, threads)[0]], ThreadPair(threads), seed=seed)


class Plain:
    """SAC in plain torch in float64, without nn.Linear, with torch's optimizers."""

    def __init__(self, nets: SacNetworks, settings: SacSettings) -> None:
        def leaves(vector: Any) -> dict[str, torch.Tensor]:
            return {
                name: torch.tensor(vector[name].astype(np.float64), requires_grad=True)
                for name in vector.shapes
            }

        self.settings = settings
        self.act = torch.tanh if nets.spec.activation == "tanh" else torch.relu
        self.drop_count = nets.drop_count
        self.actor, self.critics = leaves(nets.actor), leaves(nets.critics)
        self.targets = {n: t.detach().clone() for n, t in leaves(nets.targets).items()}
        self.running = {} if nets.moments is None else leaves(nets.moments.running)
        self.latest: dict[str, torch.Tensor] = {}
        coefficient = settings.entropy_coefficient
        self.is_fixed = coefficient != "auto"
        start = coefficient if self.is_fixed else settings.initial_entropy_coefficient
        # The learner keeps its logarithm in float32.
        log_start = np.array([np.log(start)], np.float32).astype(np.float64)
        self.log_weight = torch.tensor(log_start, requires_grad=True)
        self.wanted_entropy = (
            -ACTIONS if settings.target_entropy == "auto" else settings.target_entropy
        )
        rate = settings.learning_rate
        groups = (
            (list(self.actor.values()), rate),
            (list(self.critics.values()), settings.critic_learning_rate or rate),
            ([self.log_weight], settings.entropy_learning_rate or rate),
        )
        self.actor_optimizer, self.critic_optimizer, self.weight_optimizer = (
            torch.optim.Adam(weights, lr=rate, eps=settings.adam_epsilon)
            for weights, rate in groups
        )

    def mlp(
        self, weights: dict[str, torch.Tensor], prefix: str, x: torch.Tensor, last: bool = True
    ) -> torch.Tensor:
        for layer in range(3 if last else 2):
            x = x @ weights[f"{prefix}.{layer}.weight"] + weights[f"{prefix}.{layer}.bias"]
            x = self.act(x) if layer < 2 else x
        return x

    def pi(self, seen: torch.Tensor, noise: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if "actor.log_std" in self.actor:
            # The noise of an action is a sum over units h of h * N(0, std^2), so the variances add
            # up.
            units = self.mlp(self.actor, "actor", seen, last=False)
            parts = units[:, :, None] * self.actor["actor.log_std"].exp()
            deviation = parts.square().sum(dim=1).add(1e-6).sqrt()
            mean = self.mlp(self.actor, "actor", seen)
        else:
            mean, log_std = self.mlp(self.actor, "actor", seen).split(ACTIONS, dim=1)
            deviation = log_std.clamp(-20, 2).exp()
        normal = torch.distributions.Normal(mean, deviation)
        raw = mean + normal.stddev * noise
        log_prob = normal.log_prob(raw) - torch.log(1.0 - torch.tanh(raw).square())
        return torch.tanh(raw), log_prob.sum(dim=1)

    def q(
        self, weights: dict[str, torch.Tensor], seen: torch.Tensor, action: torch.Tensor
    ) -> torch.Tensor:
        x = torch.cat((seen, action), dim=1)
        return torch.stack([self.mlp(weights, f"critic{j}", x) for j in (0, 1)])

    def joint(self, seen: torch.Tensor, action: torch.Tensor, batch: bool) -> torch.Tensor:
        """The values of critics with batch normalisation of each layer's input."""
        values = []
        for critic in ("critic0", "critic1"):
            x = torch.cat((seen, action), dim=1)
            for layer in range(3):
                name = f"{critic}.{layer}"
                if batch:
                    mean, variance = x.mean(dim=0), x.var(dim=0, correction=0)
                    self.latest |= {f"{name}.mean": mean, f"{name}.variance": variance}
                else:
                    mean, variance = self.running[f"{name}.mean"], self.running[f"{name}.variance"]
                x = (x - mean) / (variance + 1e-3).sqrt()
                x = x @ self.critics[f"{name}.weight"] + self.critics[f"{name}.bias"]
                x = self.act(x) if layer < 2 else x
            values.append(x)
        return torch.stack(values)

    def pool(self, values: torch.Tensor) -> torch.Tensor:
        """The values of both critics that the target keeps, in ascending order."""
        pooled = values.transpose(0, 1).flatten(1).sort(dim=1).values
        outputs = values.shape[2]
        return pooled[:, : 2 * (outputs - self.drop_count) if outputs > 1 else 1]

    def error(self, values: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        """The squared error, or the quantile Huber loss of Dabney et al. (2018)."""
        outputs = values.shape[2]
        if outputs == 1:
            return 0.5 * (values - wanted).square().mean(dim=(1, 2)).sum()
        total = torch.zeros((), dtype=torch.float64)
        for critic in values:
            for number in range(outputs):
                fraction = (number + 0.5) / outputs
                away = wanted - critic[:, number : number + 1]
                loss = torch.nn.functional.huber_loss(
                    away, torch.zeros_like(away), reduction="none"
                )
                slope = (fraction - (away < 0.0).to(away.dtype)).abs()
                total = total + (slope * loss).mean() / outputs
        return total

    def clip(self, weights: list[torch.Tensor]) -> None:
        if self.settings.max_gradient_norm is not None:
            torch.nn.utils.clip_grad_norm_(weights, self.settings.max_gradient_norm)

    def update(self, number: int, drawn: Transitions) -> None:
        settings = self.settings
        seen, action, reward, following, bootstrap = (
            torch.as_tensor(np.array(getattr(drawn, name), np.float64))
            for name in ("observations", "actions", "rewards", "next_observations", "bootstrap")
        )
        noise = make_stream(7, Role.LEARN, number).standard_normal(
            (2, ACTIONS, len(reward)), dtype=np.float32
        )
        now, later = torch.as_tensor(noise.astype(np.float64)).transpose(1, 2)
        weight = self.log_weight.detach().exp()
        if self.is_fixed:
            weight = torch.tensor(settings.entropy_coefficient, dtype=torch.float64)
        with torch.no_grad():
            next_action, next_log_prob = self.pi(following, later)
        if self.running:
            both = torch.cat((seen, following)), torch.cat((action, next_action))
            values, later_values = self.joint(*both, batch=True).chunk(2, dim=1)
        else:
            values = self.q(self.critics, seen, action)
            later_values = self.q(self.targets, following, next_action)
        value = self.pool(later_values.detach())
        soft = value - weight * next_log_prob[:, None]
        wanted = reward[:, None] + bootstrap[:, None] * soft
        loss = self.error(values, wanted)
        self.critic_optimizer.zero_grad()
        loss.backward()
        for prefix in ("critic0", "critic1"):
            self.clip([t for name, t in self.critics.items() if name.startswith(prefix)])
        self.critic_optimizer.step()
        for name, moment in self.latest.items():
            self.running[name] = (0.99 * self.running[name] + 0.01 * moment).detach()
        drawn_action, log_prob = self.pi(seen, now)
        if number % settings.policy_delay == 0:
            deficit = log_prob.detach() + self.wanted_entropy
            entropy_loss = -(self.log_weight * deficit).mean()
            self.weight_optimizer.zero_grad()
            entropy_loss.backward()
            if not self.is_fixed:
                self.weight_optimizer.step()
            judged = (
                self.joint(seen, drawn_action, batch=False)
                if self.running
                else self.q(self.critics, seen, drawn_action)
            )
            outputs = judged.shape[2]
            lower = judged.mean(dim=(0, 2)) if outputs > 1 else judged[..., 0].min(dim=0).values
            self.actor_optimizer.zero_grad()
            (weight * log_prob - lower).mean().backward()
            self.clip(list(self.actor.values()))
            self.actor_optimizer.step()
        if (number + 1) % settings.target_update_interval == 0:
            with torch.no_grad():
                for name, target in self.targets.items():
                    target.mul_(1.0 - settings.target_update_rate)
                    target.add_(settings.target_update_rate * self.critics[name])
