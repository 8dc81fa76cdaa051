"""A rollout task is a pure function, and equals Gymnasium's steps."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from typing import Any

import gymnasium
import numpy as np
import pytest
import rollouts

from rlflame.rollout import wire
from rlflame.rollout.distributions import draw_noise
from rlflame.rollout.envs.make import read_env_spec
from rlflame.rollout.policy import Policy
from rlflame.rollout.seeding import Role, make_reset_seed, make_stream
from rlflame.rollout.task import EnvSpec, Fragment, RolloutFailure, RolloutTask
from rlflame.rollout.worker import RolloutWorker

HOPPER = read_env_spec("Hopper-v5", {}, 12)
CARTPOLE = read_env_spec("CartPole-v1", {}, None)
PENDULUM = read_env_spec("Pendulum-v1", {}, 10)
WALKER = read_env_spec("BipedalWalker-v3", {}, 9)
FAKE = rollouts.fake(length=5, continuous=True)
ENVS = {"hopper": HOPPER, "cartpole": CARTPOLE, "pendulum": PENDULUM, "bipedal": WALKER}
ENVS["fake"] = FAKE


def tasks_in_a_row(env: EnvSpec, count: int = 4, **changes: Any) -> list[RolloutTask]:
    """A slot's first tasks. Each continues where the previous one ended."""
    task = rollouts.task(env, **changes)
    tasks, worker = [task], RolloutWorker()
    while len(tasks) < count:
        tasks.append(rollouts.following(tasks[-1], rollouts.run(tasks[-1], worker)))
    return tasks


def answer(task: RolloutTask, worker: RolloutWorker | None = None) -> bytes:
    return wire.encode(rollouts.run(task, worker))


@pytest.mark.parametrize("name", ENVS)
def test_caches_other_tasks_and_repetition_do_not_change_a_byte(name: str) -> None:
    env = ENVS[name]
    tasks = tasks_in_a_row(env, policy=rollouts.policy_spec(env, width=8))
    others = [
        rollouts.task(env, slot=5, seed=9, steps=7),
        rollouts.task(env, slot=0, run="another run", steps=7),
        rollouts.task(env, slot=0, unit="episodes", steps=30),
        rollouts.task(CARTPOLE, slot=0, run="another run", steps=3),
    ]
    cold = [answer(task) for task in tasks]

    warm = RolloutWorker()
    assert [answer(task, warm) for task in tasks] == cold

    busy, found = RolloutWorker(), []
    for turn, task in enumerate(tasks):
        answer(others[turn % len(others)], busy)
        found.append(answer(task, busy))
        assert answer(task, busy) == found[-1]  # once more, with environments in another state
    assert found == cold

    backwards = RolloutWorker()
    assert [answer(task, backwards) for task in reversed(tasks)] == cold[::-1]


@pytest.mark.parametrize("name", ["hopper", "bipedal"])
def test_another_process_comes_to_the_same_bytes(name: str) -> None:
    task = tasks_in_a_row(ENVS[name], count=2)[-1]
    script = (
        "import sys, rollouts; from rlflame.rollout import wire;"
        "task = wire.decode(sys.stdin.buffer.read());"
        "sys.stdout.buffer.write(wire.encode(rollouts.run(task)))"
    )
    result = subprocess.run(
        [sys.executable, "-c", script],
        input=wire.encode(task),
        env={**os.environ, "PYTHONHASHSEED": "5", "TZ": "Asia/Tokyo"},
        capture_output=True,
        timeout=60,
        check=True,
    )
    assert result.stdout == answer(task)


def test_global_random_state_is_neither_read_nor_written() -> None:
    import random

    task = rollouts.task(HOPPER)
    expected = answer(task)
    np.random.seed(3)
    random.seed(3)
    before = np.random.get_state()[1].tolist(), random.getstate()
    assert answer(task) == expected
    assert (np.random.get_state()[1].tolist(), random.getstate()) == before


