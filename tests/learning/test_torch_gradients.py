"""Torch's copies of the parameters, as on a GPU, and errors for missing GPUs."""

from __future__ import annotations

import os
import shlex
import tomllib
from functools import partial

import pytest
import torch
from commands import TINY_SAC, rlflame
from tiny_runs import run

from rlflame.config.recipe import LearningSettings
from rlflame.fleet.base import make_policy_id
from rlflame.learning import factory, torch_gradients
from rlflame.learning.sac import loss_torch
from rlflame.storage import checkpoint

_ROLLOUT = {"num_slots": 2, "envs_per_slot": 2, "steps": 16}
SCENARIOS = {
    "ppo": {"ppo": {"epochs": 2, "minibatch_size": 32}},
    "reinforce": {"algorithm": "reinforce", "rollout": {**_ROLLOUT, "unit": "episodes"}},
    "sac": {
        "algorithm": "sac",
        "environment": {"id": "Pendulum-v1"},
        "sac": {"learning_starts": 40, "batch_size": 8, "updates_per_step": 0.2},
    },
}


@pytest.mark.parametrize("algorithm", SCENARIOS)
def test_leaves_that_are_copies_learn_as_those_that_are_the_vector_itself(
    algorithm, tmp_path, monkeypatch
):
    """A GPU differs only by these copies; on a CPU, results can be compared by bits."""
    learning = {"provider": "torch", "network": {"hidden": [8]}, "rollout": _ROLLOUT}
    data = {"stop_at_iterations": 3, "learning": {**learning, **SCENARIOS[algorithm]}}
    expected = run(data).state_digest(tmp_path)
    for module in (torch_gradients, loss_torch):
        monkeypatch.setattr(
            module, "TorchNetworks", partial(torch_gradients.TorchNetworks, copies=True)
        )
    assert run(data).state_digest(tmp_path) == expected


@pytest.fixture
def no_card(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.usefixtures("no_card")
def test_where_there_is_no_card_auto_is_the_processor_and_cuda_is_refused(tmp_path):
    words = ("train", "--env", "cartpole", "--out", tmp_path / "x")
    learning = rlflame(*words, "--device", "auto", "--dry-run", "--json").json()["config"]
    assert (learning["learning"]["device"], learning["learning"]["provider"]) == ("cpu", "numpy")

    spoken = rlflame(*words, "--device", "cuda")
    assert spoken.code == 2
    assert "finds no CUDA device here." in spoken.err

    # A recipe from another machine.
    sets = ("--set", "learning.device=cuda", "--set", "learning.provider=torch")
    spoken = rlflame(*words, *sets, "--fleet", "inline")
    assert spoken.code == 2
    assert "This recipe uses CUDA" in spoken.err


@pytest.fixture
def fake_card(monkeypatch):
    """The CPU in the place of a GPU; returns a context without the GPU."""
    monkeypatch.setattr(torch_gradients, "is_cuda_available", lambda: True)
    monkeypatch.setattr(torch_gradients, "select_device", lambda kind, rank: "cpu")
    monkeypatch.setattr(torch_gradients, "read_gpu_name", lambda: "Card 9")
    return monkeypatch


def test_the_device_that_auto_chooses_is_recorded(fake_card, tmp_path):
    words = ("train", "--env", "pendulum", "--algo", "sac", *TINY_SAC, "--device", "auto")
    spoken = rlflame(*words, "--out", tmp_path / "x")
    assert spoken.code == 0, spoken.err
    learning = tomllib.loads((tmp_path / "x/config.toml").read_text())["learning"]
    assert (learning["device"], learning["provider"]) == ("cuda", "torch")
    source = checkpoint.load(tmp_path / "x/latest.safetensors")
    assert source.recipe.learning.device == "cuda"
    assert source.fingerprint["card"] == "Card 9"


@pytest.mark.parametrize("target", ["x", "x/latest.safetensors"])
def test_a_run_of_a_gpu_is_resumed_without_one_only_as_a_new_run(target, fake_card, tmp_path):
    words = ("train", "--env", "pendulum", "--algo", "sac", *TINY_SAC, "--device", "cuda")
    spoken = rlflame(*words, "--steps", "96", "--out", tmp_path / "x")
    assert spoken.code == 0, spoken.err
    before = (tmp_path / "x/latest.safetensors").read_bytes()
    fake_card.undo()
    fake_card.setattr(torch.cuda, "is_available", lambda: False)
    refused = rlflame("resume", tmp_path / target, "--steps", "240")
    assert refused.code == 2
    assert "This run learns on a GPU, but torch finds none here." in refused.err
    assert (tmp_path / "x/latest.safetensors").read_bytes() == before
    hint = " ".join(refused.err.partition("new run from its weights:")[2].split())
    assert hint.startswith("rlflame train ")
    spoken = rlflame(*shlex.split(hint)[1:], "--out", tmp_path / "y")
    assert spoken.code == 0, spoken.err
    source = checkpoint.load(tmp_path / "y/latest.safetensors")
    learning = source.recipe.learning
    assert (learning.device, source.progress.steps) == ("cpu", 240 - 96)
    policy = checkpoint.load(tmp_path / "x/latest.safetensors").policy
    assert learning.init_policy == make_policy_id(policy)


def test_a_complete_run_of_a_gpu_is_reported_without_one(fake_card, tmp_path):
    words = ("train", "--env", "pendulum", "--algo", "sac", *TINY_SAC, "--device", "cuda")
    assert rlflame(*words, "--steps", "96", "--out", tmp_path / "x").code == 0
    fake_card.undo()
    fake_card.setattr(torch.cuda, "is_available", lambda: False)
    spoken = rlflame("resume", tmp_path / "x")
    assert spoken.code == 0, spoken.err


def test_a_gpu_computes_in_float32_with_deterministic_kernels(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    learning = LearningSettings(provider="torch", device="cuda")
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")  # TF32 and bf16
    try:
        assert factory.resolve_device(learning, 0) == "cuda:0"
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.is_deterministic_algorithms_warn_only_enabled()
        assert torch.get_float32_matmul_precision() == "highest"
        assert not torch.backends.cuda.matmul.allow_tf32
        assert not torch.is_autocast_enabled("cuda")
        # cuBLAS is deterministic only with this setting.
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    finally:
        torch.use_deterministic_algorithms(False)
        torch.set_float32_matmul_precision(before)


def test_a_card_is_for_torch_alone():
    sets = ("--set", "learning.device=cuda", "--set", "learning.provider=numpy")
    spoken = rlflame("train", "--env", "cartpole", *sets)
    assert spoken.code == 2
    assert "only torch computes gradients on cuda: set provider to torch" in spoken.err


def test_learners_take_the_cards_in_turn(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch, "use_deterministic_algorithms", lambda on: None)
    found = [torch_gradients.select_device("cuda", rank) for rank in range(3)]
    assert found == ["cuda:0", "cuda:1", "cuda:0"]
    assert torch_gradients.select_device("cpu", 3) == "cpu"
