"""rlflame's MuJoCo loop is identical to Gymnasium's, or is not used.

The expected values come from `gymnasium.make`, or from a run in which Gymnasium steps.
"""

from __future__ import annotations

import dataclasses
import inspect
import subprocess
import sys
from typing import Any

import gymnasium
import numpy as np
import pytest
import rollouts
from gymnasium.envs.mujoco.hopper_v5 import HopperEnv
from test_trainer_same_bits import Diary, run, saved, scenario

from rlflame.fleet.inline import InlineFleet
from rlflame.rollout import wire
from rlflame.rollout.envs.gymnasium_env import GymnasiumVectorEnv
from rlflame.rollout.envs.make import read_env_spec
from rlflame.rollout.envs.vector_env import describe_stepping, make_vector_env
from rlflame.rollout.mujoco import known_spaces, mujoco_env
from rlflame.rollout.seeding import Role, make_reset_seed, make_reset_seeds
from rlflame.rollout.task import EnvironmentFault, EnvSpec, Fragment, RolloutFailure
from rlflame.rollout.worker import RolloutWorker

WRITTEN = [name for name in rollouts.MUJOCO if name != "HumanoidStandup-v5"]
INFINITY = float("inf")
#: All arguments that rlflame's loop supports, with values other than the default.
ARGUMENTS: dict[str, list[dict[str, Any]]] = {
    "Hopper-v5": [
        {"terminate_when_unhealthy": False, "exclude_current_positions_from_observation": False},
        {"frame_skip": 3, "forward_reward_weight": 2, "ctrl_cost_weight": 0.7},
        {"healthy_reward": 3, "healthy_state_range": (-1.5, 2.0), "reset_noise_scale": 0.1},
        {"healthy_z_range": (1.2, 1.3), "healthy_angle_range": (-0.02, INFINITY)},
        {"healthy_state_range": (-0.05, 100), "healthy_angle_range": (-0.2, 0.01)},
    ],
    "HalfCheetah-v5": [
        {"frame_skip": 2, "forward_reward_weight": 0.3, "ctrl_cost_weight": 3},
        {"reset_noise_scale": 0.9, "exclude_current_positions_from_observation": False},
    ],
    "Walker2d-v5": [
        {"healthy_z_range": (1.0, 1.3), "healthy_angle_range": (-0.1, 0.1), "healthy_reward": -2},
        {"terminate_when_unhealthy": False, "exclude_current_positions_from_observation": False},
        {
            "frame_skip": 1,
            "forward_reward_weight": 0,
            "ctrl_cost_weight": 1,
            "reset_noise_scale": 0.4,
        },
    ],
    "Ant-v5": [
        {"include_cfrc_ext_in_observation": False, "contact_cost_weight": 0.3},
        {"contact_force_range": (-0.01, 0.0), "main_body": 3, "frame_skip": 2},
        {"main_body": "front_left_leg", "exclude_current_positions_from_observation": False},
        {"healthy_z_range": (0.5, 0.8), "healthy_reward": 0.1, "reset_noise_scale": 0},
        {"terminate_when_unhealthy": False, "ctrl_cost_weight": 1, "forward_reward_weight": 1.5},
    ],
    "Swimmer-v5": [
        {"frame_skip": 7, "forward_reward_weight": 5, "ctrl_cost_weight": 0.5},
        {"reset_noise_scale": 1.0, "exclude_current_positions_from_observation": False},
    ],
    "Humanoid-v5": [
        {"include_cinert_in_observation": False, "contact_cost_range": (0.002, 0.01)},
        {"include_cvel_in_observation": False, "include_cfrc_ext_in_observation": False},
        {"include_qfrc_actuator_in_observation": False, "contact_cost_weight": 1e-3},
        {"healthy_z_range": (1.3, 1.5), "terminate_when_unhealthy": False, "frame_skip": 2},
        {"forward_reward_weight": 1, "healthy_reward": 2, "ctrl_cost_weight": 1},
        {"exclude_current_positions_from_observation": False, "reset_noise_scale": 0.1},
    ],
    "Reacher-v5": [{"reward_dist_weight": 3, "reward_control_weight": 0.2, "frame_skip": 5}],
    "Pusher-v5": [
        {"reward_near_weight": 2, "reward_dist_weight": 0.3, "reward_control_weight": 1},
        {"frame_skip": 1},
    ],
    "InvertedPendulum-v5": [{"reset_noise_scale": 0.15, "frame_skip": 4}],
    "InvertedDoublePendulum-v5": [{"healthy_reward": 1, "reset_noise_scale": 0.4, "frame_skip": 1}],
}


