"""The hint at the start of a run that would be faster on a GPU."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from types import SimpleNamespace

import pytest
from commands import rlflame

from rlflame.config.recipe import LearningSettings
from rlflame.experiment import gpu
from rlflame.experiment.gpu import HINT, find_device_hint, has_cuda_torch, has_gpu

WIDE = {"network": {"hidden": [256, 256]}}
#: Recipes of docs/guides/learners.md that a GPU speeds up, and others.
FASTER = {
    "SAC with 256x256 units": {"algorithm": "sac", **WIDE},
    "SAC with minibatches of 128": {"algorithm": "sac", "sac": {"batch_size": 128}, **WIDE},
    "SAC with 400x300 units": {"algorithm": "sac", "network": {"hidden": [400, 300]}},
    "PPO with 256x256 units and large minibatches": {"ppo": {"minibatch_size": 4096}, **WIDE}
    | {"rollout": {"steps": 128}},
    "PPO with two shards": {"ppo": {"minibatch_size": 2048}, "gradient_shards": 2, **WIDE},
    "torch on the CPU": {"algorithm": "sac", "provider": "torch", **WIDE},
}
SLOWER = {
    "PPO": {},
    "PPO with 256x256 units and small minibatches": {"ppo": {"minibatch_size": 64}, **WIDE},
    "PPO with large minibatches": {"ppo": {"minibatch_size": 2048}},
    "PPO with small batches": {"ppo": {"minibatch_size": 4096}, **WIDE}
    | {"rollout": {"num_slots": 1, "steps": 8}},
    "PPO with whole episodes": {"ppo": {"minibatch_size": 4096}, **WIDE}
    | {"rollout": {"unit": "episodes", "steps": 500}},
    "SAC with 64x64 units": {"algorithm": "sac", "network": {"hidden": [64, 64]}},
    "SAC with one layer": {"algorithm": "sac", "network": {"hidden": [256]}},
    "SAC without a hidden layer": {"algorithm": "sac", "network": {"hidden": []}},
    "SAC with small batches": {"algorithm": "sac", "sac": {"batch_size": 64}, **WIDE},
    "REINFORCE": {"algorithm": "reinforce", "rollout": {"unit": "episodes", "steps": 500}, **WIDE},
    "SAC on a GPU": {"algorithm": "sac", "provider": "torch", "device": "cuda", **WIDE},
}


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A machine with a GPU, the driver's files and a torch with CUDA."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    root = tmp_path / "root"
    (root / "proc/driver/nvidia/gpus/0000:17:00.0").mkdir(parents=True)
    (root / "dev").mkdir()
    for name in ("nvidia0", "nvidiactl", "null"):
        (root / "dev" / name).touch()
    library = tmp_path / "torch/lib/libtorch_cuda.so"
    library.parent.mkdir(parents=True)
    library.touch()
    origin = tmp_path / "torch/__init__.py"
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name: SimpleNamespace(origin=str(origin)) if name == "torch" else find(name),
    )
    return root


@pytest.mark.parametrize("name", [*FASTER, *SLOWER])
def test_the_hint_is_for_recipes_that_gain(name, machine):
    learning = LearningSettings.model_validate((FASTER | SLOWER)[name])
    assert find_device_hint(learning, machine) == (HINT if name in FASTER else None)


SAC = LearningSettings.model_validate(FASTER["SAC with 256x256 units"])


def test_without_a_driver_or_a_usable_gpu_there_is_no_hint(machine, tmp_path):
    assert find_device_hint(SAC, machine) == HINT
    assert find_device_hint(SAC, tmp_path / "empty") is None
    # A container without a GPU, on a machine with one.
    (machine / "dev/nvidia0").unlink()
    assert find_device_hint(SAC, machine) is None
    # A driver without a GPU.
    (machine / "dev/nvidia0").touch()
    (machine / "proc/driver/nvidia/gpus/0000:17:00.0").rmdir()
    assert find_device_hint(SAC, machine) is None


@pytest.mark.parametrize(
    ("visible", "found"),
    [("", False), ("-1", False), ("-1,0", False), ("0", True), ("GPU-8", True)],
)
def test_a_hidden_gpu_is_no_gpu(visible, found, machine, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert has_gpu(machine) == found


def test_without_a_torch_for_cuda_there_is_no_hint(machine, tmp_path, monkeypatch):
    (tmp_path / "torch/lib/libtorch_cuda.so").unlink()
    assert find_device_hint(SAC, machine) is None
    for spec in (None, SimpleNamespace(origin=None)):
        monkeypatch.setattr(importlib.util, "find_spec", lambda name, spec=spec: spec)
        assert not has_cuda_torch()


def test_the_search_does_not_import_torch():
    code = (
        "import sys; from rlflame.experiment import gpu; gpu.has_gpu(); gpu.has_cuda_torch();"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


TINY_SAC_WITH_WIDE_LAYERS = (
    *("train", "--algo", "sac", "--env", "pendulum", "--steps", "16", "--set"),
    *("runtime.fleet=inline", "--set", "evaluation.final_episodes=1", "--plain"),
)


def test_the_hint_is_one_line_above_the_first_screen_of_a_new_run(monkeypatch, tmp_path):
    monkeypatch.setattr(gpu, "has_gpu", lambda root: True)
    monkeypatch.setattr(gpu, "has_cuda_torch", lambda: True)
    spoken = rlflame(*TINY_SAC_WITH_WIDE_LAYERS, "--out", tmp_path / "run")
    assert spoken.code == 0, spoken.err
    assert spoken.err.splitlines().count(HINT) == 1
    resumed = rlflame("resume", tmp_path / "run", "--steps", "80", "--plain")
    assert resumed.code == 0, resumed.err
    assert HINT not in resumed.err
