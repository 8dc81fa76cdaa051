"""What refuses a run refuses it in every command, before anything is written."""

from __future__ import annotations

from pathlib import Path

import pytest
from commands import TINY, rlflame

from rlflame.experiment import preflight


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    "more", [(), ("--seeds", "0-1"), ("--dry-run",)], ids=["run", "sweep", "dry"]
)
@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        (("--env", "hoper"), 2, "'hoper'"),
        (("--set", "learning.init_policy=" + "0" * 32), 2, "no file was given"),
        (("--init-from", "absent.safetensors"), 1, "absent.safetensors does not exist"),
        (
            ("--set", "runtime.critic_helper=on", "--set", "learning.threads=2"),
            2,
            "A critic helper does not support this recipe",
        ),
        (("--set", "network.exploration=gsde"), 2, "gsde needs continuous actions"),
    ],
)
def test_the_same_is_refused_in_the_same_words(words, code, text, more):
    spoken = rlflame("train", *TINY, *words, *more)
    assert spoken.code == code
    assert text in spoken.err
    assert not list(Path().iterdir())


def test_learners_that_cannot_share_the_work_are_refused_at_train_and_resume():
    words = ("--set", "learning.gradient_shards=4", "--set", "learning.horizon_steps=999",
             "--steps", "64", "--out", "x")  # fmt: skip
    for more in ((), ("--dry-run",)):
        refused = rlflame("train", *TINY, *words, "--learners", "3", *more)
        assert (refused.code, "3 learners cannot share 4 shards" in refused.err) == (2, True)
    assert not list(Path().iterdir())
    assert rlflame("train", *TINY, *words).code == 0
    before = (Path("x") / "config.toml").read_bytes()
    refused = rlflame("resume", "x", "--steps", "128", "--learners", "3")
    assert (refused.code, "3 learners cannot share 4 shards" in refused.err) == (2, True)
    assert (Path("x") / "config.toml").read_bytes() == before


def test_learners_that_cannot_share_are_refused_before_the_batch_is_scaled():
    words = ("--set", "learning.gradient_shards=8", "--learners", "16", "--scale-batch")
    refused = rlflame("train", *TINY, *words)
    assert (refused.code, "16 learners cannot share 8 shards" in refused.err) == (2, True)
    assert not list(Path().iterdir())


def test_memory_is_checked_in_a_sweep_too_and_not_in_a_dry_run(monkeypatch):
    monkeypatch.setattr(preflight, "measure_usable_bytes", lambda: 1_000)
    for more in ((), ("--seeds", "0-1")):
        refused = rlflame("train", *TINY, *more)
        assert refused.code == 2
        assert "only 1 kB are available" in refused.err
    assert rlflame("train", *TINY, "--dry-run").code == 0
    assert not list(Path().iterdir())