class Ours:
    """rlflame's loop and Gymnasium's environments, stepped with equal actions."""

    def __init__(self, env: EnvSpec, count: int = 3) -> None:
        self.env = env
        self.rows = make_vector_env(env, count)
        assert isinstance(self.rows, mujoco_env.MujocoVectorEnv)
        self.seen = np.zeros((count, env.observation_size), np.float32)
        self.worlds = []
        for row in range(count):
            options = {"max_episode_steps": env.max_episode_steps} if env.max_episode_steps else {}
            self.worlds.append(gymnasium.make(env.id, **env.kwargs, **options))
            self.begin(row, 0)

    def begin(self, row: int, episode: int) -> None:
        if row == 0:  # rows 0 and 1 have prepared resets, and row 2 has not
            keys = [(0, row, episode + n) for row in (0, 1) for n in range(2)]
            self.rows.prepare_resets(make_reset_seeds(7, Role.RESET, keys))
        seed = make_reset_seed(7, Role.RESET, 0, row, episode)
        self.rows.reset_row(row, episode, seed, self.seen[row])
        self.compare(row, self.worlds[row].reset(seed=seed)[0])

    def step(self, actions: Any) -> tuple[int, int]:
        """Step all rows. Return how many the environment and the time limit have ended."""
        n = len(self.worlds)
        # The flags of rows that have ended are written whatever is in the buffers.
        rewards, terminated, truncated = np.zeros(n), np.ones(n, bool), np.ones(n, bool)
        ended = self.rows.step(range(n), actions, self.seen, rewards, terminated, truncated)
        expected = []
        for row, world in enumerate(self.worlds):
            observation, reward, terminal, limited, _ = world.step(actions[row])
            self.compare(row, observation)
            assert rewards[row].tobytes() == np.float64(reward).tobytes()
            if terminal or limited:
                expected.append(row)
                assert terminated[row] == terminal
                assert truncated[row] == (limited and not terminal)
        assert list(ended) == expected
        for row in expected:
            self.begin(row, self.rows.get_position(row).episode + 1)
        return int(terminated[expected].sum()), int(truncated[expected].sum())

    def compare(self, row: int, observation: Any) -> None:
        assert self.seen[row].tobytes() == observation.astype(np.float32).tobytes()


def follow(env: EnvSpec, steps: int) -> tuple[int, int]:
    """Compare random steps. Return the numbers of terminations and truncations."""
    ours, generator = Ours(env), np.random.default_rng(5)
    low, high = np.array(env.action_low), np.array(env.action_high)
    shape = (steps, 3, env.action_size)
    # Some actions are out of bounds: MuJoCo clips them, but the rewards use the original ones.
    actions = generator.uniform(1.2 * low, 1.2 * high, shape).astype(np.float32)
    ends = np.sum([ours.step(each) for each in actions], axis=0)
    return int(ends[0]), int(ends[1])


@pytest.mark.parametrize("name", WRITTEN)
def test_thousands_of_steps_have_gymnasiums_bits(name: str) -> None:
    limit = {"Reacher-v5": None, "Pusher-v5": None}.get(name, 150)
    steps = 400 if name in ("Ant-v5", "Humanoid-v5") else 700
    terminated, truncated = follow(read_env_spec(name, {}, limit), steps)
    never = name in ("HalfCheetah-v5", "Swimmer-v5", "Reacher-v5", "Pusher-v5")
    assert (terminated == 0) == never
    assert truncated > 0 or name not in ("Ant-v5", "HalfCheetah-v5", "Reacher-v5", "Swimmer-v5")


@pytest.mark.parametrize("name", WRITTEN)
def test_every_argument_has_gymnasiums_bits(name: str) -> None:
    for kwargs in ARGUMENTS[name]:
        assert follow(read_env_spec(name, kwargs, 9), 40) != (0, 0), kwargs


def test_every_argument_of_gymnasiums_was_tried() -> None:
    """All arguments except rendering and the model, which rlflame's loop refuses."""
    drawn = {"self", "kwargs", "default_camera_config", "xml_file"}
    for name in WRITTEN:
        world = gymnasium.make(name).unwrapped
        names = inspect.signature(type(world).__init__).parameters.keys() - drawn
        tried = {argument for kwargs in ARGUMENTS[name] for argument in kwargs}
        assert names == tried, name


def test_only_the_starts_of_the_latest_request_are_kept() -> None:
    rows: Any = make_vector_env(read_env_spec("Hopper-v5", {}, None), 2)
    rows.prepare_resets([1, 2, 3])
    kept = rows._starts[2]
    rows.prepare_resets([2, 4])
    assert rows._starts.keys() == {2, 4}
    assert rows._starts[2] is kept  # and not computed twice
    rows.reset_row(1, 0, 2, np.zeros(rows.spec.observation_size, np.float32))
    assert rows._starts.keys() == {4}


