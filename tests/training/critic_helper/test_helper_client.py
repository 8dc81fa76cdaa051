"""A critic helper as a real process: the bits of a run without one, whatever becomes of it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from contextlib import contextmanager, suppress
from types import SimpleNamespace

import numpy as np
import pytest
from commands import finished, process, rlflame
from halves import assert_same, batches, learner, settings, spec_of

from rlflame.config.recipe import Recipe
from rlflame.config.runtime import RuntimeSettings
from rlflame.errors import LearningError
from rlflame.rollout.process.channel import Channel
from rlflame.storage import checkpoint
from rlflame.training.critic_helper import helper_client
from rlflame.training.critic_helper.connection import (
    ConnectionTimeout,
    LostConnection,
    PeerConnection,
)
from rlflame.training.critic_helper.helper_client import CriticHelper
from rlflame.training.trainer import Progress

#: CartPole in batches of 128 steps, with a minibatch small enough that a helper has much to do.
LONG = (
    *("--set", "rollout.num_slots=2", "--set", "rollout.envs_per_slot=8"),
    *("--set", "rollout.steps=8", "--set", "ppo.minibatch_size=16", "--set", "ppo.epochs=4"),
    *("--set", "evaluation.final_episodes=2", "--set", "evaluation.max_episode_steps=20"),
)


def until(what, timeout_s: float = 60.0) -> None:
    end = time.monotonic() + timeout_s
    while not what():
        assert time.monotonic() < end, "it never became true"
        time.sleep(0.02)


def gone(pid: int) -> bool:
    shown = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True)
    return not shown.stdout.strip() or shown.stdout.strip().startswith("Z")


@contextmanager
def accompanied(learning, spec):
    """A learner with a critic helper that has loaded, its process, and what is noted."""
    notes: list[str] = []
    alone = learner(learning, spec)
    helper = CriticHelper(alone, learning, spec, RuntimeSettings(), notes.append)
    try:
        until(lambda: helper._connection is None or helper._connection.has_message())
        yield helper, helper, notes
    finally:
        helper.close()


@pytest.fixture(scope="module")
def plain():
    """Settings, batches, and where a learner alone stands after each of them."""
    learning, spec = settings(), spec_of()
    data = batches(spec, learning, 4)
    alone, metrics, states = learner(learning, spec), [], []
    for batch in data:
        metrics.append(alone.update(batch, 0.1))
        states.append(alone.get_state())
    return SimpleNamespace(learning=learning, spec=spec, data=data, metrics=metrics, states=states)


def test_a_run_with_a_critic_helper_has_the_same_metrics_and_the_same_state(plain):
    with accompanied(plain.learning, plain.spec) as (both, helper, notes):
        for batch, metrics, state in zip(plain.data, plain.metrics, plain.states, strict=True):
            assert both.update(batch, 0.1) == metrics
            assert helper.connection is not None
            assert_same(both.get_state(), state)
        assert helper.batch_count == 4
        assert notes == []


def test_a_critic_helper_goes_on_from_where_a_run_is_taken_up(plain):
    with accompanied(plain.learning, plain.spec) as (both, helper, _):
        both.load_state(plain.states[1])
        both.update(plain.data[2], 0.1)
        both.load_state(plain.states[0])  # once it has joined, too
        both.update(plain.data[1], 0.1)
        both.update(plain.data[2], 0.1)
        assert helper.connection is not None
        assert_same(both.get_state(), plain.states[2])


def test_until_a_critic_helper_has_loaded_all_is_learned_here(plain, monkeypatch):
    with accompanied(plain.learning, plain.spec) as (both, helper, _):
        with monkeypatch.context() as loading:
            loading.setattr(helper._connection, "has_message", lambda: False)
            both.update(plain.data[0], 0.1)
            assert helper.connection is None
        both.update(plain.data[1], 0.1)
        assert helper.connection is not None
        assert_same(both.get_state(), plain.states[1])


@pytest.mark.parametrize("moment", ["between batches", "at once", "later", "at the end"])
def test_a_critic_helper_that_is_killed_costs_no_bit(plain, moment, monkeypatch):
    with accompanied(plain.learning, plain.spec) as (both, helper, notes):
        both.update(plain.data[0], 0.1)
        pid, link = helper._process.pid, helper.connection
        asked = []

        def dying(method, at):
            def call(*arrays):
                asked.append(at)
                if asked.count(at) == at[1]:
                    os.kill(pid, signal.SIGKILL)
                    until(lambda: gone(pid))
                return method(*arrays)

            return call

        if moment == "between batches":
            os.kill(pid, signal.SIGKILL)
            until(lambda: gone(pid))
        elif moment == "at the end":
            last = 8 + 2 + 3  # minibatches, estimates, and the critic
            exchange = dying(link.exchange, ("exchange", last))

            def lost(mine, theirs):
                exchange(mine, theirs)
                if len(asked) == last:  # what the pipe still held counts for nothing
                    raise LostConnection

            monkeypatch.setattr(link, "exchange", lost)
        else:
            at = ("exchange", 1 if moment == "at once" else 6)
            monkeypatch.setattr(link, "exchange", dying(link.exchange, at))
        for batch, metrics, state in list(
            zip(plain.data, plain.metrics, plain.states, strict=True)
        )[1:]:
            assert both.update(batch, 0.1) == metrics
            assert_same(both.get_state(), state)
        (note,) = notes
        assert f"(process {pid}) was lost: it was killed by signal 9" in note


def test_a_critic_helper_that_hangs_is_killed_after_the_deadline(plain):
    with accompanied(plain.learning, plain.spec) as (both, helper, notes):
        both.update(plain.data[0], 0.1)
        pid = helper._process.pid
        helper._deadline_s, helper._connection.deadline_ms = 0.3, 300.0
        os.kill(pid, signal.SIGSTOP)
        both.update(plain.data[1], 0.1)
        assert_same(both.get_state(), plain.states[1])
        assert gone(pid)
        (note,) = notes
        assert "it did not answer for 0.3 s" in note


def test_a_critic_helper_with_other_kernels_is_not_used(plain, monkeypatch):
    monkeypatch.setattr(
        helper_client, "compute_fingerprint", lambda learning: {"core": "of another machine"}
    )
    with accompanied(plain.learning, plain.spec) as (both, helper, notes):
        both.update(plain.data[0], 0.1)
        assert helper.connection is None
        assert_same(both.get_state(), plain.states[0])
        (note,) = notes
        assert "computes with other kernels" in note


def test_what_a_learner_refuses_ends_its_critic_helper_as_well():
    learning, spec = settings(minibatch_size=8, scale_rewards=False), spec_of()
    (batch,) = batches(spec, learning, 1)
    batch.rewards.fill(1e300)
    with accompanied(learning, spec) as (both, helper, notes):
        with pytest.raises(LearningError, match="not finite"):
            both.update(batch, 0.1)
        assert helper.connection is None
        assert gone(helper._process.pid)
        assert notes == []


def test_an_update_that_is_broken_off_leaves_no_critic_helper_that_waits(plain, monkeypatch):
    def broken_off(mine, theirs):
        raise KeyboardInterrupt

    with accompanied(plain.learning, plain.spec) as (both, helper, _):
        both.update(plain.data[0], 0.1)
        monkeypatch.setattr(helper.connection, "exchange", broken_off)
        with pytest.raises(KeyboardInterrupt):
            both.update(plain.data[1], 0.1)
        assert helper.connection is None
        assert gone(helper._process.pid)


def test_numbers_that_cannot_be_told_are_learned_from_alone(plain, monkeypatch):
    with accompanied(plain.learning, plain.spec) as (both, helper, notes):
        both.update(plain.data[0], 0.1)
        told = helper.connection.send_message
        monkeypatch.setattr(
            helper.connection, "send_message", lambda value: told({"x": np.array([np.inf])})
        )
        both.update(plain.data[1], 0.1)
        assert_same(both.get_state(), plain.states[1])
        (note,) = notes
        assert "cannot be told of numbers that are not finite" in note


def test_a_critic_helper_that_cannot_be_loaded_is_done_without(plain, monkeypatch):
    monkeypatch.setattr(
        helper_client.blas, "make_child_environment", lambda: {"PYTHONMALLOC": "nothing"}
    )
    with accompanied(plain.learning, plain.spec) as (both, helper, notes):
        both.update(plain.data[0], 0.1)
        assert_same(both.get_state(), plain.states[0])
        assert helper.connection is None
        (note,) = notes
        assert "it ended with exit code 1 (" in note


def test_a_critic_helper_ignores_an_interrupt(plain):
    with accompanied(plain.learning, plain.spec) as (both, helper, _):
        both.update(plain.data[0], 0.1)
        os.kill(helper._process.pid, signal.SIGINT)
        both.update(plain.data[1], 0.1)
        assert helper.connection is not None
        assert_same(both.get_state(), plain.states[1])


def find_helpers(pid: int) -> list[int]:
    shown = subprocess.run(
        ["ps", "-A", "-ww", "-o", "pid=,ppid=,args="], capture_output=True, text=True, check=True
    )
    rows = [line.split(None, 2) for line in shown.stdout.splitlines()]
    return [
        int(r[0]) for r in rows if int(r[1]) == pid and "rlflame.training.critic_helper" in r[2]
    ]


@pytest.fixture
def loaded(monkeypatch):
    """Batches wait until a critic helper has loaded."""
    join = CriticHelper._try_join

    def patient(helper):
        if helper._connection is not None and not helper._has_joined:
            assert helper._connection.has_message(60.0)
        return join(helper)

    monkeypatch.setattr(CriticHelper, "_try_join", patient)


def test_training_has_a_critic_helper_of_itself(tmp_path, loaded, monkeypatch):
    monkeypatch.setattr(helper_client.machine, "compute_usable_share", lambda: 2.0)
    monkeypatch.setattr(helper_client, "_MIN_SAMPLES", 1)
    words = ("--steps", "512", "--set", "horizon_steps=1024", "--quiet", "--fleet", "local",
             "--workers", "2")  # fmt: skip
    assert rlflame("train", "--env", "cartpole", *LONG, *words, "--out", tmp_path / "x").code == 0
    assert rlflame("resume", tmp_path / "x", "--steps", "1024", "--quiet").code == 0
    entries = json.loads((tmp_path / "x" / "machines.json").read_text())
    assert [entry["critic_helper_batches"] for entry in entries] == [4, 4]


@pytest.mark.parametrize("fleet", ["inline", "local"])
def test_runs_with_and_without_a_critic_helper_end_in_the_same_bits(fleet, tmp_path, loaded):
    words = ("train", "--env", "cartpole", *LONG, "--steps", "40000", "--quiet")
    for kind in ("off", "on"):
        where = ("--set", f"runtime.critic_helper={kind}", "--set", f"runtime.fleet={fleet}")
        spoken = rlflame(*words, *where, "--workers", "2", "--out", tmp_path / kind)
        assert spoken.code == 0, spoken.err
        (entry,) = json.loads((tmp_path / kind / "machines.json").read_text())
        assert (entry["critic_helper_batches"] > 0) == (kind == "on")
    found = [checkpoint.load(tmp_path / kind / "latest.safetensors") for kind in ("off", "on")]
    assert found[0].digest == found[1].digest
    logs = [(tmp_path / kind / "metrics.jsonl").read_bytes() for kind in ("off", "on")]
    assert logs[0] == logs[1]


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_no_critic_helper_outlives_its_run(how, tmp_path):
    words = ("train", "--env", "cartpole", *LONG, "--json", "--steps", "9999999")
    running = process(
        *words, "--set", "runtime.critic_helper=on", "--out", tmp_path / "x", start_new_session=True
    )
    try:
        until(lambda: find_helpers(running.pid))
        (pid,) = find_helpers(running.pid)
        for line in running.stdout:
            if '"iteration"' in line:
                break
        if how in (signal.SIGINT, signal.SIGHUP):
            os.killpg(running.pid, how)  # as a terminal has it: all hear
        else:
            running.send_signal(how)
        spoken = finished(running)
        assert spoken.code == (-9 if how == signal.SIGKILL else 128 + how)
        until(lambda: gone(pid))
    finally:
        running.kill()


@pytest.mark.parametrize(
    "words",
    [
        ("--algo", "sac", "--env", "pendulum"),
        ("--algo", "reinforce"),
        ("--set", "learning.provider=torch"),
        ("--set", "learning.gradient_shards=2"),
        ("--set", "learning.threads=2"),
    ],
)
def test_a_recipe_that_does_not_come_in_halves_is_refused_by_name(words, tmp_path):
    env = () if "--env" in words else ("--env", "cartpole")
    out = ("--set", "runtime.critic_helper=on", "--out", tmp_path / "x")
    for further in ((), ("--dry-run",)):
        spoken = rlflame("train", *env, *words, *out, *further, "--fleet", "inline")
        assert spoken.code == 2
        assert "A critic helper does not support this recipe" in spoken.err
        assert "--set runtime.critic_helper=auto" in spoken.err
    assert not (tmp_path / "x").exists()


def recipe(steps=1_000_000, **learning):
    return Recipe.model_validate(
        {"learning": {**settings().model_dump(), **learning}, "stop_at_steps": steps}
    )


def wanted(
    recipe, *, cores=2.0, workers=2, fleet="local", runtime=None, progress=None, shared=False,
    monkeypatch,
):  # fmt: skip
    monkeypatch.setattr(helper_client.machine, "compute_usable_share", lambda: cores)
    where, runtime = SimpleNamespace(name=fleet, capacity=workers), runtime or RuntimeSettings()
    return helper_client.is_helper_worthwhile(
        recipe, runtime, where, progress or Progress(), is_shared=shared
    )


def test_a_run_has_a_critic_helper_of_itself_where_processors_are_idle_and_it_pays(monkeypatch):
    def found(one=None, **where):
        return wanted(one or recipe(), monkeypatch=monkeypatch, **where)

    assert found()
    assert found(fleet="flame", workers=1)
    assert not found(fleet="inline", workers=1)
    assert not found(workers=1)
    assert not found(cores=1.5)
    assert not found(shared=True)
    assert not found(recipe(steps=2_000))
    assert not found(progress=Progress(steps=999_000, iteration=9))
    assert not found(recipe(rollout={"num_slots": 1, "envs_per_slot": 8, "staleness": 1}))
    assert not found(recipe(gradient_shards=2))
    assert not found(runtime=RuntimeSettings(critic_helper="off"))
    assert found(cores=1, workers=1, fleet="inline", runtime=RuntimeSettings(critic_helper="on"))
    by_iterations = recipe().model_copy(update={"stop_at_steps": None, "stop_at_iterations": 9999})
    assert found(by_iterations)
    assert not found(by_iterations.model_copy(update={"stop_at_iterations": 9}))


def test_where_no_process_can_be_started_all_is_learned_here(monkeypatch):
    def refused(*args, **kwargs):
        raise OSError("Resource temporarily unavailable")

    monkeypatch.setattr(helper_client, "WorkerProcess", refused)
    notes: list[str] = []
    runtime, where = RuntimeSettings(critic_helper="on"), SimpleNamespace(name="local", capacity=2)

    def offered():
        plan = SimpleNamespace(recipe=recipe(), policy=spec_of())
        alone = learner(plan.recipe.learning, plan.policy)
        return helper_client.open_critic_helper(
            alone, plan, Progress(), runtime, where, notes.append, is_shared=False
        )

    with offered() as found:
        assert found is None
    assert "Resource temporarily unavailable" in notes.pop()
    monkeypatch.setattr(helper_client.blas, "can_set_threads", lambda: False)
    with offered() as found:
        assert found is None
    assert "threads" in notes.pop()


def test_a_critic_helper_that_hears_nothing_of_its_order_does_not_stay(plain, monkeypatch):
    started = []

    class Started(helper_client.WorkerProcess):
        def __init__(self, **options):
            super().__init__(**options)
            started.append(self)

    def refused(self, value):
        raise KeyboardInterrupt

    monkeypatch.setattr(helper_client, "WorkerProcess", Started)
    monkeypatch.setattr(PeerConnection, "send_message", refused)
    alone = learner(plain.learning, plain.spec)
    with pytest.raises(KeyboardInterrupt):
        CriticHelper(alone, plain.learning, plain.spec, RuntimeSettings(), print)
    (process,) = started
    assert gone(process.pid)


@pytest.fixture
def ends():
    """Two ends of a conversation, the second with a deadline, and the pipes below."""
    there, back = os.pipe(), os.pipe()
    pipes = [*there, *back]
    yield (
        PeerConnection(Channel(back[0], there[1])),
        PeerConnection(Channel(there[0], back[1]), deadline_s=60.0),
        pipes,
    )
    for pipe in pipes:
        with suppress(OSError):
            os.close(pipe)


def test_what_is_longer_than_a_pipe_is_exchanged_whole(ends):
    one, other, _ = ends
    mine, theirs = np.arange(300_000.0), -np.arange(500_000.0)
    found = np.empty_like(mine)
    thread = threading.Thread(target=other.exchange, args=(theirs, found))
    thread.start()
    received = np.empty_like(theirs)
    one.exchange(mine, received)
    thread.join()
    np.testing.assert_array_equal(received, theirs)
    np.testing.assert_array_equal(found, mine)


def test_messages_and_numbers_come_in_their_order(ends):
    one, other, _ = ends
    assert not other.has_message()
    one.send_message({"a": 1, "b": "c"})
    thread = threading.Thread(target=one.exchange, args=(np.arange(3.0), np.empty(0)))
    thread.start()
    assert other.has_message()
    assert other.receive_message() == {"a": 1, "b": "c"}
    found = np.zeros(3)
    other.exchange(np.empty(0), found)
    thread.join()
    np.testing.assert_array_equal(found, [0.0, 1.0, 2.0])


def test_numbers_of_another_length_are_not_taken(ends):
    one, other, _ = ends
    thread = threading.Thread(target=one.exchange, args=(np.arange(3.0), np.empty(0)))
    thread.start()
    with pytest.raises(LostConnection):
        other.exchange(np.empty(0), np.zeros(2))
    thread.join()


def test_a_message_is_not_taken_for_numbers_nor_numbers_for_a_message(ends):
    one, other, _ = ends
    one.send_message({"a": 1})
    thread = threading.Thread(target=one.exchange, args=(np.arange(2.0), np.empty(0)))
    thread.start()
    with pytest.raises(LostConnection):
        other.exchange(np.empty(0), np.zeros(2))
    thread.join()
    with pytest.raises(LostConnection):
        other.receive_message()


def test_an_end_that_is_silent_or_gone_is_told_apart(ends):
    _, other, pipes = ends
    other.deadline_ms = 1.0
    with pytest.raises(ConnectionTimeout):
        other.exchange(np.empty(0), np.zeros(2))
    os.close(pipes[1])
    with pytest.raises(LostConnection) as found:
        other.exchange(np.empty(0), np.zeros(2))
    assert not isinstance(found.value, ConnectionTimeout)
    os.close(pipes[2])
    with pytest.raises(LostConnection):
        other.exchange(np.zeros(2), np.empty(0))
