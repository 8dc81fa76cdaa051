"""Schedules, gradient clipping, Adam, and a guard against NaN and infinity."""

from __future__ import annotations

import ctypes
import functools
import math
from typing import NamedTuple

import numpy as np

from rlflame.errors import LearningError
from rlflame.rollout.task import Array, Float32

from .base import Counter, Metrics, StateParts
from .kernels.library import AdamFields, Kernels, get_address, load_kernels, make_check_numbers
from .normalization import SCALE_HINT
from .parallel.thread_pair import LANES, ThreadPair, slice_half

_PIECE = 65_536
BETA_1, BETA_2 = 0.9, 0.999
_TO_FIRST, _TO_SECOND = np.array(1 - BETA_1, np.float32), np.array(1 - BETA_2, np.float32)
#: Every `SWEEP` steps, moments below `_STILL_LIMITS` are set to zero; they are too small to change
#: a weight. Otherwise, the moments of a dead unit would shrink into the subnormal range of float32
#: and stay there, because 0.9 times the smallest subnormal number rounds up to that number.
#: Subnormal arithmetic is a hundred times slower on some processors. Moments above the limits
#: cannot become subnormal before the next sweep.
SWEEP = 64
_STILL_LIMITS = np.array(1e-28, np.float32), np.array(1e-34, np.float32)


def apply_schedule(value: float, anneal: bool, progress: float) -> float:
    """Return the value, annealed linearly towards zero if `anneal` is set."""
    return value * (1.0 - min(1.0, progress)) if anneal else value


class Targets(NamedTuple):
    """Weights that move towards the parameters after each step, by a fraction of the distance."""

    data: Float32
    rate: float


class Adam:
    """Adam (Kingma and Ba, 2015) on a flat vector, in place."""

    def __init__(self, size: int, epsilon: float) -> None:
        self.first: Float32 = np.zeros(size, np.float32)
        self.second: Float32 = np.zeros(size, np.float32)
        self.count = Counter()
        self.state = StateParts(first=self.first, second=self.second, count=self.count)
        self.epsilon = epsilon
        self._a: Float32 = np.empty(size, np.float32)
        self._b: Float32 = np.empty(size, np.float32)

    def step(
        self,
        parameters: Float32,
        gradient: Float32,
        learning_rate: float,
        part: slice = slice(None),
    ) -> None:
        self.count.value += 1
        self.apply(parameters, gradient, learning_rate, part)

    def apply(
        self, parameters: Float32, gradient: Float32, learning_rate: float, part: slice
    ) -> None:
        """Apply the current step to a slice of the vector; slices are independent."""
        count = self.count.value
        rate, epsilon = (
            np.array(value, np.float32) for value in self.compute_rates(count, learning_rate)
        )
        start, end, _ = part.indices(len(parameters))
        self._move(parameters, gradient, rate, epsilon, slice(start, end))
        if count % SWEEP == 0:
            first, second = self.first[part], self.second[part]
            is_still = np.abs(first) < _STILL_LIMITS[0]
            first[is_still] = 0.0
            second[is_still & (second < _STILL_LIMITS[1])] = 0.0

    def step_in_lanes(
        self,
        thread_pair: ThreadPair,
        parameters: Float32,
        gradient: Float32,
        learning_rate: float,
        targets: Targets | None = None,
    ) -> None:
        """Take a step in two threads; any targets then move towards the parameters."""
        self.count.value += 1

        def run_lane(number: int) -> None:
            part = slice_half(len(parameters), number)
            self.apply(parameters, gradient, learning_rate, part)
            if targets is not None:
                step = np.subtract(parameters[part], targets.data[part], out=self._a[part])
                step *= np.float32(targets.rate)
                targets.data[part] += step

        thread_pair.run(run_lane)

    def compute_rates(self, step: int, learning_rate: float) -> tuple[float, float]:
        """Return the rate and epsilon of a step, including the corrections of the moments."""
        correction = math.sqrt(1.0 - BETA_2**step)
        return learning_rate * correction / (1.0 - BETA_1**step), self.epsilon * correction

    def _move(
        self, parameters: Float32, gradient: Float32, rate: Array, epsilon: Array, part: slice
    ) -> None:
        """Update the moments and move the parameters; the scalars include the corrections."""
        # Each piece stays in the processor's cache through all operations.
        for start in range(part.start, part.stop, _PIECE):
            piece = slice(start, min(start + _PIECE, part.stop))
            g, first, second = gradient[piece], self.first[piece], self.second[piece]
            a, b = self._a[piece], self._b[piece]
            np.subtract(g, first, out=a)
            np.multiply(a, _TO_FIRST, out=a)
            np.add(first, a, out=first)
            np.multiply(g, g, out=b)
            np.subtract(b, second, out=b)
            np.multiply(b, _TO_SECOND, out=b)
            np.add(second, b, out=second)
            # theta -= lr * m_hat / (sqrt(v_hat) + epsilon)
            np.sqrt(second, out=b)
            np.add(b, epsilon, out=b)
            np.divide(first, b, out=b)
            np.multiply(b, rate, out=b)
            np.subtract(parameters[piece], b, out=parameters[piece])


