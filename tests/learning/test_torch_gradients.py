"""Torch's copies of the parameters, as on a GPU, and errors for missing GPUs."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from commands import rlflame
from tiny_runs import run

from rlflame.learning import torch_gradients
from rlflame.learning.sac import loss_torch

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
    assert "This recipe learns on CUDA" in spoken.err


def test_a_card_is_for_torch_alone():
    spoken = rlflame("train", "--env", "cartpole", "--set", "learning.device=cuda")
    assert spoken.code == 2
    assert "only torch computes gradients on cuda: set provider to torch" in spoken.err


def test_learners_take_the_cards_in_turn(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch, "use_deterministic_algorithms", lambda on: None)
    found = [torch_gradients.select_device("cuda", rank) for rank in range(3)]
    assert found == ["cuda:0", "cuda:1", "cuda:0"]
    assert torch_gradients.select_device("cpu", 3) == "cpu"
