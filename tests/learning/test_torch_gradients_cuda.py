"""Gradients on a real GPU: identical in each run, with any number of learners.

These tests are skipped if torch finds no GPU.
"""

from __future__ import annotations

import socket
from pathlib import Path

import gloo
import numpy as np
import pytest
import torch
from commands import TINY, TINY_REINFORCE, TINY_SAC, finished, process
from meetings import HERE, hosted

from rlflame.learning.parallel.torch_process_group import TorchProcessGroup
from rlflame.storage import checkpoint

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no card here")

SHARDS = ("--set", "learning.gradient_shards=4")
ALGORITHMS = {
    "ppo": (*TINY, "--steps", "512"),
    "ppo with wide networks": (
        *TINY,
        *("--set", "network.hidden=[256, 256]", "--set", "rollout.steps=512"),
        *("--set", "ppo.minibatch_size=1024", "--steps", "6144"),
    ),
    "reinforce": ("--algo", "reinforce", *TINY_REINFORCE, "--iterations", "4"),
    "sac": ("--algo", "sac", "--env", "pendulum", *TINY_SAC),
}


def train(folder: Path, *words: str) -> None:
    running = process("train", *words, "--quiet", "--out", folder)
    spoken = finished(running, timeout_s=240)
    assert spoken.code == 0, spoken.err
    recipe = checkpoint.load(folder / "latest.safetensors").recipe
    assert recipe.learning.device == ("cuda" if "--device" in words else "cpu")


def weights(folder: Path) -> dict[str, np.ndarray]:
    return dict(checkpoint.load(folder / "latest.safetensors").policy)


def digest(folder: Path) -> str:
    return checkpoint.load(folder / "latest.safetensors").digest


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_card_gives_the_same_bits_each_time(algorithm, tmp_path):
    words = (*ALGORITHMS[algorithm], "--device", "cuda")
    train(tmp_path / "1", *words)
    train(tmp_path / "2", *words)
    assert digest(tmp_path / "1") == digest(tmp_path / "2")


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_learners_that_share_a_card_end_in_the_bits_of_one(algorithm, tmp_path):
    words = (*ALGORITHMS[algorithm], *SHARDS, "--device", "cuda")
    words = (*words, "--set", "runtime.compare_learners_every=1")
    train(tmp_path / "1", *words)
    train(tmp_path / "2", *words, "--learners", "2")
    assert digest(tmp_path / "1") == digest(tmp_path / "2")


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_card_learns_nearly_what_a_processor_learns(algorithm, tmp_path):
    words = ALGORITHMS[algorithm]
    train(tmp_path / "card", *words, "--device", "auto")
    train(tmp_path / "processor", *words, "--set", "learning.provider=torch")
    card, processor = weights(tmp_path / "card"), weights(tmp_path / "processor")
    assert card.keys() == processor.keys()
    for name, found in card.items():
        np.testing.assert_allclose(found, processor[name], atol=2e-4, err_msg=name)


def test_a_run_that_was_stopped_goes_on_in_the_same_bits(tmp_path):
    words = (*TINY, "--set", "horizon_steps=512", "--device", "cuda")
    train(tmp_path / "whole", *words, "--steps", "512")
    train(tmp_path / "parts", *words, "--steps", "256")
    resumed = finished(process("resume", tmp_path / "parts", "--steps", "512", "--quiet"), 240)
    assert resumed.code == 0, resumed.err
    assert digest(tmp_path / "parts") == digest(tmp_path / "whole")


def test_a_run_of_a_card_says_which_and_is_evaluated_without_one(tmp_path):
    words = (*TINY, "--set", "horizon_steps=512", "--device", "cuda")
    train(tmp_path / "run", *words, "--steps", "256")
    hidden = {"CUDA_VISIBLE_DEVICES": ""}
    inspected = finished(process("inspect", tmp_path / "run", environment=hidden))
    assert inspected.code == 0, inspected.err
    assert torch.cuda.get_device_name(0) in inspected.out
    evaluated = finished(
        process("eval", tmp_path / "run" / "latest.safetensors", "--json", environment=hidden)
    )
    assert evaluated.code == 0, evaluated.err
    resumed = finished(process("resume", tmp_path / "run", "--steps", "512", environment=hidden))
    assert resumed.code == 2
    assert "This run learns on a GPU" in resumed.err
    assert "--device cpu" in resumed.err


@pytest.fixture
def nccl():
    """A group with its own GPU, which opens NCCL although it has only one member."""
    _, store = hosted(socket.create_server((HERE, 0)))
    group = TorchProcessGroup(0, 1, **gloo.PATIENCE, store=store)
    group.use_device("cuda:0")
    yield group
    group.close()


def test_nccl_opens_on_a_card_and_gathers_there(nccl):
    assert torch.distributed.get_backend(nccl._exchange) == "nccl"
    mine = np.arange(7, dtype=np.float32)
    for _ in range(3):
        np.testing.assert_array_equal(nccl.gather(mine), mine[None])
    assert nccl.broadcast({"a": 1}) == {"a": 1}
