"""All commands refuse an impossible run before they write anything."""

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
        (("--set", "network.exploration=gsde"), 2, "gsde needs continuous actions"),
    ],
)
def test_the_same_is_refused_in_the_same_words(words, code, text, more):
    spoken = rlflame("train", *TINY, *words, *more)
    assert spoken.code == code
    assert text in spoken.err
    assert not list(Path().iterdir())


def test_a_batch_is_scaled_by_a_number_of_learners():
    refused = rlflame("train", *TINY, "--scale-batch")
    assert (refused.code, "--scale-batch --learners 2" in refused.err) == (2, True)
    assert not list(Path().iterdir())


def test_memory_is_checked_in_a_sweep_too_and_not_in_a_dry_run(monkeypatch):
    monkeypatch.setattr(preflight, "measure_usable_bytes", lambda: 1_000)
    for more in ((), ("--seeds", "0-1")):
        refused = rlflame("train", *TINY, *more)
        assert refused.code == 2
        assert "only 1 kB " in refused.err
    assert rlflame("train", *TINY, "--dry-run").code == 0
    assert not list(Path().iterdir())
