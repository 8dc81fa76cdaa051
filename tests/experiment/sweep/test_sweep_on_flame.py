"""Seeds on one cluster: one application, one session, and identical results.

The cluster is the stub, or the one that FLAME_ENDPOINT names.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import flames
import pytest
from commands import TINY, finished, is_alive, process, rlflame, wait_until
from flame_stub import FlameStub
from test_cli_app import children_of
from test_sweep import assert_as_alone, the_one_of

from rlflame.rollout.seeding import Role, make_reset_seed

WORDS = (*TINY, "--env", "fakes:Fake-v0", "--env-file", flames.FAKES, "--steps", "320")
ON_FLAME = ("--fleet", "flame", "--workers", "2", "--set", "runtime.flame.delay_release_s=5")


@pytest.fixture
def stub() -> Any:
    with FlameStub(executors=2) as found:
        yield found


def lone(tmp_path: Path, seed: int, words: tuple[str, ...] = WORDS) -> Path:
    out = tmp_path / f"alone-{seed}"
    assert rlflame("train", *words, "--seed", str(seed), "--out", out).code == 0
    return out


def ours(stub: FlameStub) -> list[str]:
    return [name for name in stub.applications() if name.startswith("rlflame")]


def test_seeds_share_one_session_and_are_lone_runs(tmp_path: Path, stub: FlameStub) -> None:
    out = tmp_path / "job"
    running = process(
        "train", *WORDS, *ON_FLAME, "--seeds", "0-2", "--out", out, "--json",
        environment=stub.environment(),
    )  # fmt: skip
    applications: set[str] = set()
    sessions: set[str] = set()
    while running.poll() is None:
        applications.update(ours(stub))
        sessions.update(session.id for session in stub.sessions())
        time.sleep(0.05)
    spoken = finished(running)
    assert spoken.code == 0, spoken.err
    assert (len(applications), len(sessions)) == (1, 1)
    assert not ours(stub)
    for seed in range(3):
        assert_as_alone(out / f"seed-{seed}", lone(tmp_path, seed))


def held(tmp_path: Path) -> tuple[tuple[str, ...], Path]:
    marker = tmp_path / "go"
    wait_in = make_reset_seed(1, Role.RESET, 0, 0, 5)
    words = WORDS
    for pair in ("fault=wait", f"marker={marker}", f"seed={wait_in}"):
        words += ("--env-kwargs", pair)
    return words, marker


def test_a_seed_that_is_killed_gives_back_what_it_had(tmp_path: Path, stub: FlameStub) -> None:
    """The other seeds keep the executors, and all objects of the seed are deleted."""
    words, marker = held(tmp_path)
    out = tmp_path / "job"
    running = process(
        "train", *words, *ON_FLAME, "--seeds", "0-2", "--out", out,
        environment=stub.environment(),
    )  # fmt: skip
    wait_until(marker.with_suffix(".here").exists)
    os.kill(the_one_of(out / "seed-1", children_of(running.pid)), signal.SIGKILL)
    spoken = finished(running)
    assert spoken.code == 1
    assert "Seed 1 failed: Its process was killed by signal 9, SIGKILL." in spoken.err
    assert not ours(stub)
    marker.touch()
    assert rlflame("resume", out, "--local", "--env-file", flames.FAKES).code == 0
    for seed in range(3):
        assert_as_alone(out / f"seed-{seed}", lone(tmp_path, seed, words))


def test_a_signal_ends_all_seeds_and_withdraws_from_the_cluster(
    tmp_path: Path, stub: FlameStub
) -> None:
    words, marker = held(tmp_path)
    out = tmp_path / "job"
    running = process(
        "train", *words, *ON_FLAME, "--seeds", "1,0", "--out", out,
        environment=stub.environment(),
    )  # fmt: skip
    wait_until(marker.with_suffix(".here").exists)
    children = children_of(running.pid)
    running.send_signal(signal.SIGINT)
    spoken = finished(running)
    assert spoken.code == 130
    assert not any(map(is_alive, children))
    assert not ours(stub)
    marker.touch()
    again = process(
        "resume", out, "--env-file", flames.FAKES, "--json", environment=stub.environment()
    )
    spoken = finished(again)
    assert spoken.code == 0, spoken.err
    for seed in (0, 1):
        assert_as_alone(out / f"seed-{seed}", lone(tmp_path, seed, words))


def test_an_environment_that_fails_on_the_cluster_fails_its_seed_alone(
    tmp_path: Path, stub: FlameStub
) -> None:
    wrong = make_reset_seed(1, Role.RESET, 0, 0, 3)
    words = (*WORDS, "--env-kwargs", "fault=raise", "--env-kwargs", f"seed={wrong}")
    words += (*ON_FLAME, "--seeds", "0-1", "--out", str(tmp_path / "x"), "--json")
    spoken = finished(process("train", *words, environment=stub.environment()))
    assert spoken.code == 1
    document = spoken.json()
    assert [one["state"] for one in document["seeds"]] == ["finished", "failed"]
    assert f"seed {wrong}" in document["seeds"][1]["error"]
    assert "the moon is wrong" in spoken.err


def test_a_missing_cluster_is_an_error_before_a_folder_exists(tmp_path: Path) -> None:
    nowhere = {"FLAME_ENDPOINT": "http://127.0.0.1:9", "FLAME_CACHE_ENDPOINT": "grpc://127.0.0.1:9"}
    words = ("train", *WORDS, *ON_FLAME, "--seeds", "0-1", "--out", tmp_path / "x")
    spoken = finished(process(*words, environment=nowhere))
    assert spoken.code == 3
    assert not (tmp_path / "x").exists()
