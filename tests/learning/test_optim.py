"""Adam and clipping, compared with torch, and states with wrong shapes."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from rlflame.config.algorithms import PpoSettings, ReinforceSettings, SacSettings
from rlflame.errors import LearningError
from rlflame.learning import optim
from rlflame.learning.base import StateParts
from rlflame.learning.kernels.library import load_kernels
from rlflame.learning.optim import Adam, CompiledAdam, Targets, clip_by_norm, make_adam
from rlflame.learning.parallel.thread_pair import ThreadPair


@pytest.mark.parametrize("epsilon", [1e-8, 0.1])
def test_adam_is_torchs(epsilon):
    rng = np.random.default_rng(0)
    ours = rng.standard_normal(50).astype(np.float32)
    theirs = torch.nn.Parameter(torch.from_numpy(ours.copy()).double())
    adam = Adam(50, epsilon)
    optimizer = torch.optim.Adam([theirs], lr=1.0, eps=epsilon)
    for step in range(500):
        # Gradients of all sizes, with zeros and sudden changes, and a changing learning rate.
        gradient = (rng.standard_normal(50) * 10.0 ** rng.integers(-6, 3)).astype(np.float32)
        gradient[:10] = 0.0
        rate = 1e-2 * (1.0 - step / 500)
        adam.step(ours, gradient, rate)
        theirs.grad = torch.from_numpy(gradient).double()
        optimizer.param_groups[0]["lr"] = rate
        optimizer.step()

    expected = theirs.detach().numpy()
    assert np.abs(expected[10:] - expected[10:].mean()).max() > 0.1
    np.testing.assert_allclose(ours, expected, atol=2e-5)


@pytest.mark.parametrize("settings", [PpoSettings, ReinforceSettings, SacSettings])
def test_the_least_epsilon_divides_no_gradient_of_0_by_nothing(settings):
    least = 1e-30
    adam, vector = Adam(2, least), np.ones(2, np.float32)
    for _ in range(3):
        adam.step(vector, np.array([1.0, 0.0], np.float32), 1e-3)
        assert np.isfinite(vector).all()
    assert settings(adam_epsilon=least).adam_epsilon == least
    with pytest.raises(ValidationError, match="adam_epsilon"):
        settings(adam_epsilon=1e-31)


def test_adam_goes_on_from_its_state():
    rng = np.random.default_rng(1)
    gradients = rng.standard_normal((20, 7)).astype(np.float32)
    straight, stopped = np.zeros(7, np.float32), np.zeros(7, np.float32)
    one, first, second = Adam(7, 1e-8), Adam(7, 1e-8), Adam(7, 1e-8)
    for gradient in gradients:
        one.step(straight, gradient, 1e-2)
    for gradient in gradients[:9]:
        first.step(stopped, gradient, 1e-2)
    second.state.load_state(first.state.get_state())
    for gradient in gradients[9:]:
        second.step(stopped, gradient, 1e-2)

    np.testing.assert_array_equal(stopped, straight)


def test_moments_of_what_no_gradient_reaches_end_at_zero_and_weights_are_none_the_wiser():
    """Subnormal numbers are slow, and 0.9 times the smallest one is itself."""
    rng = np.random.default_rng(3)
    weights, swept = rng.standard_normal(40).astype(np.float32), Adam(40, 1e-8)
    plain, first, second = weights.copy(), np.zeros(40, np.float32), np.zeros(40, np.float32)
    smallest = np.finfo(np.float32).smallest_normal
    for step in range(1, 80_001):
        gradient = np.zeros(40, np.float32)
        gradient[:20] = rng.standard_normal(20) * 10.0 ** rng.integers(-6, 3)
        if step < 40:
            gradient[20:] = 10.0 ** rng.integers(-12, 1, 20)
        swept.step(weights, gradient, 1e-3)
        first += np.float32(0.1) * (gradient - first)
        second += np.float32(0.001) * (gradient * gradient - second)
        correction = math.sqrt(1 - 0.999**step)
        rate = np.float32(1e-3 * correction / (1 - 0.9**step))
        plain -= rate * (first / (np.sqrt(second) + np.float32(1e-8 * correction)))
        for moment in (swept.first, swept.second):
            assert not np.any((moment != 0) & (np.abs(moment) < smallest)), step

    np.testing.assert_array_equal(weights, plain)
    assert np.all(swept.first[20:] == 0)
    assert np.all(swept.second[20:] == 0)
    assert 0 < np.abs(first[20:]).max() < smallest


@pytest.mark.parametrize(
    "change",
    [
        {"adam.first": np.zeros(1, np.float32)},
        {"adam.second": np.zeros(7, np.float64)},
        {"adam.count": np.zeros(1, np.int64)},
    ],
)
def test_a_state_that_does_not_fit_is_refused(change):
    adam = Adam(7, 1e-8)
    state = StateParts(adam=adam.state)
    good = state.get_state()
    with pytest.raises(LearningError, match=next(iter(change)).replace(".", r"\.")):
        state.load_state({**good, **change})
    del good["adam.second"]
    with pytest.raises(LearningError, match=r"adam\.second is missing"):
        state.load_state(good)


@pytest.mark.parametrize("size", [0.1, 3.0])
def test_clipping_is_torchs(size):
    gradient = np.random.default_rng(2).standard_normal(1000).astype(np.float32)
    gradient *= size / np.linalg.norm(gradient)
    parameter = torch.nn.Parameter(torch.zeros(1000))
    parameter.grad = torch.from_numpy(gradient.copy())
    expected = torch.nn.utils.clip_grad_norm_([parameter], 0.5)

    norm = clip_by_norm(gradient, 0.5)

    assert norm == pytest.approx(float(expected), rel=1e-5)
    np.testing.assert_allclose(gradient, parameter.grad.numpy(), rtol=1e-5)
    assert np.linalg.norm(gradient) == pytest.approx(min(size, 0.5), rel=1e-4)


def test_without_a_bound_nothing_is_clipped():
    gradient = np.full(4, 100.0, np.float32)
    assert clip_by_norm(gradient, None) == 200.0
    assert gradient.tolist() == [100.0] * 4


@pytest.mark.parametrize("bad", [math.nan, math.inf, 3e38])
def test_a_norm_that_is_not_finite_is_returned_and_nothing_scaled(bad):
    gradient = np.array([1.0, bad], np.float32)
    with np.errstate(over="ignore"):
        assert not math.isfinite(clip_by_norm(gradient, 0.5))
    assert gradient[0] == 1.0


@pytest.mark.skipif(load_kernels() is None, reason="the kernels were not compiled")
def test_compiled_steps_have_the_same_bits():
    rng = np.random.default_rng(4)
    weights = [np.ones(501, np.float32), np.ones(501, np.float32)]
    optimizers = Adam(501, 1e-5), make_adam(501, 1e-5)
    assert isinstance(optimizers[1], CompiledAdam)
    for step in range(200):  # longer than the interval at which small moments are set to zero
        gradient = (rng.standard_normal(501) * 10.0 ** rng.integers(-38, 10)).astype(np.float32)
        gradient[::7] = 0.0
        part = slice(3, 490) if step % 3 else slice(None)
        for vector, adam in zip(weights, optimizers, strict=True):
            adam.step(vector, gradient, 1e-2, part)
    states = [
        [vector.tobytes(), adam.first.tobytes(), adam.second.tobytes()]
        for vector, adam in zip(weights, optimizers, strict=True)
    ]
    assert states[0] == states[1]


def test_kernels_with_other_steps_are_not_used(monkeypatch):
    kernels = load_kernels()
    if kernels is None:
        pytest.skip("the kernels were not compiled")
    for name in ("step_adam", "run_lanes"):
        with monkeypatch.context() as patch:
            patch.setattr(kernels, name, lambda *given: None)
            optim._has_equal_steps.cache_clear()
            assert type(make_adam(5, 1e-5)) is Adam
    optim._has_equal_steps.cache_clear()


@pytest.mark.parametrize("threads", [1, 2])
def test_a_step_in_lanes_has_the_bits_of_one_step(threads):
    rng, thread_pair = np.random.default_rng(5), ThreadPair(threads)
    optimizers = Adam(9_001, 1e-5), Adam(9_001, 1e-5), make_adam(9_001, 1e-5)
    weights, targets = np.ones((2, 3, 9_001), np.float32)
    for step in range(70):
        gradient = (rng.standard_normal(9_001) * 10.0 ** rng.integers(-38, 10)).astype(np.float32)
        first, *others = zip(optimizers, weights, targets, strict=True)
        adam, vector, target = first
        adam.step(vector, gradient, 1e-2)
        if step % 2:
            target += (vector - target) * np.float32(0.3)
        for adam, vector, target in others:
            moving = Targets(target, 0.3) if step % 2 else None
            adam.step_in_lanes(thread_pair, vector, gradient, 1e-2, moving)
    for number in (1, 2):
        assert weights[0].tobytes() == weights[number].tobytes()
        assert targets[0].tobytes() == targets[number].tobytes()
        for name in ("first", "second"):
            arrays = [getattr(optimizers[place], name).tobytes() for place in (0, number)]
            assert arrays[0] == arrays[1]