def test_a_failure_is_that_of_the_episode_which_starts_with_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows: Any = make_vector_env(read_env_spec("Hopper-v5", {}, None), 2)
    draw_start, out = rows._task.draw_start, np.zeros(11, np.float32)

    def fail_at_negative(generator: np.random.Generator) -> Any:
        qpos, qvel = draw_start(generator)
        assert qpos[0] > 0
        return qpos, qvel

    monkeypatch.setattr(rows._task, "draw_start", fail_at_negative)
    first = {seed: np.random.default_rng(seed).uniform(-1, 1) > 0 for seed in range(20)}
    bad = next(seed for seed, is_positive in first.items() if not is_positive)
    good = next(seed for seed, is_positive in first.items() if is_positive)
    rows.prepare_resets([bad, good])
    rows.reset_row(0, 0, good, out)
    with pytest.raises(EnvironmentFault, match="failed in reset: AssertionError") as fault:
        rows.reset_row(1, 3, bad, out)
    assert (fault.value.row, fault.value.seed, rows.current_row) == (1, bad, 1)


def test_ctrl_c_while_resets_are_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    rows: Any = make_vector_env(read_env_spec("Hopper-v5", {}, None), 2)
    rows.prepare_resets([1])

    def interrupt(generator: np.random.Generator) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(rows._task, "draw_start", interrupt)
    with pytest.raises(KeyboardInterrupt):
        rows.prepare_resets([1, 2])
    assert rows._starts.keys() == {1}


