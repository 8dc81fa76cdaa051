"""Modules that are loaded lazily."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

from rlflame.rollout.envs.make import defer_imports


@pytest.fixture
def waiting(tmp_path, monkeypatch):
    """Make a module from a text. Import statements find it; its first use loads it."""

    def put(text: str) -> ModuleType:
        (tmp_path / "patient.py").write_text(text)
        defer_imports("patient")
        import patient

        return patient

    monkeypatch.syspath_prepend(tmp_path)
    yield put
    sys.modules.pop("patient", None)


def test_importing_runs_nothing_and_asking_does(waiting, capsys):
    patient = waiting("print('ran')\nvalue = 3\n")
    assert patient.__name__ == "patient"
    assert patient.__spec__.name == "patient"
    assert capsys.readouterr().out == ""
    assert patient.value == 3
    assert (patient.value, type(patient)) == (3, ModuleType)
    assert capsys.readouterr().out == "ran\n"
    with pytest.raises(AttributeError):
        _ = patient.other


def test_a_module_that_asks_for_itself_while_it_loads_gets_what_there_is(waiting):
    text = "first = 1\nimport patient\nseen = patient.first, hasattr(patient, 'last')\nlast = 2\n"
    assert waiting(text).seen == (1, False)


def test_a_module_that_does_not_load_says_so_each_time(waiting):
    patient = waiting("raise ImportError('no window')\n")
    for _ in range(2):
        with pytest.raises(ImportError, match="no window"):
            _ = patient.value


def test_what_is_loaded_or_absent_is_left_alone():
    before = sys.modules["pytest"]
    defer_imports("pytest", "no_such_module_anywhere")
    assert sys.modules["pytest"] is before
    assert "no_such_module_anywhere" not in sys.modules
