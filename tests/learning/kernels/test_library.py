"""The compiled kernels are optional: without them, runs have the same bits."""

from __future__ import annotations

import importlib.machinery
import shutil
import subprocess
import sysconfig

import numpy as np
import pytest
import safetensors.numpy
from commands import TINY, TINY_REINFORCE, TINY_SAC, rlflame

from rlflame.learning.kernels import library
from rlflame.learning.kernels.library import get_address, load_kernels


@pytest.fixture(autouse=True)
def _fresh_cache():
    load_kernels.cache_clear()
    yield
    load_kernels.cache_clear()


def has_compiler() -> bool:
    compiler = (sysconfig.get_config_var("CC") or "cc").split()[0]
    return shutil.which(compiler) is not None


def test_the_kernels_are_used_where_they_were_compiled():
    if library.is_missing() and not has_compiler():
        pytest.skip("no C compiler")
    assert load_kernels() is not None


def test_the_variable_disables_the_kernels(monkeypatch):
    for value in ("off", "0", "No"):
        monkeypatch.setenv(library.VARIABLE, value)
        load_kernels.cache_clear()
        assert load_kernels() is None


def test_a_damaged_library_is_not_used(tmp_path, monkeypatch):
    monkeypatch.setattr(library, "__file__", str(tmp_path / "library.py"))
    assert load_kernels() is None
    assert library.is_missing()
    load_kernels.cache_clear()
    suffix = importlib.machinery.EXTENSION_SUFFIXES[0]
    (tmp_path / f"_kernels{suffix}").write_bytes(b"\x7fELF damaged")
    assert load_kernels() is None


@pytest.mark.skipif(not has_compiler(), reason="no C compiler")
def test_a_library_without_the_functions_is_not_used(tmp_path, monkeypatch):
    suffix = importlib.machinery.EXTENSION_SUFFIXES[0]
    source = tmp_path / "other.c"
    source.write_text("int rlflame_other(void) { return 1; }\n")
    target = str(tmp_path / f"_kernels{suffix}")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", target, source], check=True)
    monkeypatch.setattr(library, "__file__", str(tmp_path / "library.py"))
    assert load_kernels() is None


def test_a_library_of_another_version_is_not_used(monkeypatch):
    monkeypatch.setattr(library, "_VERSION", library._VERSION + 1)
    assert load_kernels() is None


def test_an_address_is_that_of_the_first_element():
    array = np.zeros((4, 5), np.float32)
    for view in (array, array[1:], array[:, 2:], array.T, np.zeros(0, np.float32)):
        assert get_address(view) == view.ctypes.data


def test_a_run_without_the_kernels_says_so(tmp_path, monkeypatch):
    def train(name: str) -> str:
        return rlflame("train", "--steps", "64", *TINY, "--out", str(tmp_path / name)).err

    text = "The compiled kernels are not installed, so updates are slower."
    if not library.is_missing():
        assert text not in train("with")
    monkeypatch.setattr(library, "_find_library", lambda: None)
    assert train("without").count(text) == 1
    damaged = tmp_path / "damaged"
    damaged.write_bytes(b"\x7fELF damaged")
    monkeypatch.setattr(library, "_find_library", lambda: str(damaged))
    text = "The compiled kernels cannot be used here, so updates are slower."
    load_kernels.cache_clear()
    assert train("unusable").count(text) == 1
    monkeypatch.setenv(library.VARIABLE, "off")
    load_kernels.cache_clear()
    assert text not in train("off")


@pytest.mark.parametrize(
    ("options", "settings"),
    [
        (("--algo", "ppo", "--env", "Pendulum-v1", "--steps", "256"), TINY),
        (("--algo", "ppo", "--env", "CartPole-v1", "--steps", "256"), TINY),
        (("--algo", "reinforce", "--env", "CartPole-v1", "--steps", "200"), TINY_REINFORCE),
        (("--algo", "sac", "--env", "Pendulum-v1", "--steps", "240"), TINY_SAC),
    ],
)
def test_runs_without_the_kernels_have_the_same_bits(options, settings, tmp_path, monkeypatch):
    policies = []
    for value in ("on", "off"):
        folder = tmp_path / value
        command = ("train", *options, *settings, "--seed", "3", "--out", str(folder))
        monkeypatch.setenv(library.VARIABLE, value)
        load_kernels.cache_clear()
        assert rlflame(*command).code == 0
        policies.append(safetensors.numpy.load_file(folder / "latest.safetensors"))
    with_kernels, without = policies
    assert with_kernels.keys() == without.keys()
    for name, array in with_kernels.items():
        assert array.tobytes() == without[name].tobytes(), name
