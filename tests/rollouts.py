"""Small tasks, policies and fragments for tests of rollouts and fleets."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from rlflame.rollout.envs.make import read_env_spec
from rlflame.rollout.policy import compute_array_shapes
from rlflame.rollout.process.worker_process import WorkerProcess
from rlflame.rollout.seeding import Role, make_reset_seed
from rlflame.rollout.space_codec import find_choice_spans
from rlflame.rollout.task import EnvSpec, PolicyArrays, PolicySpec, RolloutTask, make_fresh_state
from rlflame.rollout.worker import RolloutWorker

MUJOCO = (
    "Ant-v5",
    "HalfCheetah-v5",
    "Hopper-v5",
    "Humanoid-v5",
    "HumanoidStandup-v5",
    "InvertedDoublePendulum-v5",
    "InvertedPendulum-v5",
    "Pusher-v5",
    "Reacher-v5",
    "Swimmer-v5",
    "Walker2d-v5",
)
CLASSIC = (
    "Acrobot-v1",
    "CartPole-v1",
    "MountainCar-v0",
    "MountainCarContinuous-v0",
    "Pendulum-v1",
)


def policy_spec(env: EnvSpec, **changes: Any) -> PolicySpec:
    spec = PolicySpec(
        action_kind=env.action_kind,
        observation_size=env.observation_size,
        action_size=env.action_size,
        action_low=env.action_low,
        action_high=env.action_high,
        hidden=(16, 16),
        activation="tanh",
        normalise=True,
        observation_clip=10.0,
        width=8,
        action_counts=env.action_counts,
        mask_size=env.mask_size,
        choice_spans=find_choice_spans(env.observation_leaves),
    )
    return dataclasses.replace(spec, **changes)


def weights(spec: PolicySpec, seed: int = 0) -> PolicyArrays:
    generator = np.random.default_rng(seed)
    arrays = {
        name: generator.normal(0.0, 0.3, shape).astype(np.float32)
        for name, shape in compute_array_shapes(spec).items()
    }
    if spec.normalise:
        arrays["normaliser.scale"] = np.abs(arrays["normaliser.scale"]) + np.float32(0.5)
    return arrays


def fake(**kwargs: Any) -> EnvSpec:
    """A misbehaving environment, whose spaces are read without the fault."""
    harmless = {key: value for key, value in kwargs.items() if key in ("continuous", "length")}
    return dataclasses.replace(
        read_env_spec("fakes:Fake-v0", harmless, None, ("fakes",)), kwargs=kwargs
    )


def task(env: EnvSpec, slot: int = 0, **changes: Any) -> RolloutTask:
    """The first task of a slot, with `steps` steps by default."""
    seed, rows = changes.get("seed", 0), changes.get("rows", 2)
    whole = changes.get("unit", "steps") == "episodes"
    default = RolloutTask(
        run="test",
        seed=seed,
        purpose="train",
        iteration=0,
        slot=slot,
        env=env,
        policy=policy_spec(env),
        policy_id="weights",
        unit="steps",
        steps=12,
        rows=rows,
        first_row=0,
        acting="sample",
        record=True,
        states=()
        if whole
        else tuple(
            make_fresh_state(0, make_reset_seed(seed, Role.RESET, slot, row, 0))
            for row in range(rows)
        ),
    )
    return dataclasses.replace(default, **changes)


def following(before: RolloutTask, fragment: Any, **changes: Any) -> RolloutTask:
    """The task of the same slot in the next iteration."""
    return dataclasses.replace(
        before, iteration=before.iteration + 1, states=fragment.states, **changes
    )


def run(task: RolloutTask, worker: RolloutWorker | None = None, seed: int = 0) -> Any:
    return (worker or RolloutWorker()).run(task, lambda: weights(task.policy, seed))


def recorded_processes(monkeypatch, module):
    """A list of all worker processes that a module starts from now on."""
    begun = []

    class Recorded(WorkerProcess):
        def __init__(self, **given):
            super().__init__(**given)
            begun.append(self)

    monkeypatch.setattr(f"{module}.WorkerProcess", Recorded)
    return begun
