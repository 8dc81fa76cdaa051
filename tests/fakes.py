"""Environments with faults on demand, for tests: `fakes:Fake-v0` and some others.

A Fake is a small deterministic environment with a fault. `fault` selects the fault, `where` selects
`init`, `reset` or `step`, and `at` selects the step of an episode (counted from 1). `seed` limits
the fault to the episode that was reset with this seed.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces


class Surrender(BaseException):
    """An exception that `except Exception` does not catch."""


class Fake(gymnasium.Env):
    """Three numbers that change with the action. Episodes last `length` steps."""

    def __init__(
        self,
        fault: str = "",
        where: str = "step",
        at: int = 3,
        seed: int | None = None,
        marker: str = "",
        length: int = 10,
        continuous: bool = False,
    ) -> None:
        self.observation_space = spaces.Box(-np.inf, np.inf, (3,), np.float64)
        self.action_space = (
            spaces.Box(-1.0, 1.0, (2,), np.float32) if continuous else spaces.Discrete(2)
        )
        self._fault, self._where, self._at, self._seed = fault, where, at, seed
        self._marker = Path(marker)
        self._length = length
        self._now: int | None = None
        self._t = 0
        self._x = np.zeros(3)
        if where == "init":
            self._misbehave(self._x)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self._now, self._t = seed, 0
        self._x = self.np_random.standard_normal(3)
        shown = self._x.copy()
        if self._where == "reset" and self._due():
            shown = self._misbehave(shown)
            if self._fault == "alone":
                return shown
        return shown, {}

    def step(self, action: Any) -> Any:
        self._t += 1
        self._x = 0.9 * self._x + 0.1 * float(np.sum(action)) + self.np_random.normal(0, 0.1, 3)
        shown, reward = self._x.copy(), float(self._x[0])
        if self._where == "step" and self._t == self._at and self._due():
            shown = self._misbehave(shown)
            if self._fault == "nan_reward":
                reward = float("nan")
            if self._fault == "no_reward":
                reward = None  # type: ignore[assignment]
            if self._fault == "rewards":  # as in environments with several agents
                reward = (1.0, 2.0)  # type: ignore[assignment]
            if self._fault == "flags":
                return shown, reward, (False, False), False, {}
            if self._fault == "four":  # the old interface, without `truncated`
                return shown, reward, False, {}
        if self._fault == "rich":
            reward = 1e308
        return shown, reward, self._t >= self._length, False, {}

    def _due(self) -> bool:
        return self._seed is None or self._seed == self._now

    def _misbehave(self, shown: Any) -> Any:
        return getattr(self, f"_{self._fault or 'nothing'}")(shown)

    def _first_time(self) -> bool:
        """Whether this is the first call in any process, which creates the marker file."""
        try:
            self._marker.touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    def _nothing(self, shown: Any) -> Any:
        return shown

    _nan_reward = _no_reward = _rewards = _flags = _four = _alone = _rich = _nothing

    def _raise(self, shown: Any) -> Any:
        raise ValueError("the moon is wrong")

    def _exit(self, shown: Any) -> Any:
        sys.exit("gone fishing")

    def _surrender(self, shown: Any) -> Any:
        raise Surrender("white flag")

    def _generator(self, shown: Any) -> Any:
        raise GeneratorExit

    def _interrupt(self, shown: Any) -> Any:
        raise KeyboardInterrupt

    def _nan(self, shown: Any) -> Any:
        return np.array([0.0, np.nan, 0.0])

    def _inf(self, shown: Any) -> Any:
        return np.array([0.0, np.inf, 0.0])

    def _huge(self, shown: Any) -> Any:
        return np.array([0.0, 1e300, 0.0])  # finite, but not in float32

    def _shape(self, shown: Any) -> Any:
        return np.zeros(4)

    def _ragged(self, shown: Any) -> Any:
        return [[1.0], [2.0, 3.0], 4.0]

    def _words(self, shown: Any) -> Any:
        return np.array(["a", "b", "c"])

    def _random(self, shown: Any) -> Any:
        return shown + int.from_bytes(os.urandom(3), "little")

    def _print(self, shown: Any) -> Any:
        print("a word on stdout")
        print("a word on stderr", file=sys.stderr)
        os.write(1, b"a word past Python\n")
        return shown

    def _print_and_raise(self, shown: Any) -> Any:
        self._print(shown)
        return self._raise(shown)

    def _print_and_die(self, shown: Any) -> Any:
        self._print(shown)
        os._exit(7)

    def _flood_and_raise(self, shown: Any) -> Any:
        for _ in range(300):
            os.write(1, b"all work and no play " * 500)
        print("the last words")
        return self._raise(shown)

    def _hang(self, shown: Any) -> Any:
        while True:
            time.sleep(3600)

    def _hang_once(self, shown: Any) -> Any:
        return self._hang(shown) if self._first_time() else shown

    def _hang_in_c(self, shown: Any) -> Any:
        if self._marker.name:
            self._marker.with_suffix(".here").touch()
        ctypes.PyDLL(None).sleep(3600)  # holds the GIL, as bad extensions do

    def _kill(self, shown: Any) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)

    def _kill_once(self, shown: Any) -> Any:
        if self._first_time():
            os.kill(os.getpid(), signal.SIGKILL)
        return shown

    def _abandon_pipe(self, shown: Any) -> Any:
        """Die and leave a process behind that holds the pipe to the parent open."""
        if self._first_time():
            if os.fork() == 0:
                time.sleep(600)
                os._exit(0)
            os.kill(os.getpid(), signal.SIGKILL)
        return shown

    def _doze(self, shown: Any) -> Any:
        """Sleep for longer than a parent waits for a message without other checks."""
        time.sleep(0.5)
        return shown

    def _start_program(self, shown: Any) -> Any:
        """Start a program, as simulators do, and write its process id to the marker file."""
        program = subprocess.Popen(["sleep", "600"])
        self._marker.write_text(str(program.pid))
        return shown

    def _fork_program(self, shown: Any) -> Any:
        """Fork a process, which inherits the open files of the worker."""
        program = os.fork()
        if program == 0:
            time.sleep(600)
            os._exit(0)
        self._marker.write_text(str(program))
        return shown

    def _wait(self, shown: Any) -> Any:
        """Wait until the marker file exists. `marker.here` shows that the wait has begun."""
        self._marker.with_suffix(".here").touch()
        for _ in range(60_000):
            if self._marker.exists():
                break
            time.sleep(0.001)
        return shown

    def _garble(self, shown: Any) -> Any:
        """Write into the pipe that carries the worker's answers."""
        os.write(int(sys.argv[1]), b"\xff" * 64)
        return shown

    def _damage(self, shown: Any) -> Any:
        """Damage a byte of each message that this process sends from now on."""
        from rlflame.rollout import wire

        right = wire.encode
        wire.encode = lambda value: right(value)[:-1] + b"\x55"
        return shown

    def _lie(self, shown: Any) -> Any:
        """Send fragments that are one row short from now on."""
        import dataclasses

        from rlflame.rollout import wire
        from rlflame.rollout.task import Fragment

        right = wire.encode

        def wrong(value: Any) -> bytes:
            if isinstance(value, Fragment):
                value = dataclasses.replace(value, rewards=value.rewards[:-1])
            return right(value)

        wire.encode = wrong
        return shown


