"""The statistics of observations on a device, run on the CPU: the same as on the host."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from batches import policy_spec

from rlflame.learning.device.graph import Mirror
from rlflame.learning.device.observations import DeviceNormaliser
from rlflame.learning.networks.flat_vector import normalise_observations
from rlflame.learning.normalization import ObservationNormaliser

CHANGES = {
    "plain": {},
    "a mask": {"mask_size": 3},
    "choices": {"choice_spans": ((1, 3),)},
    "choices and a mask": {"choice_spans": ((0, 1), (3, 4)), "mask_size": 2},
}


def make_spec(**changes):
    return dataclasses.replace(policy_spec(normalise=True), **changes)


def draw_rows(rng: np.random.Generator, rows: int, spec) -> np.ndarray:
    size = spec.observation_size + spec.mask_size
    return (3.0 * rng.standard_normal((rows, size)) + 1.0).astype(np.float32)


@pytest.mark.parametrize("name", CHANGES)
def test_observations_have_the_bits_of_the_host(name):
    rng, spec = np.random.default_rng(0), make_spec(**CHANGES[name])
    normaliser = ObservationNormaliser(spec.observation_size, spec.choice_spans)
    normaliser.merge(draw_rows(rng, 50, spec))
    policy = normaliser.make_arrays()
    device_normaliser = DeviceNormaliser(normaliser, spec, Mirror("cpu"))
    raw = draw_rows(rng, 40, spec).reshape(5, 8, -1)
    raw[0, 0, 0], raw[1, 1, 0], raw[2, 2, 0] = np.nan, np.inf, -1e38
    result = device_normaliser.normalise(torch.from_numpy(raw), policy).numpy()
    expected = normalise_observations(raw, policy, spec)
    # A NaN may have another sign.
    np.testing.assert_array_equal(np.nan_to_num(result), np.nan_to_num(expected))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_statistics_are_those_of_the_host(dtype):
    rng, spec = np.random.default_rng(1), make_spec(mask_size=2)
    normalisers = [ObservationNormaliser(spec.observation_size) for _ in range(2)]
    mirror = Mirror("cpu", dtype)
    device_normaliser = DeviceNormaliser(normalisers[1], spec, mirror)
    for rows in (7, 0, 1, 1000):
        samples = draw_rows(rng, rows, spec)
        normalisers[0].merge(samples)
        device_normaliser.merge(torch.from_numpy(samples))
    assert normalisers[1].count == 0
    mirror.copy_to_host()
    assert normalisers[0].count == normalisers[1].count == 1008
    for name in ("mean", "squares"):
        arrays = [getattr(normaliser, name) for normaliser in normalisers]
        np.testing.assert_allclose(arrays[1], arrays[0], rtol=1e-13)