def replayed(task: RolloutTask, fragment: Fragment, row: int) -> None:
    """Repeat the fragment's actions in a plain Gymnasium loop and compare results.

    The task must be the first task of a slot, because the loop begins with the reset of episode 0.
    """
    env, whole = task.env, task.unit == "episodes"
    options = {**env.kwargs}
    if env.max_episode_steps is not None:
        options["max_episode_steps"] = env.max_episode_steps
    hidden = {
        (int(t), int(r)): fragment.boundary_observations[i]
        for i, (t, r) in enumerate(fragment.boundary_index)
    }
    stats = [episode for episode in fragment.episodes if episode.row == row]
    first = task.iteration if whole else 0
    episode, total, length = first, 0.0, 0

    def begin(number: int) -> tuple[Any, Any]:
        world = gymnasium.make(env.id, **options)
        seed = make_reset_seed(task.seed, Role.RESET, task.slot, row, number)
        return world, world.reset(seed=seed)[0]

    world, seen = begin(episode)
    ended_at = []
    steps = int(fragment.lengths[row])
    assert steps == (len(fragment.rewards) if not whole else steps)
    for t in range(steps):
        np.testing.assert_array_equal(fragment.observations[t, row], np.float32(seen).ravel())
        action = fragment.actions[t, row]
        if env.action_kind == "continuous":
            given: Any = np.clip(action, np.float32(env.action_low), np.float32(env.action_high))
        else:
            given = int(action)
        seen, reward, terminated, truncated, _ = world.step(given)
        assert fragment.rewards[t, row] == reward
        total, length = total + float(reward), length + 1
        capped = whole and t == task.steps - 1
        assert fragment.terminated[t, row] == terminated
        assert fragment.truncated[t, row] == ((truncated or capped) and not terminated)
        cut = bool(fragment.truncated[t, row])
        assert ((t, row) in hidden) == cut
        if cut:
            np.testing.assert_array_equal(hidden[t, row], np.float32(seen).ravel())
        if terminated or truncated or capped:
            ended_at.append((episode, total, length, cut, t))
            if not whole:
                episode, total, length = episode + 1, 0.0, 0
                world, seen = begin(episode)
    np.testing.assert_array_equal(fragment.last_observations[row], np.float32(seen).ravel())
    told = [(e.episode, e.episode_return, e.length, e.truncated, e.end) for e in stats]
    assert told == ended_at


@pytest.mark.parametrize("unit", ["steps", "episodes"])
@pytest.mark.parametrize("name", ENVS)
def test_a_fragment_tells_what_gymnasium_did(name: str, unit: str) -> None:
    task = rollouts.task(ENVS[name], slot=2, seed=4, rows=3, steps=40, unit=unit)
    fragment = rollouts.run(task)
    for row in range(3):
        replayed(task, fragment, row)


def test_both_kinds_of_end_occurred_above() -> None:
    ends = {}
    for name, env in ENVS.items():
        fragment = rollouts.run(rollouts.task(env, slot=2, seed=4, rows=3, steps=40))
        ends[name] = (bool(fragment.terminated.any()), bool(fragment.truncated.any()))
    assert ends["pendulum"] == (False, True)
    assert ends["fake"] == (True, False)
    assert ends["hopper"] == (True, True)


def test_an_end_at_the_time_limit_by_the_environment_itself_is_no_truncation() -> None:
    env = dataclasses.replace(rollouts.fake(length=5, continuous=True), max_episode_steps=5)
    fragment = rollouts.run(rollouts.task(env, steps=12, rows=1))
    assert fragment.terminated[:, 0].tolist() == [t in (4, 9) for t in range(12)]
    assert not fragment.truncated.any()
    assert len(fragment.boundary_index) == 0


@pytest.mark.parametrize("kind", ["continuous", "discrete"])
@pytest.mark.parametrize(("rows", "first"), [(8, 0), (3, 0), (3, 5), (1, 2)])
def test_every_pass_has_the_full_width_and_absent_rows_are_zero(
    kind: str, rows: int, first: int, monkeypatch: Any
) -> None:
    env = PENDULUM if kind == "continuous" else CARTPOLE
    seen: list[np.ndarray] = []
    forward = Policy.forward

    def watched(self: Policy, observations: Any) -> Any:
        seen.append(observations.copy())
        return forward(self, observations)

    monkeypatch.setattr(Policy, "forward", watched)
    task = rollouts.task(env, rows=rows, first_row=first, steps=9)
    fragment = rollouts.run(task)
    assert len(seen) == 9
    for t, full in enumerate(seen):
        assert full.shape == (8, env.observation_size)
        absent = np.ones(8, bool)
        absent[first : first + rows] = False
        assert not full[absent].any()
        assert full[~absent].tobytes() == fragment.observations[t].tobytes()


