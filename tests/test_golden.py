"""Training is bit-for-bit identical to the golden table on all fleets.

`python benchmarks/golden.py` compares the whole table and prints the differences.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from pathlib import Path

import golden
import numpy as np
import pytest
import safetensors.numpy

SOURCE = golden.ROOT / "src"
#: Cases that end in the same policy: with more learners, threads or processes, resumed, with an
#: average of policies, or as the start of another run.
EQUAL = [
    ["init-reinforce-pendulum", "reinforce-pendulum"],
    ["init-sac-pendulum", "sac-pendulum", "sac-pendulum-average", "sac-pendulum-one-thread"],
    ["ppo-cartpole", "seeds-ppo-cartpole"],
    ["ppo-cartpole-learners", "ppo-cartpole-shards"],
    ["ppo-pendulum", "ppo-pendulum-units"],
    ["ppo-pendulum-learners", "ppo-pendulum-shards"],
    ["reinforce-cartpole", "resume-reinforce-cartpole"],
    ["reinforce-cartpole-learners", "reinforce-cartpole-shards"],
    ["sac-pendulum-learners", "sac-pendulum-shards"],
]
#: The cases of each test run: all algorithms, and both kinds of actions and environments.
FAST = [
    "ppo-cartpole",
    "ppo-pendulum-gsde-held",
    "ppo-hopper-v4",
    "reinforce-cartpole-continued",
    "reinforce-pendulum",
    "sac-hopper-quantiles-average",
    "sac-pendulum-segments",
    "resume-ppo-hopper-staleness",
]


@pytest.fixture(scope="module")
def module_environment() -> Iterator[pytest.MonkeyPatch]:
    """Restores the variables that `golden.use_core` sets."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OPENBLAS_CORETYPE", "x")
        patch.delenv("OPENBLAS_CORETYPE")
        yield patch


@pytest.fixture(scope="module")
def expected(module_environment: pytest.MonkeyPatch) -> golden.Table:
    """The table. Tests are skipped on machines that may give other results."""
    table = golden.Table.read(golden.TABLE)
    golden.use_core(table)
    with golden.make_runner("inline", None, 1, SOURCE) as runner:
        made_here = golden.run_cases(runner, FAST[:1])
    if differences := golden.list_machine_differences(table, made_here):
        shown = "; ".join(differences)
        pytest.skip(f"another kind of machine ({shown}): benchmarks/golden.py --against COMMIT")
    return table


def differences_on(
    fleet: str, workers: int | None, names: list[str], expected: golden.Table
) -> list[tuple[str, str, str]]:
    with golden.make_runner(fleet, workers, 2, SOURCE) as runner:
        actual = golden.run_cases(runner, names, jobs=2)
    assert sorted(actual.runs) == sorted(names)
    return golden.compare(expected, actual)


def test_a_few_runs_have_the_bits_of_the_table(expected: golden.Table) -> None:
    assert differences_on("inline", None, FAST, expected) == []


@pytest.mark.slow
@pytest.mark.parametrize(("fleet", "workers"), [("inline", None), ("local", 2), ("flame-stub", 2)])
def test_all_runs_have_the_bits_of_the_table(
    fleet: str, workers: int | None, expected: golden.Table
) -> None:
    assert differences_on(fleet, workers, list(golden.make_cases()), expected) == []


def test_the_table_has_every_case_and_no_other() -> None:
    assert sorted(golden.Table.read(golden.TABLE).runs) == sorted(golden.make_cases())


def test_cases_with_different_recipes_have_different_bits() -> None:
    """Cases have equal hashes only if differing options of commands do not matter."""
    runs = golden.Table.read(golden.TABLE).runs
    policies: dict[str, list[str]] = {}
    for name, parts in runs.items():
        for part, hashes in parts.items():
            if re.fullmatch(r"(\d+: )?policy", part):
                policies.setdefault(" ".join(hashes), []).append(name)
    equal = sorted(sorted(names) for names in policies.values() if len(names) > 1)
    assert equal == EQUAL


def test_a_changed_bit_is_a_difference() -> None:
    table = golden.Table.read(golden.TABLE)
    changed = copy.deepcopy(table)
    changed.runs["ppo-cartpole"]["policy"][0] = "0" * golden.DIGITS
    ((case, part, _),) = golden.compare(table, changed)
    assert (case, part) == ("ppo-cartpole", "policy")
    changed = copy.deepcopy(table)
    run = changed.runs["ppo-cartpole"]
    run["weights"] = run.pop("policy")
    assert len(golden.compare(table, changed)) == 2
    assert golden.compare(table, changed, merged=True) == []


def test_hashes_depend_on_bytes_types_and_shapes_and_not_on_names(tmp_path: Path) -> None:
    def hashes(arrays: dict[str, np.ndarray]) -> list[str]:
        path = tmp_path / "arrays.safetensors"
        safetensors.numpy.save_file(arrays, path)
        return sorted(golden.hash_array(*rest) for _, *rest in golden.read_tensors(path).arrays)

    array = np.arange(6, dtype=np.float32)
    first = hashes({"a": array, "b": array[:2]})
    assert hashes({"z": array, "c": array[:2]}) == first
    other = np.nextafter(array, np.float32(9))
    for changed in (array.reshape(2, 3), array.astype(np.float64), other):
        assert hashes({"a": changed, "b": array[:2]}) != first


def test_numbers_are_compared_without_the_names_of_their_keys() -> None:
    line = {"steps": 3, "nested": {"loss": 0.25, "missing": None, "word": "x"}, "list": [1, True]}
    renamed = {"at": 3, "n": {"error": 0.25}, "values": [1, 1]}
    numbers = golden.list_numbers(line)
    assert sorted(numbers) == [0.25, 1.0, 1.0, 3.0]
    assert golden.hash_numbers(numbers) == golden.hash_numbers(golden.list_numbers(renamed))
    renamed["n"]["error"] = 0.25000000000000006
    assert golden.hash_numbers(numbers) != golden.hash_numbers(golden.list_numbers(renamed))