class Shifted(gymnasium.ObservationWrapper):
    """A wrapper that rlflame does not know."""

    def observation(self, observation: Any) -> Any:
        return observation + 1.0


class Unstable(gymnasium.Wrapper):
    """A MuJoCo environment whose simulation diverges in its third step."""

    def __init__(self, env: gymnasium.Env) -> None:
        super().__init__(env)
        self._t = 0

    def step(self, action: Any) -> Any:
        self._t += 1
        if self._t == 3:
            self.env.unwrapped.data.qvel[:] = 1e15
        return self.env.step(action)


_SPACES = {
    "text": spaces.Text(5),
    "graph": spaces.Dict({"a": spaces.Discrete(2), "net": spaces.Graph(spaces.Box(0, 1), None)}),
    "sequence": spaces.Sequence(spaces.Box(0.0, 1.0)),
    "image": spaces.Box(0, 255, (84, 84, 3), np.uint8),
    "matrix": spaces.Box(-1.0, 1.0, (2, 3), np.float32),
    "scalar": spaces.Box(-1.0, 1.0, (), np.float32),
    "half-bounded": spaces.Box(-1.0, np.inf, (2,), np.float32),
    "unbounded": spaces.Box(-np.inf, np.inf, (2,), np.float32),
    "nothing": spaces.Box(-1.0, 1.0, (0,), np.float32),
    "shifted": spaces.Discrete(3, start=5),
    "plain": spaces.Discrete(3),
    "narrow": spaces.Discrete(3, dtype=np.int32),
}