def test_actions_are_those_of_the_policy_with_the_row_s_own_stream() -> None:
    task = rollouts.task(HOPPER, slot=3, rows=2, first_row=4, steps=300)
    fragment = rollouts.run(task)
    policy = Policy(task.policy, rollouts.weights(task.policy))
    # Random numbers are drawn in blocks of 256 steps.
    streams = [make_stream(0, Role.ACTION, 3, row, 0) for row in range(2)]
    blocks = [
        np.concatenate([draw_noise(task.policy, "sample", generator, 256) for _ in range(2)])
        for generator in streams
    ]
    for t in range(300):
        full, noise = np.zeros((8, 11), np.float32), np.zeros((8, 3), np.float32)
        for row in range(2):
            full[4 + row], noise[4 + row] = fragment.observations[t, row], blocks[row][t]
        actions, log_probs = policy.sample(full, noise)
        assert actions[4:6].tobytes() == fragment.actions[t].tobytes()
        assert log_probs[4:6].tobytes() == fragment.log_probs[t].tobytes()


def test_a_slot_s_fragments_join_into_one_long_one() -> None:
    """Two tasks of 20 steps give the data of an uninterrupted environment.

    Their actions differ from those of one task of 40 steps, because the key of the random streams
    contains the iteration.
    """
    env = rollouts.fake(length=7)
    for row in range(2):
        world = gymnasium.make(env.id, **env.kwargs)
        episode = 0
        seen, _ = world.reset(seed=make_reset_seed(0, Role.RESET, 0, row, 0))
        for task in tasks_in_a_row(env, count=3, steps=20):
            fragment = rollouts.run(task)
            for t in range(20):
                assert np.array_equal(fragment.observations[t, row], np.float32(seen))
                action = int(fragment.actions[t, row])
                seen, reward, terminated, _, _ = world.step(action)
                assert fragment.rewards[t, row] == reward
                if terminated:
                    episode += 1
                    world = gymnasium.make(env.id, **env.kwargs)
                    seen, _ = world.reset(seed=make_reset_seed(0, Role.RESET, 0, row, episode))


def test_whole_episodes_leave_ended_rows_idle_and_stop_at_the_cap() -> None:
    task = rollouts.task(CARTPOLE, unit="episodes", rows=6, steps=25, acting="sample")
    fragment = rollouts.run(task)
    ends = {episode.row: episode for episode in fragment.episodes}
    assert sorted(ends) == list(range(6))
    assert len(set(fragment.lengths.tolist())) > 1
    assert len(fragment.rewards) == fragment.lengths.max() <= 25
    capped = 0
    for row, length in enumerate(fragment.lengths.tolist()):
        over = fragment.terminated[:, row] | fragment.truncated[:, row]
        assert np.flatnonzero(over).tolist() == [length - 1]
        assert not fragment.rewards[length:, row].any()
        assert (ends[row].length, ends[row].end) == (length, length - 1)
        capped += bool(fragment.truncated[length - 1, row])
        assert not fragment.truncated[length - 1, row] or length == 25
    assert 0 < capped < 6
    assert fragment.states == ()


def test_a_long_episode_outgrows_the_first_arrays_and_noise() -> None:
    """An episode of 700 steps is equal to tasks that do not grow their arrays."""
    env = rollouts.fake(length=700)
    long = rollouts.run(rollouts.task(env, unit="episodes", rows=1, steps=1000))
    assert long.lengths.tolist() == [700]
    wide = rollouts.run(rollouts.task(env, unit="steps", rows=1, steps=700))
    for name in ("observations", "actions", "log_probs", "rewards", "terminated"):
        assert getattr(long, name).tobytes() == getattr(wide, name).tobytes(), name