@pytest.mark.parametrize("unit", ["steps", "episodes"])
def test_the_start_of_each_episode_of_a_task_is_prepared(
    unit: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = {"prepared": 0, "unprepared": 0}
    compute, prepare = (getattr(mujoco_env.MujocoVectorEnv, name)
                        for name in ("_compute_starts", "prepare_resets"))  # fmt: skip

    def count_starts(self: Any, seeds: Any) -> Any:
        counts["unprepared"] += len(seeds)
        return compute(self, seeds)

    def count_prepared(self: Any, seeds: Any) -> None:
        before = counts["unprepared"]
        prepare(self, seeds)
        counts["prepared"] += counts["unprepared"] - before
        counts["unprepared"] = before

    monkeypatch.setattr(mujoco_env.MujocoVectorEnv, "_compute_starts", count_starts)
    monkeypatch.setattr(mujoco_env.MujocoVectorEnv, "prepare_resets", count_prepared)
    env = read_env_spec("Hopper-v5", {}, 11)
    task, worker = rollouts.task(env, rows=5, steps=30, unit=unit), RolloutWorker()
    first = rollouts.run(task, worker)
    second = rollouts.run(rollouts.following(task, first), worker)
    ended = len(first.episodes) + len(second.episodes)
    assert counts["unprepared"] == 0
    # Steps begin with restored episodes, and end with one start of each row ahead.
    extra = (0, 0) if unit == "episodes" else (5, 10)
    assert ended + extra[0] <= counts["prepared"] <= ended + extra[1]
    assert ended > (9 if unit == "episodes" else 20)


@pytest.mark.parametrize("name", ["Hopper-v5", "Walker2d-v5", "Ant-v5"])
def test_health_is_what_gymnasium_calls_healthy_wherever_the_body_may_be(name: str) -> None:
    """The positions include some that random steps never reach, and each bound alone."""
    wide = {"healthy_state_range": (-0.9, 1.1)} if name == "Hopper-v5" else {}
    angle = {} if name == "Ant-v5" else {"healthy_angle_range": (-2, 1.0)}
    env = read_env_spec(name, {"healthy_z_range": (-0.5, 0.5), **wide, **angle}, None)
    rows, generator = make_vector_env(env, 400), np.random.default_rng(3)
    world: Any = gymnasium.make(name, **env.kwargs).unwrapped
    bodies = rows._simulation  # type: ignore[attr-defined]
    shape = (400, world.model.nq + world.model.nv)
    state = generator.uniform(-0.2, 0.2, shape)
    expected = []
    for row, line in enumerate(state):
        line[generator.integers(len(line))] = generator.choice([-1.5, -0.5, 0.5, 1.05, 1.5, np.nan])
        bodies.reset_row(row, bodies.compute_start(*np.split(line, [world.model.nq])))
        world.data.qpos[:], world.data.qvel[:] = np.split(line, [world.model.nq])
        expected.append(bool(world.is_healthy))
    earned = np.zeros(400)
    ended = rows._task._add_healthy_rewards(earned)  # type: ignore[attr-defined]
    assert list(earned == 1.0) == expected == list(~ended)
    assert 20 < sum(expected) < 380


def test_an_id_of_the_users_own_for_a_known_class_is_known() -> None:
    gymnasium.register(
        "Slippery-v0",
        entry_point="gymnasium.envs.mujoco.hopper_v5:HopperEnv",
        max_episode_steps=8,
        kwargs={"reset_noise_scale": 0.2},
    )
    assert follow(read_env_spec("Slippery-v0", {}, None), 40)[1] > 0


class Wrapped(gymnasium.Wrapper[Any, Any, Any, Any]):
    """A wrapper without an effect, which rlflame cannot know."""


class Child(HopperEnv):
    """A subclass of Hopper without changes."""


gymnasium.register("Child-v0", entry_point=f"{__name__}:Child")
gymnasium.register(
    "Wrapped-v0",
    entry_point="gymnasium.envs.mujoco.hopper_v5:HopperEnv",
    additional_wrappers=(gymnasium.envs.registration.WrapperSpec("W", f"{__name__}:Wrapped", {}),),
)


@pytest.mark.parametrize(
    ("id", "kwargs"),
    [
        ("CartPole-v1", {}),
        ("Child-v0", {}),
        ("fakes:Fake-v0", {}),
        ("Wrapped-v0", {}),
        ("HumanoidStandup-v5", {}),
        ("Hopper-v5", {"xml_file": "walker2d_v5.xml"}),
        ("Hopper-v5", {"healthy_reward": True}),
        ("Hopper-v5", {"healthy_reward": 2**60}),
        ("Hopper-v5", {"healthy_z_range": (0.7,)}),
        ("Hopper-v5", {"terminate_when_unhealthy": 1}),
        ("Hopper-v5", {"weight": 1}),
    ],
)
def test_what_is_not_known_is_left_to_gymnasium(id: str, kwargs: Any) -> None:
    """The spec is made by hand, because these environments cannot be made."""
    spec = dataclasses.replace(read_env_spec("Hopper-v5", {}, None), id=id, kwargs=kwargs)
    assert describe_stepping(spec) == "stepped by Gymnasium"
    assert isinstance(make_vector_env(spec, 2), GymnasiumVectorEnv)


@pytest.mark.parametrize(
    "module",
    [
        "gymnasium.wrappers.common",
        "gymnasium.envs.mujoco.mujoco_env",
        "gymnasium.envs.mujoco.hopper_v5",
    ],
)
def test_another_gymnasium_steps_itself(module: str, monkeypatch: Any, tmp_path: Any) -> None:
    find_file, changed = known_spaces._find_file, tmp_path / "changed.py"
    changed.write_bytes(find_file(module).read_bytes() + b"\n")
    hopper = read_env_spec("Hopper-v5", {}, None)
    assert describe_stepping(hopper) == "stepped by rlflame's own MuJoCo loop"
    assert known_spaces.find_unverified_version("Hopper-v5") is None
    known_spaces.is_verified.cache_clear()
    with monkeypatch.context() as patched:
        patched.setattr(
            known_spaces, "_find_file", lambda m: changed if m == module else find_file(m)
        )
        assert describe_stepping(hopper) == "stepped by Gymnasium"
        assert known_spaces.find_unverified_version("Hopper-v5") == gymnasium.__version__
        known_spaces.is_verified.cache_clear()


def test_a_class_that_was_changed_while_running_is_left_to_gymnasium(monkeypatch: Any) -> None:
    def control_cost(self: Any, action: Any) -> float:
        return 0.0

    monkeypatch.setattr(HopperEnv, "control_cost", control_cost)
    assert describe_stepping(read_env_spec("Hopper-v5", {}, None)) == "stepped by Gymnasium"


@pytest.mark.parametrize("name", ["Hopper-v5", "HalfCheetah-v5", "InvertedDoublePendulum-v5"])
def test_an_older_mujoco_steps_bodies_one_by_one_to_the_same_bits(
    name: str, monkeypatch: Any
) -> None:
    """Without `mujoco.batch`, states are exchanged with the batch version both ways."""
    env = read_env_spec(name, {}, 60)
    task = rollouts.task(env, rows=5, first_row=2, steps=30)
    together = RolloutWorker()
    expected = rollouts.run(task, together)
    assert isinstance(expected, Fragment)
    with monkeypatch.context() as older:
        older.setitem(sys.modules, "mujoco.batch", None)
        follow(read_env_spec(name, {}, 9), 40)
        apart = RolloutWorker()
        assert wire.encode(rollouts.run(task, apart)) == wire.encode(expected)
        following = rollouts.following(task, expected)
        ended = wire.encode(rollouts.run(following, apart))
        assert wire.encode(rollouts.run(following, RolloutWorker())) == ended
    for worker in (together, RolloutWorker()):
        assert wire.encode(rollouts.run(following, worker)) == ended


def by_gymnasium() -> RolloutWorker:
    return RolloutWorker(GymnasiumVectorEnv)


@pytest.mark.parametrize("name", ["Hopper-v5", "Ant-v5", "Humanoid-v5", "InvertedPendulum-v5"])
@pytest.mark.parametrize("unit", ["steps", "episodes"])
def test_a_fragment_does_not_tell_who_stepped(name: str, unit: Any) -> None:
    """Idle rows and states of the other implementation do not change this."""
    env = read_env_spec(name, {}, 11 if unit == "steps" else 60)
    task = rollouts.task(env, rows=5, first_row=2, steps=30, unit=unit)
    workers = (RolloutWorker(), by_gymnasium())
    ours, theirs = (rollouts.run(task, worker) for worker in workers)
    assert isinstance(ours, Fragment)
    assert wire.encode(ours) == wire.encode(theirs)
    if unit == "episodes":
        assert len(set(ours.lengths)) > 1 or name == "Ant-v5"
        return
    following = rollouts.following(task, ours)
    expected = wire.encode(rollouts.run(following, by_gymnasium()))
    for worker in (*workers, RolloutWorker()):
        assert wire.encode(rollouts.run(following, worker)) == expected


@pytest.mark.parametrize(
    ("name", "kwargs", "words"),
    [
        ("Hopper-v5", {"healthy_reward": INFINITY}, "returned the reward inf"),
        ("Hopper-v5", {"healthy_reward": 1e308}, "rewards that add up to infinity"),
        ("HalfCheetah-v5", {"reset_noise_scale": 1e39}, "a number too large for float32"),
        ("HalfCheetah-v5", {"reset_noise_scale": INFINITY}, "failed in reset: OverflowError"),
        ("HalfCheetah-v5", {"forward_reward_weight": float("nan")}, "returned the reward nan"),
        ("Hopper-v5", {"weight": 1}, "failed in reset: TypeError"),
    ],
)
def test_faults_have_the_same_messages(name: str, kwargs: Any, words: str) -> None:
    env = dataclasses.replace(read_env_spec(name, {}, 20), kwargs=kwargs)
    task = rollouts.task(env, slot=2, rows=3)
    with np.errstate(all="ignore"):
        ours, theirs = (rollouts.run(task, worker) for worker in (RolloutWorker(), by_gymnasium()))
    assert isinstance(ours, RolloutFailure)
    assert words in ours.message
    assert dataclasses.replace(ours, traceback="") == dataclasses.replace(theirs, traceback="")


@pytest.mark.parametrize("env", ["Hopper-v5", "Ant-v5"])
def test_both_workers_give_equal_bits_even_when_they_alternate(env: str, tmp_path: Any) -> None:
    recipe = scenario(env, slots=2)

    def stepped(by: RolloutWorker, **how: Any) -> Any:
        with InlineFleet() as fleet:
            fleet._worker = by
            begun, trainer = run(recipe, fleet, diary, **how)
        return saved(begun, trainer, tmp_path / "run.safetensors")

    diary = Diary()
    expected, lines = stepped(by_gymnasium()).digest, diary.lines
    diary = Diary()
    assert (stepped(RolloutWorker()).digest, diary.lines) == (expected, lines)
    for first, second in ((RolloutWorker, by_gymnasium), (by_gymnasium, RolloutWorker)):
        diary = Diary()
        half = stepped(first(), stop_after=2)
        assert (stepped(second(), start=half).digest, diary.lines) == (expected, lines)


def test_mujoco_is_not_imported_for_an_environment_without_it() -> None:
    script = (
        "import sys, numpy as np\n"
        "from rlflame.rollout.envs.make import read_env_spec\n"
        "from rlflame.rollout.envs.vector_env import make_vector_env\n"
        "rows = make_vector_env(read_env_spec('CartPole-v1', {}, None), 1)\n"
        "rows.reset_row(0, 0, 1, np.zeros(4, np.float32))\n"
        "print('mujoco' in sys.modules, 'rlflame.rollout.mujoco.mujoco_env' in sys.modules)"
    )
    command = [sys.executable, "-c", script]
    child = subprocess.run(command, capture_output=True, text=True, check=True)
    assert child.stdout.split() == ["False", "False"]
