"""Environment states: an episode continues identically from any step elsewhere.

The expected values come from `gymnasium.make`, with a new environment for each episode that is
stepped without interruption.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import fakes
import gymnasium
import numpy as np
import pytest
import rollouts

from rlflame.rollout import wire
from rlflame.rollout.envs import gymnasium_env
from rlflame.rollout.envs.gymnasium_env import RestorableEnv
from rlflame.rollout.envs.make import make_env, read_env_spec
from rlflame.rollout.envs.spaces import UnsupportedSpace
from rlflame.rollout.seeding import Role, make_reset_seed
from rlflame.rollout.task import EnvironmentFault, EnvSpec, EnvState, make_fresh_state
from rlflame.training.trainer import StopInterrupt

OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "LunarLander": ("LunarLander-v3", {}),
    "LunarLanderContinuous": ("LunarLander-v3", {"continuous": True}),
    "LunarLanderWind": ("LunarLander-v3", {"enable_wind": True}),
    "BipedalWalker": ("BipedalWalker-v3", {}),
    "ShiftedHopper": ("fakes:ShiftedHopper-v0", {}),
    "Fake": ("fakes:Fake-v0", {"length": 9}),
}
ALL = {name: (name, {}) for name in (*rollouts.MUJOCO, *rollouts.CLASSIC)} | OTHERS
STEPS = 40
Moment = tuple[bytes, float, bool, bool, bytes]


def seed_of(episode: int) -> int:
    return make_reset_seed(3, Role.RESET, 0, 0, episode)


def actions_for(env: EnvSpec, steps: int) -> list[Any]:
    generator = np.random.default_rng(8)
    if env.action_kind == "discrete":
        return list(generator.integers(0, env.action_size, steps))
    low, high = np.array(env.action_low), np.array(env.action_high)
    return list(generator.uniform(low, high, (steps, env.action_size)).astype(np.float32))


def told_by_gymnasium(env: EnvSpec, actions: list[Any]) -> list[Moment]:
    """Observation, reward, both ends, and the next observation to act on."""
    options = dict(env.kwargs)
    if env.max_episode_steps is not None:
        options["max_episode_steps"] = env.max_episode_steps

    def begin(episode: int) -> tuple[Any, Any]:
        world = gymnasium.make(env.id, **options)
        return world, world.reset(seed=seed_of(episode))[0]

    episode, (world, _) = 0, begin(0)
    moments = []
    for action in actions:
        given = int(action) + env.action_start if env.action_kind == "discrete" else action
        seen, reward, terminated, truncated, _ = world.step(given)
        shown = seen
        if terminated or truncated:
            world.close()
            episode += 1
            world, shown = begin(episode)
        parts = [np.ravel(x).astype(np.float32).tobytes() for x in (seen, shown)]
        moments.append((parts[0], float(reward), bool(terminated), bool(truncated), parts[1]))
    world.close()
    return moments


def walk(
    row: RestorableEnv, out: Any, actions: list[Any], keep: list[EnvState] | None = None
) -> Any:
    """The same steps with RestorableEnv, optionally with a snapshot at each step."""
    moments = []
    for action in actions:
        row.prepare_snapshot()
        reward, terminated, truncated = row.step(action, out)
        seen = out.tobytes()
        if terminated or truncated:
            row.reset(row.episode + 1, seed_of(row.episode + 1), out)
        moments.append((seen, reward, terminated, truncated, out.tobytes()))
        if keep is not None:
            keep.append(row.snapshot(out))
    return moments


def telling(moments: list[Moment]) -> list[int]:
    """Steps at which to interrupt: 1, some others, and around each kind of end."""
    chosen = {1, 7, STEPS // 2, STEPS - 1}
    for kind in (2, 3):
        ends = [t + 1 for t, moment in enumerate(moments) if moment[kind]]
        for end in ends[:1] + ends[-1:]:
            chosen |= {end - 1, end, end + 1}
    return sorted(t for t in chosen if 0 < t < STEPS)


@pytest.mark.parametrize("limit", [None, 6])
@pytest.mark.parametrize("name", ALL)
def test_an_interrupted_environment_goes_on_bit_for_bit(name: str, limit: int | None) -> None:
    id, kwargs = ALL[name]
    env = read_env_spec(id, kwargs, limit, ("fakes",))
    actions = actions_for(env, STEPS)
    expected = told_by_gymnasium(env, actions)
    if limit is not None:
        assert any(moment[3] for moment in expected)

    states: list[EnvState] = []
    out = np.zeros(env.observation_size, np.float32)
    whole = RestorableEnv(env, 0)
    whole.restore(make_fresh_state(0, seed_of(0)), out)
    begun = whole.snapshot(out)
    assert walk(whole, out, actions, states) == expected
    whole.close()

    for t, state in [(0, begun), *((t, states[t - 1]) for t in telling(expected))]:
        travelled = wire.decode(wire.encode(state))
        row, there = RestorableEnv(env, 0), np.zeros_like(out)
        row.restore(travelled, there)
        assert there.tobytes() == travelled.observation.tobytes()
        assert (row.episode, row.elapsed) == (state.episode, state.elapsed)
        assert row.episode_return == state.episode_return
        assert row.snapshot(there).token == state.token or state.kind == "mujoco"
        assert walk(row, there, actions[t:]) == expected[t:], f"interrupted after step {t}"
        row.close()


def test_the_moments_above_include_ends_of_every_kind() -> None:
    ended, limited = set(), set()
    for name in ("CartPole-v1", "Hopper-v5", "InvertedPendulum-v5", "ShiftedHopper", "Fake"):
        id, kwargs = ALL[name]
        for limit, found in ((None, ended), (6, limited)):
            env = read_env_spec(id, kwargs, limit, ("fakes",))
            moments = told_by_gymnasium(env, actions_for(env, STEPS))
            if any(moment[3 if limit else 2] for moment in moments):
                found.add(name)
    assert len(ended) >= 4
    assert len(limited) == 5


@pytest.mark.parametrize("name", ["Hopper-v5", "Pendulum-v1", "ShiftedHopper"])
def test_a_state_taken_up_just_before_its_time_limit_ends_at_the_limit(name: str) -> None:
    env = read_env_spec(*ALL[name], 5, ("fakes",))
    row, out = RestorableEnv(env, 0), np.zeros(env.observation_size, np.float32)
    row.reset(0, 4, out)
    actions = actions_for(env, 5)
    for action in actions[:4]:
        row.prepare_snapshot()
        assert row.step(action, out)[1:] == (False, False)
    other = RestorableEnv(env, 0)
    other.restore(row.snapshot(out), out)
    assert other.step(actions[4], out)[1:] == (False, True)
    assert other.elapsed == 5


def test_kinds_of_states_are_what_they_are_known_to_be() -> None:
    kinds = {}
    for name, (id, kwargs) in ALL.items():
        env = read_env_spec(id, kwargs, None, ("fakes",))
        row, out = RestorableEnv(env, 0), np.zeros(env.observation_size, np.float32)
        row.reset(0, 1, out)
        row.prepare_snapshot()
        row.step(actions_for(env, 1)[0], out)
        kinds[name] = row.snapshot(out).kind
    assert {name for name, kind in kinds.items() if kind == "mujoco"} == set(rollouts.MUJOCO)
    assert set(kinds.values()) == {"mujoco", "replay"}


def episode(world: Any, seed: int, env: EnvSpec, steps: int) -> list[tuple[bytes, float]]:
    moments = [(np.array(world.reset(seed=seed)[0]).tobytes(), 0.0)]
    for action in actions_for(env, steps):
        seen, reward, terminated, truncated, _ = world.step(
            int(action) if env.action_kind == "discrete" else action
        )
        moments.append((np.array(seen).tobytes(), float(reward)))
        if terminated or truncated:
            break
    return moments


REUSED = {name: ALL[name] for name in ALL if name not in ("BipedalWalker", "ShiftedHopper", "Fake")}


@pytest.mark.parametrize("name", REUSED)
def test_a_used_instance_on_the_reuse_list_begins_like_a_fresh_one(name: str) -> None:
    id, kwargs = REUSED[name]
    env = read_env_spec(id, kwargs, None, ("fakes",))
    used = gymnasium.make(id, **kwargs)
    for seed in range(4):
        assert episode(used, seed, env, 60) == episode(gymnasium.make(id, **kwargs), seed, env, 60)
    assert opened(env)._is_reusable


def test_every_type_on_the_reuse_list_is_tried() -> None:
    tried = {
        type(gymnasium.make(id, **kwargs).unwrapped).__module__ for id, kwargs in REUSED.values()
    }
    assert tried | {"gymnasium.envs.box2d.bipedal_walker"} == gymnasium_env._REUSABLE


@pytest.mark.parametrize("hardcore", [False, True])
def test_a_used_bipedal_walker_begins_like_a_fresh_one_in_a_new_world_only(hardcore) -> None:
    env = read_env_spec("BipedalWalker-v3", {"hardcore": hardcore}, None)
    used, row = gymnasium.make(env.id, hardcore=hardcore), opened(env)
    instance, shown = row._env, np.zeros(env.observation_size, np.float32)
    differ = []
    for seed in range(8):
        fresh = episode(gymnasium.make(env.id, hardcore=hardcore), seed, env, 300)
        differ.append(episode(used, seed, env, 300) != fresh)
        row.reset(seed, seed, shown)
        moments = [(shown.tobytes(), 0.0)]
        for action in actions_for(env, len(fresh) - 1):
            reward, _, _ = row.step(action, shown)
            moments.append((shown.tobytes(), reward))
        assert moments == fresh
    assert any(differ) or hardcore
    assert row._env is instance


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_an_instance_whose_reset_was_cut_short_is_never_used_again(error, monkeypatch) -> None:
    """MuJoCo can crash the process if an environment has only half of its state."""
    row = opened(read_env_spec("BipedalWalker-v3", {}, None))
    shown, instance = np.zeros(row.spec.observation_size, np.float32), row._env

    def stopped() -> None:
        raise error

    monkeypatch.setattr(instance.unwrapped, "_generate_clouds", stopped)
    with pytest.raises(EnvironmentFault if error is ValueError else error):
        row.reset(1, 1, shown)
    row.reset(1, 1, shown)
    assert row._env is not instance
    assert shown.tobytes() == np.array(gymnasium.make(row.spec.id).reset(seed=1)[0]).tobytes()


@pytest.mark.parametrize("name", ["ShiftedHopper", "Fake"])
def test_what_is_not_known_gets_a_fresh_instance_for_each_episode(name: str) -> None:
    row = opened(read_env_spec(*ALL[name], None, ("fakes",)))
    first = row._env
    row.reset(1, 5, np.zeros(row.spec.observation_size, np.float32))
    assert row._env is not first


def opened(env: EnvSpec) -> RestorableEnv:
    row = RestorableEnv(env, 0)
    row.reset(0, 0, np.zeros(env.observation_size, np.float32))
    return row


@pytest.mark.parametrize("episodes", ["fresh", "reuse"])
def test_an_environment_that_draws_its_own_numbers_is_refused_by_a_sentence(episodes: Any) -> None:
    env = dataclasses.replace(rollouts.fake(fault="random", at=2), episodes=episodes)
    row, out = RestorableEnv(env, 3), np.zeros(3, np.float32)
    row.reset(0, 77, out)
    for _ in range(2):
        row.step(0, out)
    with pytest.raises(EnvironmentFault) as caught:
        RestorableEnv(env, 3).restore(row.snapshot(out), out)
    assert "fakes:Fake-v0 returned a different observation" in str(caught.value)
    assert "--set rollout.unit=episodes" in str(caught.value)
    # State between episodes is a possible cause only if instances are used again.
    assert ("--set environment.episodes=fresh" in str(caught.value)) == (episodes == "reuse")
    assert (caught.value.row, caught.value.seed, caught.value.step) == (3, 77, 2)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"kind": "mujoco"}, "cannot restore a MuJoCo state"),
        ({"seed": 5}, "if its code has changed, restore the old code"),
    ],
)
def test_a_state_of_something_else_is_refused(change: Any, sentence: str) -> None:
    env = rollouts.fake()
    row, out = RestorableEnv(env, 0), np.zeros(3, np.float32)
    row.reset(0, 4, out)
    row.step(1, out)
    state = dataclasses.replace(row.snapshot(out), **change)
    with pytest.raises(EnvironmentFault, match=sentence):
        RestorableEnv(env, 0).restore(state, out)


def test_physics_of_another_model_are_refused() -> None:
    hopper = opened(read_env_spec("Hopper-v5", {}, None))
    out = np.zeros(11, np.float32)
    hopper.prepare_snapshot()
    hopper.step(np.zeros(3, np.float32), out)
    walker = RestorableEnv(read_env_spec("Walker2d-v5", {}, None), 0)
    with pytest.raises(EnvironmentFault, match="another MuJoCo model"):
        walker.restore(hopper.snapshot(out), np.zeros(17, np.float32))


def test_tokens_name_the_whole_state() -> None:
    row, out = opened(rollouts.fake()), np.zeros(3, np.float32)
    row.step(1, out)
    state = row.snapshot(out)
    other_actions = state.actions.copy()
    other_actions[0] = 0
    changes: list[dict[str, Any]] = [
        {"kind": "fresh"},
        {"episode": 1},
        {"seed": 1},
        {"elapsed": 2},
        {"episode_return": np.nextafter(state.episode_return, 9.0).item()},
        {"actions": other_actions},
        {"physics": np.zeros(1)},
        {"observation": np.nextafter(state.observation, np.float32(9.0))},
    ]
    tokens = {state.token}
    for change in changes:
        values = {
            field.name: getattr(state, field.name)
            for field in dataclasses.fields(state)
            if field.name != "token"
        }
        tokens.add(EnvState(**{**values, **change}).token)
    assert len(tokens) == len(changes) + 1


@pytest.mark.parametrize(
    ("fault", "where", "sentence", "step"),
    [
        ("raise", "step", "failed in step: ValueError: the moon is wrong", 3),
        ("raise", "reset", "failed in reset: ValueError: the moon is wrong", 0),
        ("raise", "init", "failed in reset: ValueError: the moon is wrong", 0),
        ("exit", "step", "failed in step: SystemExit: gone fishing", 3),
        ("exit", "init", "failed in reset: SystemExit: gone fishing", 0),
        (
            "shape",
            "step",
            "returned an observation of shape (4,), but its space has the shape (3,)",
            3,
        ),
        (
            "shape",
            "reset",
            "returned an observation of shape (4,), but its space has the shape (3,)",
            0,
        ),
        ("ragged", "step", "failed in step: ValueError", 3),
        ("words", "step", "failed in step: ValueError", 3),
        ("nan_reward", "step", "returned the reward nan", 3),
        ("no_reward", "step", "returned the reward None, which is not one number", 3),
        ("rewards", "step", "returned the reward (1.0, 2.0), which is not one number", 3),
        ("flags", "step", "returned terminated as (False, False), which is neither", 3),
        ("four", "step", "failed in step: ValueError: not enough values to unpack", 3),
        ("alone", "reset", "failed in reset: ValueError: too many values to unpack", 0),
        ("rich", "step", "returned rewards that add up to infinity", 2),
        ("surrender", "step", "failed in step: fakes.Surrender: white flag", 3),
        ("surrender", "init", "failed in reset: fakes.Surrender: white flag", 0),
        ("generator", "step", "failed in step: GeneratorExit", 3),
    ],
)
def test_misbehaviour_is_reported_with_its_place(
    fault: str, where: str, sentence: str, step: int
) -> None:
    row, out = RestorableEnv(rollouts.fake(fault=fault, where=where), 2), np.zeros(3, np.float32)

    def meet_it() -> None:
        row.reset(0, 9, out)
        for _ in range(5):
            row.step(0, out)

    with pytest.raises(EnvironmentFault) as caught:
        meet_it()
    assert sentence in str(caught.value)
    assert str(caught.value).startswith("Environment fakes:Fake-v0 ")
    assert (caught.value.row, caught.value.seed, caught.value.step) == (2, 9, step)


def test_where_ctrl_c_is_ignored_a_keyboard_interrupt_is_the_environment_s():
    row, out = RestorableEnv(rollouts.fake(fault="interrupt", at=1), 0), np.zeros(3, np.float32)
    row.reset(0, 9, out)
    with pytest.raises(KeyboardInterrupt):
        row.step(0, out)
    row.reset(0, 9, out)
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with pytest.raises(EnvironmentFault, match="failed in step: KeyboardInterrupt"):
            row.step(0, out)
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_stop_request_is_never_the_environment_s(monkeypatch):
    row, out = RestorableEnv(rollouts.fake(fault="interrupt", at=1), 0), np.zeros(3, np.float32)
    row.reset(0, 9, out)
    monkeypatch.setattr(fakes.Fake, "_interrupt", lambda *_: (_ for _ in ()).throw(StopInterrupt()))
    with pytest.raises(StopInterrupt):
        row.step(0, out)


def test_an_environment_that_is_another_one_here_is_refused() -> None:
    env = dataclasses.replace(read_env_spec("CartPole-v1", {}, None), observation_size=9)
    with pytest.raises(EnvironmentFault, match="has observations of 4 numbers here, not 9"):
        RestorableEnv(env, 0).reset(0, 0, np.zeros(9, np.float32))


WILD = """
import os, sys
import numpy as np
import gymnasium
import fakes
if sys.argv[1] == "ours":
    from rlflame.rollout.envs.gymnasium_env import RestorableEnv
    from rlflame.rollout.envs.make import read_env_spec
    env = read_env_spec("fakes:UnstableHopper-v0", {}, None, ("fakes",))
    row, out = RestorableEnv(env, 0), np.zeros(11, np.float32)
    row.reset(0, 0, out)
    for _ in range(6):
        row.step(np.zeros(3, np.float32), out)