def evaluation(env: EnvSpec, episodes: int, **changes: Any) -> list[RolloutTask]:
    """Episode k is in row k mod 8 of group k div 8."""
    return [
        rollouts.task(
            env,
            slot=group,
            iteration=group,
            purpose="evaluate",
            unit="episodes",
            rows=min(8, episodes - 8 * group),
            **{"steps": 40, "acting": "best", "record": False, **changes},
        )
        for group in range(-(-episodes // 8))
    ]


def scores(tasks: list[RolloutTask]) -> dict[int, tuple[float, int]]:
    found = {}
    for task in tasks:
        for episode in rollouts.run(task).episodes:
            found[episode.episode] = (episode.episode_return, episode.length)
    return found


@pytest.mark.parametrize("acting", ["best", "sample"])
@pytest.mark.parametrize("name", ["hopper", "cartpole", "bipedal"])
def test_an_evaluation_s_episode_has_its_return_however_many_others_there_are(
    name: str, acting: str
) -> None:
    env = ENVS[name]
    expected = scores(evaluation(env, 12, acting=acting))
    assert sorted(expected) == list(range(12))
    assert len(set(expected.values())) > 2
    for count in (1, 5, 9):
        few = scores(evaluation(env, count, acting=acting))
        assert few == {k: expected[k] for k in range(count)}
    for k in (0, 3, 7, 11):
        (alone,) = evaluation(env, 1, acting=acting)
        alone = dataclasses.replace(alone, iteration=k // 8, first_row=k % 8)
        assert scores([alone]) == {k: expected[k]}
        recorded = rollouts.run(dataclasses.replace(alone, record=True))
        assert recorded.rewards.sum() == pytest.approx(expected[k][0], rel=1e-12)


def test_an_evaluation_without_noise_takes_the_best_action() -> None:
    (task,) = evaluation(PENDULUM, 1, record=True)
    fragment = rollouts.run(task)
    policy = Policy(task.policy, rollouts.weights(task.policy))
    for t in range(len(fragment.rewards)):
        full = np.zeros((8, 3), np.float32)
        full[0] = fragment.observations[t, 0]
        assert policy.mode(full)[0].tobytes() == fragment.actions[t, 0].tobytes()


def test_what_is_not_recorded_does_not_travel_and_changes_nothing_else() -> None:
    full = rollouts.run(rollouts.task(CARTPOLE, unit="episodes", rows=4, steps=50))
    light = rollouts.run(rollouts.task(CARTPOLE, unit="episodes", rows=4, steps=50, record=False))
    assert light.episodes == full.episodes
    assert light.lengths.tolist() == full.lengths.tolist()
    for name in ("observations", "actions", "log_probs", "rewards", "terminated", "truncated"):
        assert len(getattr(light, name)) == 0
    assert len(light.boundary_index) == 0


@pytest.mark.parametrize(
    "change",
    [
        {"seed": 1},
        {"slot": 1},
        {"iteration": 1},
        {"acting": "best"},
    ],
    ids=str,
)
def test_what_a_task_says_matters(change: dict[str, Any]) -> None:
    task = rollouts.task(HOPPER)
    mine, other = rollouts.run(task), rollouts.run(dataclasses.replace(task, **change))
    assert mine.actions.tobytes() != other.actions.tobytes()


def test_two_policies_of_equal_weights_and_different_shape_are_not_confused() -> None:
    worker = RolloutWorker()
    task = rollouts.task(HOPPER)
    relu = dataclasses.replace(task, policy=rollouts.policy_spec(HOPPER, activation="relu"))
    assert answer(task, worker) != answer(relu, worker) == answer(relu)


def test_two_environments_under_one_run_and_slot_are_not_confused() -> None:
    worker = RolloutWorker()
    for unit in ("steps", "episodes"):
        for weight in (1.0, 3.0):
            env = read_env_spec("Hopper-v5", {"forward_reward_weight": weight}, 15)
            task = rollouts.task(env, unit=unit)
            assert answer(task, worker) == answer(task)


def failed(**kwargs: Any) -> RolloutFailure:
    env = rollouts.fake(**kwargs)
    result = rollouts.run(rollouts.task(env, slot=4, iteration=0, rows=3, steps=30))
    assert isinstance(result, RolloutFailure)
    return result


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("raise", "failed in step: ValueError: the moon is wrong"),
        ("exit", "failed in step: SystemExit: gone fishing"),
        ("nan", "an observation with NaN, infinity or"),
        ("inf", "an observation with NaN, infinity or"),
        ("huge", "a number too large for float32"),
        ("nan_reward", "returned the reward nan"),
        ("shape", "returned an observation of shape (4,)"),
    ],
)
@pytest.mark.parametrize("at", [4, 10])  # 10 is the last step of an episode
@pytest.mark.filterwarnings("ignore:overflow")
def test_a_failure_names_its_row_seed_and_step(fault: str, words: str, at: int) -> None:
    seed = make_reset_seed(0, Role.RESET, 4, 1, 1)
    failure = failed(fault=fault, at=at, seed=seed)
    assert (failure.slot, failure.row, failure.seed, failure.step) == (4, 1, seed, at)
    assert words in failure.message
    assert ("in _raise" in failure.traceback) == (fault == "raise")


@pytest.mark.parametrize("fault", ["nan", "shape", "raise"])
def test_a_failure_in_the_reset_between_episodes_has_step_0(fault: str) -> None:
    seed = make_reset_seed(0, Role.RESET, 4, 2, 1)
    failure = failed(fault=fault, where="reset", seed=seed)
    assert (failure.row, failure.seed, failure.step) == (2, seed, 0)


def test_a_worker_goes_on_after_a_failure_as_if_nothing_had_happened() -> None:
    good = rollouts.task(rollouts.fake(length=5), steps=8)
    bad = rollouts.task(rollouts.fake(fault="raise"), steps=8)
    worker = RolloutWorker()
    expected = answer(good)
    assert answer(good, worker) == expected
    assert isinstance(rollouts.run(bad, worker), RolloutFailure)
    assert worker.position is None
    assert answer(good, worker) == expected


def test_a_task_that_was_broken_off_leaves_nothing_behind_that_could_be_believed() -> None:
    """Ctrl-C in the middle of a step removes the states from the cache."""
    tasks = tasks_in_a_row(HOPPER, count=2)
    worker = RolloutWorker()
    answer(tasks[0], worker)
    steps = 0

    def interrupted() -> Any:
        raise KeyboardInterrupt

    original = Policy.to_environment

    def to_environment(self: Policy, *args: Any) -> Any:
        nonlocal steps
        steps += 1
        return interrupted() if steps == 5 else original(self, *args)

    Policy.to_environment = to_environment  # type: ignore[method-assign]
    try:
        with pytest.raises(KeyboardInterrupt):
            answer(tasks[1], worker)
    finally:
        Policy.to_environment = original  # type: ignore[method-assign]
    assert answer(tasks[1], worker) == answer(tasks[1])


@pytest.mark.parametrize("env", [PENDULUM, CARTPOLE], ids=["continuous", "discrete"])
def test_weights_that_have_diverged_are_blamed_and_not_the_environment(env: EnvSpec) -> None:
    task = rollouts.task(env, slot=3)
    arrays = dict(rollouts.weights(task.policy))
    last = "actor.2.weight"
    arrays[last] = np.full_like(arrays[last], 3e38)
    with np.errstate(all="ignore"):
        result = RolloutWorker().run(task, lambda: arrays)
    assert isinstance(result, RolloutFailure)
    assert "the policy has diverged" in result.message
    assert result.slot == 3


def test_a_task_whose_states_are_too_few_is_refused() -> None:
    task = rollouts.task(CARTPOLE, rows=2)
    with pytest.raises(ValueError, match="zip"):
        rollouts.run(dataclasses.replace(task, states=task.states[:1]))


def test_environments_are_closed_when_they_are_forgotten() -> None:
    closed: list[int] = []
    worker = RolloutWorker()
    rollouts.run(rollouts.task(rollouts.fake(), rows=2), worker)
    for vector_env, _ in worker._slots.values():
        for row in vector_env._envs:  # type: ignore[attr-defined]
            row._env.unwrapped.close = lambda: closed.append(1)
    for slot in range(1, 70):
        rollouts.run(rollouts.task(rollouts.fake(), slot=slot, rows=1, steps=1), worker)
    assert len(closed) == 2
    assert len(worker._slots) <= 64
    worker.close()
    assert not worker._slots
