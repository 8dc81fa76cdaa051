"""Notes of `resume` on a machine that differs."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from rlflame.config import module_trust
from rlflame.experiment import resume


@pytest.mark.parametrize(
    ("recorded", "loaded", "wanted"),
    [
        ("a" * 64, "b" * 64, ["environment file: aaaaaaaaaaaa -> bbbbbbbbbbbb"]),
        ("a" * 64, "a" * 64, []),
        ("a" * 64, None, []),
        (None, "b" * 64, []),
    ],
)
def test_another_environment_file_is_a_difference(recorded, loaded, wanted, monkeypatch):
    monkeypatch.setattr(module_trust, "get_loaded_digest", lambda: loaded)
    environment = SimpleNamespace(file_digest=recorded)
    recipe = SimpleNamespace(learning=SimpleNamespace(environment=environment))
    source = SimpleNamespace(fingerprint={"numpy": "2"}, recipe=recipe)
    assert resume.find_machine_differences(source, {"numpy": "2"}) == wanted