else:
    env = gymnasium.make("fakes:UnstableHopper-v0")
    env.reset(seed=0)
    for _ in range(6):
        env.step(np.zeros(3, np.float32))
"""


MADE = """
import sys
import gymnasium
from rlflame.rollout.envs.make import read_env_spec
if sys.argv[1] == "ours":
    read_env_spec("HalfCheetah-v5", {}, None)
else:
    gymnasium.make("HalfCheetah-v5")
"""


@pytest.mark.parametrize("whose", ["ours", "plain"])
def test_what_mujoco_says_of_a_model_reaches_nobody(whose: str, tmp_path: Path) -> None:
    """Loading this model prints a warning about an old attribute, as `plain` checks."""
    result = subprocess.run(
        [sys.executable, "-c", MADE, whose],
        cwd=tmp_path,
        capture_output=True,
        timeout=60,
        check=True,
    )
    warned = (tmp_path / "MUJOCO_LOG.TXT").exists() or result.stdout + result.stderr
    if whose == "plain" and not warned:
        pytest.skip("this version of MuJoCo has nothing to say of it")
    assert bool(warned) == (whose == "plain")


@pytest.mark.parametrize("whose", ["ours", "plain"])
def test_a_simulation_that_flies_apart_prints_nothing_and_leaves_no_log(
    whose: str, tmp_path: Path
) -> None:
    """`plain` checks that there is output to silence."""
    result = subprocess.run(
        [sys.executable, "-c", WILD, whose],
        cwd=tmp_path,
        env={**os.environ, "PYTHONWARNINGS": "default"},
        capture_output=True,
        timeout=60,
        check=True,
    )
    seen = (result.stdout + result.stderr).decode()
    logged = (tmp_path / "MUJOCO_LOG.TXT").exists()
    if whose == "ours":
        assert not seen
        assert not logged
    else:
        assert "unstable" in seen
        assert logged


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"observes": "nothing"}, r"observations in Box\(.*\(0,\)"),
        ({"acts": "nothing"}, r"actions in Box\(.*\(0,\)"),
    ],
)
def test_a_space_without_numbers_is_refused_by_name(options: Any, words: str) -> None:
    with pytest.raises(UnsupportedSpace, match=words):
        read_env_spec("fakes:Odd-v0", options, None, ("fakes",))


def test_spaces_are_described_as_the_policy_needs_them(capfd: Any) -> None:
    env = read_env_spec("fakes:Odd-v0", {"acts": "shifted", "says": "hello"}, 7, ("fakes",))
    assert (env.observation_size, env.action_kind, env.action_size) == (6, "discrete", 3)
    assert (env.action_start, env.max_episode_steps) == (5, 7)
    matrix = read_env_spec("fakes:Odd-v0", {"acts": "matrix"}, None, ("fakes",))
    assert (matrix.action_kind, matrix.action_size) == ("continuous", 6)
    assert (matrix.action_low, matrix.action_high) == ((-1.0,) * 6, (1.0,) * 6)
    free = read_env_spec("fakes:Odd-v0", {"acts": "unbounded"}, None, ("fakes",))
    assert free.action_low == (-np.inf, -np.inf)
    assert capfd.readouterr().out == ""


def test_actions_reach_the_environment_in_the_shape_and_numbering_of_its_space() -> None:
    out = np.zeros(6, np.float32)
    row = opened(read_env_spec("fakes:Odd-v0", {"acts": "shifted"}, None, ("fakes",)))
    row.step(np.int64(2), out)
    assert row._env.unwrapped.got == [7]
    assert out.tolist() == [7.0] * 6
    row = opened(read_env_spec("fakes:Odd-v0", {"acts": "matrix"}, None, ("fakes",)))
    row.step(np.arange(6, dtype=np.float32) / 10, out)
    assert row._env.unwrapped.got[0].shape == (2, 3)
    np.testing.assert_allclose(out, 1.5, rtol=1e-6)


@pytest.mark.parametrize("acts", ["plain", "shifted", "narrow", "matrix"])
def test_a_restored_episode_repeats_actions_of_the_same_types(acts: str) -> None:
    """Environments may even change their actions, without an effect on the saved ones."""
    env = read_env_spec("fakes:Odd-v0", {"acts": acts}, None, ("fakes",))
    out, row, restored = np.zeros(6, np.float32), opened(env), opened(env)
    is_matrix = acts == "matrix"
    for number in range(3):
        row.step(np.full(6, number / 4, np.float32) if is_matrix else np.int64(number), out)
    state = row.snapshot(out)
    before = state.actions.tobytes()
    restored.restore(state, out)
    first, second = row._env.unwrapped.got, restored._env.unwrapped.got
    space = row._env.action_space
    assert all(space.contains(action) and action.dtype == space.dtype for action in first)
    assert [*map(repr, first)] == [*map(repr, second)]
    if is_matrix:
        for action in second:
            action += 1
    assert state.actions.tobytes() == before


def test_kwargs_mean_the_same_before_and_after_they_travelled() -> None:
    here = read_env_spec("Hopper-v5", {"healthy_z_range": [0.7, 2.0]}, None)
    travelled = wire.decode(wire.encode(here))
    for spec in (here, travelled):
        world = make_env(spec).unwrapped
        assert world._healthy_z_range == [0.7, 2.0]


def test_closing_twice_and_an_environment_that_cannot_even_close_are_fine() -> None:
    row = opened(rollouts.fake())
    row._env.unwrapped.close = lambda: 1 / 0
    row.close()
    row.close()


@pytest.mark.parametrize(("limit", "length"), [(5, 5), (None, 200)])
def test_a_time_limit_counts_as_gymnasiums_wrapper_does(limit: int | None, length: int) -> None:
    spec = read_env_spec("Pendulum-v1", {}, limit)
    theirs = gymnasium.make("Pendulum-v1", max_episode_steps=limit)
    row, seen = RestorableEnv(spec, 0), np.zeros(3, np.float32)
    for episode in range(2):
        row.reset(episode, 7 + episode, seen)
        theirs.reset(seed=7 + episode)
        action = np.array([0.3], np.float32)
        ends = []
        for _ in range(length):
            observation, reward, terminal, limited, _ = theirs.step(action)
            assert row.step(action, seen) == (reward, terminal, limited)
            assert seen.tobytes() == observation.tobytes()
            ends.append(limited)
        assert ends == [False] * (length - 1) + [True]
