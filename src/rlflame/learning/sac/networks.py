"""The networks of SAC: what they are made of, and how they begin.

Must not know: losses, optimisers, transitions.
"""

from __future__ import annotations

from dataclasses import dataclass

from rlflame.config.algorithms import CriticNorm
from rlflame.config.recipe import NetworkSettings
from rlflame.rollout.spec import PolicySpec

from ..networks.batch_norm import Moments, moment_shapes
from ..networks.flat_params import FlatVector, network_shapes
from ..networks.network_shape import Network, begin, initial_log_std, network_of

CRITICS = ("critic0.", "critic1.")


@dataclass(frozen=True, slots=True)
class SoftNetworks:
    """The parameters: an actor, two critics in one vector, and the targets that follow them.

    Critics that are standardised over the batch have moments and no targets.
    """

    network: Network
    action_size: int
    actor: FlatVector
    critics: FlatVector
    targets: FlatVector
    norm: CriticNorm = "none"
    moments: Moments | None = None
    #: What each critic puts out; of both critics' together the highest, twice `dropped`, are not
    #: learned from.
    quantiles: int = 1
    dropped: int = 0


def build_soft_networks(
    spec: PolicySpec,
    settings: NetworkSettings,
    seed: int,
    norm: CriticNorm = "none",
    quantiles: int = 1,
    dropped: int = 0,
) -> SoftNetworks:
    hidden = tuple(spec.hidden)
    shapes = network_shapes("actor", (spec.observation_size, *hidden, spec.output_size))
    if spec.log_std_shape is not None:
        shapes["actor.log_std"] = spec.log_std_shape
    actor = FlatVector(shapes)
    sizes = (spec.observation_size + spec.action_size, *hidden, quantiles)
    critics = FlatVector(
        {
            name: shape
            for prefix in CRITICS
            for name, shape in network_shapes(prefix[:-1], sizes).items()
        }
    )
    layers = len(hidden) + 1
    networks = [(actor, "actor", settings.last_layer_scale)]
    networks += [(critics, prefix[:-1], 1.0) for prefix in CRITICS]
    for key, (vector, prefix, last_gain) in enumerate(networks):
        begin(vector, prefix, layers, settings, seed=seed, last_gain=last_gain, key=key)
    if spec.log_std_shape is not None:
        actor["actor.log_std"][:] = initial_log_std(spec, settings)
    else:
        actor[f"actor.{layers - 1}.bias"][spec.action_size :] += settings.log_std_init
    shape = network_of(spec)
    if norm == "batch":
        moments = Moments(
            {n: s for prefix in CRITICS for n, s in moment_shapes(prefix[:-1], sizes).items()}
        )
        targets = FlatVector({})
    else:
        moments, targets = None, FlatVector(critics.shapes)
        targets.data[:] = critics.data
    return SoftNetworks(
        shape, spec.action_size, actor, critics, targets, norm, moments, quantiles, dropped
    )
