"""Runs that die or fill the disk at any file-system call continue undamaged.

The expected values come from an undisturbed run of the same recipe: equal digest, equal bytes.
"""

from __future__ import annotations

import random

import failpoints
import replays

#: The file operations of a tiny run. The tests must interrupt each of them.
KINDS = {
    "write metrics.jsonl",
    "write episodes.csv",
    "fsync metrics.jsonl",
    "fsync episodes.csv",
    "fsync folder",
    "write step.safetensors (temporary)",
    "fsync step.safetensors (temporary)",
    "replace step.safetensors",
    "link latest.safetensors (temporary)",
    "replace latest.safetensors",
    "unlink step.safetensors",
    "write best.safetensors (temporary)",
    "replace best.safetensors",
    "replace result.json",
    "replace config.toml",
}


def assert_unharmed(result):
    assert not result["complaints"], result["complaints"]
    assert result["runs"] > 0


def test_a_run_killed_at_any_call_is_resumed_to_equal_bytes(tmp_path):
    result = failpoints.failing_runs(failpoints.config(out=tmp_path / "run"))
    assert_unharmed(result)
    assert set(result["moments"]) >= KINDS


def test_a_machine_that_loses_power_is_resumed_to_equal_bytes(tmp_path):
    stale = {"rollout": {"staleness": 1}}
    wanted = failpoints.config(out=tmp_path / "run", learning=stale)
    chains = [[at] for at in range(2, 90, 5)]
    assert_unharmed(failpoints.failing_runs(wanted, power=True, chains=chains))


def test_physics_and_weights_in_flight_survive_a_kill(tmp_path):
    stale = {"rollout": {"staleness": 1}}
    wanted = failpoints.config("Hopper-v5", tmp_path / "run", learning=stale)
    assert_unharmed(failpoints.failing_runs(wanted, chains=[[12], [31], [50, 30], [69]]))


def test_whole_episodes_survive_a_kill_too(tmp_path):
    wanted = failpoints.config(
        "CartPole-v1", tmp_path / "run", learning={"algorithm": "reinforce"}, stop_at_steps=60
    )
    chains = [[at] for at in range(9, 90, 9)]
    assert_unharmed(failpoints.failing_runs(wanted, chains=chains))


def test_a_run_killed_again_and_again_is_resumed_to_equal_bytes(tmp_path):
    moments = random.Random(0)
    chains = [[moments.randrange(25, 75) for _ in range(4)] for _ in range(5)]
    result = failpoints.failing_runs(failpoints.config(out=tmp_path / "run"), chains=chains)
    assert_unharmed(result)


def test_the_driver_of_worker_processes_can_be_killed(tmp_path):
    wanted = failpoints.config(out=tmp_path / "run", runtime={"fleet": "local", "workers": 2})
    assert_unharmed(failpoints.failing_runs(wanted, chains=[[40, 30]]))


def test_a_full_disk_is_a_sentence_and_the_old_checkpoint_stays(tmp_path):
    wanted = failpoints.config(out=tmp_path / "run")
    assert_unharmed(failpoints.failing_runs(wanted, error="ENOSPC", of_each=1))


def test_a_disk_that_turns_read_only_is_a_sentence_too(tmp_path):
    wanted = failpoints.config(out=tmp_path / "run")
    chains = [[0], [7], [20], [40], [60], [80]]
    assert_unharmed(failpoints.failing_runs(wanted, error="EROFS", chains=chains))


# Runs with a replay buffer, whose segments are separate files.

REPLAY_KINDS = {
    "open segment.safetensors (temporary)",
    "write segment.safetensors (temporary)",
    "fsync segment.safetensors (temporary)",
    "replace segment.safetensors",
    "unlink segment.safetensors",
}


def replaying(out, **learning):
    return failpoints.config(out=out, learning={**replays.LEARNING, **learning})


def test_a_replay_killed_at_any_call_is_resumed_to_equal_bytes(tmp_path):
    chains = [[at] for at in range(5, 150, 9)]
    wanted = replaying(tmp_path / "run")
    result = failpoints.failing_runs(wanted, replay=True, chains=chains, about="segment")
    assert_unharmed(result)
    assert set(result["moments"]) >= REPLAY_KINDS


def test_a_replay_on_a_machine_that_loses_power_is_resumed_to_equal_bytes(tmp_path):
    wanted = replaying(tmp_path / "run", rollout={"staleness": 1})
    chains = [[at] for at in range(3, 140, 16)]
    asked = {"chains": chains, "about": "segment", "of_each": 1}
    result = failpoints.failing_runs(wanted, replay=True, power=True, **asked)
    assert_unharmed(result)
    assert set(result["moments"]) >= REPLAY_KINDS


def test_a_replay_killed_again_and_again_is_resumed_to_equal_bytes(tmp_path):
    moments = random.Random(0)
    chains = [[moments.randrange(20, 120) for _ in range(4)] for _ in range(3)]
    result = failpoints.failing_runs(replaying(tmp_path / "run"), replay=True, chains=chains)
    assert_unharmed(result)


def test_a_replay_on_a_full_disk_is_a_sentence_and_the_old_checkpoint_stays(tmp_path):
    wanted = replaying(tmp_path / "run")
    # On a full disk, files can still be removed.
    kinds = REPLAY_KINDS - {"unlink segment.safetensors"}
    asked = {"chains": [[at] for at in range(0, 140, 23)], "about": "segment", "of_each": 1}
    result = failpoints.failing_runs(wanted, replay=True, error="ENOSPC", **asked)
    assert_unharmed(result)
    assert set(result["moments"]) >= kinds
