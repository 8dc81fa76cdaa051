"""The networks of SAC: what they are made of, and how they begin.

Must not know: losses, optimisers, transitions.
"""

from __future__ import annotations

from dataclasses import dataclass

from rlflame.config.algorithms import CriticNorm
from rlflame.config.recipe import NetworkSettings
from rlflame.rollout.spec import PolicySpec

from ..networks.batch_norm import BatchMoments, make_moment_shapes
from ..networks.flat_params import FlatVector, make_network_shapes
from ..networks.network_init import (
    NetworkShape,
    compute_initial_log_std,
    init_network,
    make_network_shape,
)

CRITICS = ("critic0.", "critic1.")


@dataclass(frozen=True, slots=True)
class SacNetworks:
    """The parameters: an actor, two critics in one vector, and the targets that follow them.

    Critics that are standardised over the batch have moments and no targets.
    """

    network: NetworkShape
    action_size: int
    actor: FlatVector
    critics: FlatVector
    targets: FlatVector
    moments: BatchMoments | None = None
    #: What each critic puts out; of both critics' together the highest, twice `dropped`, are not
    #: learned from.
    quantiles: int = 1
    dropped: int = 0


def build_sac_networks(
    spec: PolicySpec,
    settings: NetworkSettings,
    seed: int,
    norm: CriticNorm = "none",
    quantiles: int = 1,
    dropped: int = 0,
) -> SacNetworks:
    hidden = tuple(spec.hidden)
    shapes = make_network_shapes("actor", (spec.observation_size, *hidden, spec.output_size))
    if spec.log_std_shape is not None:
        shapes["actor.log_std"] = spec.log_std_shape
    actor = FlatVector(shapes)
    sizes = (spec.observation_size + spec.action_size, *hidden, quantiles)
    critics = FlatVector(
        {
            name: shape
            for prefix in CRITICS
            for name, shape in make_network_shapes(prefix[:-1], sizes).items()
        }
    )
    layers = len(hidden) + 1
    networks = [(actor, "actor", settings.last_layer_scale)]
    networks += [(critics, prefix[:-1], 1.0) for prefix in CRITICS]
    for key, (vector, prefix, last_gain) in enumerate(networks):
        init_network(vector, prefix, layers, settings, seed=seed, last_gain=last_gain, key=key)
    if spec.log_std_shape is not None:
        actor["actor.log_std"][:] = compute_initial_log_std(spec, settings)
    else:
        actor[f"actor.{layers - 1}.bias"][spec.action_size :] += settings.log_std_init
    shape = make_network_shape(spec)
    if norm == "batch":
        moments = BatchMoments(
            {n: s for prefix in CRITICS for n, s in make_moment_shapes(prefix[:-1], sizes).items()}
        )
        targets = FlatVector({})
    else:
        moments, targets = None, FlatVector(critics.shapes)
        targets.data[:] = critics.data
    return SacNetworks(
        shape, spec.action_size, actor, critics, targets, moments, quantiles, dropped
    )