class Odd(gymnasium.Env):
    """An environment with unusual spaces, which is never stepped."""

    def __init__(self, observes: str = "matrix", acts: str = "shifted", says: str = "") -> None:
        if says:
            print(says)
        self.observation_space = _SPACES[observes]
        self.action_space = _SPACES[acts]
        self.got: list[Any] = []

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        return np.arange(6, dtype=np.float32).reshape(2, 3), {}

    def step(self, action: Any) -> Any:
        if not self.action_space.contains(action):
            raise ValueError(f"not an action: {action!r}")
        self.got.append(action)
        return np.full((2, 3), float(np.sum(action)), np.float32), 1.0, False, False, {}


def _hopper(wrapper: Any, **kwargs: Any) -> gymnasium.Env:
    return wrapper(gymnasium.make("Hopper-v5", **kwargs).unwrapped)


def shifted_hopper(**kwargs: Any) -> gymnasium.Env:
    return _hopper(Shifted, **kwargs)


def unstable_hopper(**kwargs: Any) -> gymnasium.Env:
    return _hopper(Unstable, **kwargs)


class Loud(gymnasium.Env):
    """Prints a lot in each step in one of several ways, hangs, or ends the process."""

    observation_space = spaces.Box(-1.0, 1.0, (2,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, how="print", render_mode=None):
        self.how = how

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(2, np.float32), {}

    def step(self, action):
        if self.how == "hang":
            time.sleep(3600.0)
        if self.how == "exit":
            os._exit(3)
        words = "so loud " * 2000 + "\n"
        if self.how == "print":
            print(words)
        else:
            os.write(int(self.how.split()[1]), words.encode())
        return np.zeros(2, np.float32), 0.0, False, False, {}


class Counting(gymnasium.Env):
    """Counts the episodes of its instance, and shows the count."""

    observation_space = gymnasium.spaces.Box(-1e3, 1e3, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self) -> None:
        self.episodes = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.episodes += 1
        self.place = self.np_random.uniform()
        return self._observe(), {}

    def step(self, action):
        self.place += 2 * int(action) - 1
        return self._observe(), -abs(self.place), False, False, {}

    def _observe(self):
        return np.array([self.place, self.episodes], np.float32)


gymnasium.register("Fake-v0", entry_point=Fake)
gymnasium.register("Counting-v0", entry_point=Counting, max_episode_steps=5)
gymnasium.register("Loud-v0", entry_point=Loud, max_episode_steps=10)
gymnasium.register("Odd-v0", entry_point=Odd)
gymnasium.register("ShiftedHopper-v0", entry_point=shifted_hopper, max_episode_steps=1000)
gymnasium.register("UnstableHopper-v0", entry_point=unstable_hopper, max_episode_steps=1000)