class CompiledAdam(Adam):
    """Adam in one call of compiled code, with the same bits."""

    def __init__(self, size: int, epsilon: float, kernels: Kernels) -> None:
        super().__init__(size, epsilon)
        self._kernels = kernels
        self._addresses = get_address(self.first), get_address(self.second)
        to_first, to_second = float(_TO_FIRST), float(_TO_SECOND)
        self._steps = [AdamFields(to_first=to_first, to_second=to_second) for _ in range(LANES)]

    def apply(
        self, parameters: Float32, gradient: Float32, learning_rate: float, part: slice
    ) -> None:
        self._kernels.step_adam(self._describe(0, parameters, gradient, learning_rate, part))

    def step_in_lanes(
        self,
        thread_pair: ThreadPair,
        parameters: Float32,
        gradient: Float32,
        learning_rate: float,
        targets: Targets | None = None,
    ) -> None:
        self.count.value += 1
        halves = [slice_half(len(parameters), lane) for lane in range(LANES)]
        lanes = [
            self._describe(lane, parameters, gradient, learning_rate, half, targets)
            for lane, half in enumerate(halves)
        ]
        self._kernels.run_lanes(thread_pair.helper, "step_adam", lanes)

    def _describe(
        self,
        lane: int,
        parameters: Float32,
        gradient: Float32,
        learning_rate: float,
        part: slice,
        targets: Targets | None = None,
    ) -> int:
        """Describe the current step for a slice of the vector; return the description's address."""
        step, count = self._steps[lane], self.count.value
        start, end, _ = part.indices(len(parameters))
        addresses = get_address(parameters), get_address(gradient), *self._addresses
        step.parameters, step.gradient, step.first, step.second = (
            address + 4 * start for address in addresses
        )
        step.targets, step.target_rate = None, 0.0
        if targets is not None:
            step.targets = get_address(targets.data) + 4 * start
            step.target_rate = targets.rate
        step.count, step.drops_still = end - start, count % SWEEP == 0
        step.rate, step.epsilon = self.compute_rates(count, learning_rate)
        return ctypes.addressof(step)


def make_adam(size: int, epsilon: float) -> Adam:
    """Make an optimizer that uses the kernels if they compute the same bits as numpy."""
    kernels = load_kernels()
    if kernels is None or not _has_equal_steps(kernels):
        return Adam(size, epsilon)
    return CompiledAdam(size, epsilon, kernels)


@functools.cache
def _has_equal_steps(kernels: Kernels) -> bool:
    """Return whether both optimizers compute the same bits for varied numbers."""
    first = make_check_numbers(0, 203)
    optimizers = Adam(len(first), 1e-5), CompiledAdam(len(first), 1e-5, kernels)
    weights, targets = [first, first.copy()], np.zeros((2, len(first)), np.float32)
    thread_pair = ThreadPair(1)
    for key in range(1, 4):
        gradient = make_check_numbers(key, len(first))
        for vector, adam, target in zip(weights, optimizers, targets, strict=True):
            adam.step(vector, gradient, 1e-3)
            adam.step(vector, gradient, 1e-3, slice(5, 100))
            adam.step_in_lanes(thread_pair, vector, gradient, 1e-3, Targets(target, 0.1))
    states = [
        vector.tobytes() + target.tobytes() for vector, target in zip(weights, targets, strict=True)
    ]
    states += [adam.first.tobytes() + adam.second.tobytes() for adam in optimizers]
    return states[0] == states[1] and states[2] == states[3]


def clip_by_norm(gradient: Float32, max_norm: float | None) -> float:
    """Clip the gradient's norm to `max_norm` in place; return the original norm."""
    norm = math.sqrt(compute_square_norm(gradient))
    clip(gradient, norm, max_norm)
    return norm


def compute_square_norm(gradient: Float32) -> float:
    """Return the squared norm of a gradient."""
    return float(np.dot(gradient, gradient))


def clip(gradient: Float32, norm: float, max_norm: float | None) -> None:
    """Scale down a gradient, or part of it, in place if `norm` exceeds `max_norm`.

    `norm` is the norm of the whole gradient.
    """
    if max_norm is not None and math.isfinite(norm) and norm > max_norm:
        np.multiply(gradient, np.float32(max_norm / (norm + 1e-6)), out=gradient)


class GradientGuard:
    """Detects gradients with NaN or infinity; too many in a row are an error."""

    limit = 5

    def __init__(self, section: str) -> None:
        #: The number of skipped minibatches: in total, and in a row.
        self.counts = np.zeros(2, np.int64)
        self._section = section

    def is_refused(self, norm: float, sums: Metrics) -> bool:
        """Return whether the norm or any sum is not finite; count such minibatches."""
        if math.isfinite(norm) and all(map(math.isfinite, sums.values())):
            self.record_success()
            return False
        self.counts += 1
        if self.counts[1] >= self.limit:
            raise self.make_error(int(self.counts[1]), norm)
        return True

    def record_success(self) -> None:
        """Record a minibatch whose gradient was finite."""
        self.counts[1] = 0

    def make_error(self, times: int, norm: float) -> LearningError:
        return LearningError(
            f"The loss or its gradient was not finite {times} times in a row "
            f"(gradient norm {norm}). The weights were not changed.",
            f"try a smaller learning rate, for example --set {self._section}.learning_rate="
            f"1e-4; if rewards or observations are very large, {SCALE_HINT}",
        )
