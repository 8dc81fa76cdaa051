"""Divides the time of one update of PPO and of SAC into parts.

    RLFLAME_KERNELS=off python benchmarks/update_profile.py
    python benchmarks/update_profile.py

The matrix products, tanh, Adam and the drawing of samples are also run alone, on arrays of the same
sizes. The rest of an update is everything else: losses, other activations, copies and calls. PPO
uses one thread, and SAC two. The script prints one line per part: update, part and microseconds.
"""

from __future__ import annotations

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
from card import Learner, draw_fragment
from ppo_update import products_us
from script import ended

from rlflame.learning.optim import make_adam
from rlflame.learning.parallel.thread_pair import ThreadPair
from rlflame.rollout.seeding import Role, make_stream

ROUNDS, CALLS = 7, 100


def main() -> None:
    for case, parts in (("PPO, Hopper, 64 samples", list_ppo_parts()),
                        ("SAC, HalfCheetah, 256 samples", list_sac_parts())):  # fmt: skip
        for part, value in parts:
            print(f"{case}\t{part}\t{value:.1f}")


def list_ppo_parts() -> Iterator[tuple[str, float]]:
    rows = 64
    learner = Learner("hopper", "ppo", "numpy", f"ppo.minibatch_size={rows}", "ppo.epochs=5",
                      "rollout.num_slots=1", "rollout.envs_per_slot=8", "rollout.steps=256",
                      "ppo.target_kl=none")  # fmt: skip
    spec, batch, algorithm = learner.spec, learner.draw_batch(), learner.algorithm
    count = 5 * batch.steps // rows
    whole_us = time_us(lambda: algorithm.update(batch, 0.0), 1) / count
    sizes = (spec.observation_size, *spec.hidden)
    units = np.full((spec.hidden[0], rows), 0.5, np.float32)
    parts = {
        "matrix products": products_us(sizes, (spec.action_size, 1), rows, 500),
        "tanh": 2 * len(spec.hidden) * time_us(lambda: np.tanh(units, out=units)),
        "Adam": time_adam(len(algorithm.get_state()["parameters"])),
    }
    yield from add_rest(parts, whole_us)


def list_sac_parts() -> Iterator[tuple[str, float]]:
    learner = Learner("halfcheetah", "sac", "numpy", "learning.threads=2", on_device=False)
    columns, spec = learner.learning.rollout.columns, learner.spec
    for number in range(20):
        learner.buffer.add([draw_fragment(number, 1000, columns, spec)], {})
    (batch,) = learner.buffer.take_batches()
    batch = replace(batch, first_update=0, updates=50)
    algorithm = learner.algorithm
    whole_us = time_us(lambda: algorithm.update(batch, 0.0), 1) / batch.updates
    thread_pair, rows = ThreadPair(2), 256
    lanes = [list_products(spec, rows) for _ in range(2)]

    def multiply(lane: int) -> None:
        for a, b, out in lanes[lane]:
            np.dot(a, b, out=out)

    def draw() -> None:
        batch.draw(0)
        stream = make_stream(0, Role.LEARN, 0)
        stream.standard_normal((2, spec.action_size, rows), dtype=np.float32)

    state = algorithm.get_state()
    parts = {
        "matrix products": time_us(lambda: thread_pair.run(multiply), 20),
        "Adam": sum(time_adam(len(state[name]), thread_pair) for name in ("actor", "critics")),
        "drawing of samples and noise": time_us(draw),
    }
    yield from add_rest(parts, whole_us)


def list_products(spec: Any, rows: int) -> list[tuple[Any, ...]]:
    """List the matrix products of one lane: half of an update."""
    critic = (spec.observation_size + spec.action_size, *spec.hidden, 1)
    actor = (spec.observation_size, *spec.hidden, 2 * spec.action_size)
    calls = []
    # The passes of a lane: its actor, its target, and its critic for two kinds of actions.
    for sizes in (actor, critic, critic, critic):
        for fan_in, fan_out in pairwise(sizes):
            weights = np.full((fan_in + 1, fan_out), 0.01, np.float32)
            inputs = np.full((fan_in + 1, rows), 0.01, np.float32)
            calls.append((weights.T, inputs, np.empty((fan_out, rows), np.float32)))
    # The gradients of the critic's weights, and of the inputs of its layers, the latter twice. The
    # lanes share the actor's backward pass.
    for sizes, has_weights in ((critic, True), (critic, False), (actor, None)):
        for layer, (fan_in, fan_out) in enumerate(pairwise(sizes)):
            weights = np.full((fan_in + 1, fan_out), 0.01, np.float32)
            inputs = np.full((fan_in + 1, rows), 0.01, np.float32)
            slopes = np.full((fan_out, rows), 0.01, np.float32)
            if has_weights in (True, None):
                calls.append((inputs, slopes.T, np.empty_like(weights)))
            if has_weights is False or (has_weights and layer):
                calls.append((weights[:-1], slopes, np.empty((fan_in, rows), np.float32)))
    return calls


def time_adam(size: int, thread_pair: ThreadPair | None = None) -> float:
    adam = make_adam(size, 1e-5)
    vector, gradient = np.zeros((2, size), np.float32)
    gradient[:] = 0.1
    if thread_pair is None:
        return time_us(lambda: adam.step(vector, gradient, 1e-4))
    return time_us(lambda: adam.step_in_lanes(thread_pair, vector, gradient, 1e-4))


def time_us(work: Callable[[], object], calls: int = CALLS) -> float:
    """Return the microseconds of a call: the lowest mean of several rounds."""
    times = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        for _ in range(calls):
            work()
        times.append(time.perf_counter() - start)
    return 1e6 * min(times) / calls


def add_rest(parts: dict[str, float], whole_us: float) -> Iterator[tuple[str, float]]:
    yield from parts.items()
    yield "everything else", whole_us - sum(parts.values())
    yield "whole update", whole_us


if __name__ == "__main__":
    ended(main)
