"""Cluster failures: lost executors, services, objects and messages, long waits.

These tests use the stub, which fails on demand. test_base_contract has the tests that also run on
real clusters.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import flames
import pytest
import rollouts
from flame_stub import FlameStub
from test_base_contract import alone, eventually, slots

from rlflame.config.runtime import RuntimeSettings
from rlflame.errors import ConfigError, EnvironmentFailure, FleetError, FleetUnreachableError
from rlflame.fleet.base import FleetEvent
from rlflame.fleet.flame import bundle, object_cache
from rlflame.fleet.flame.client import FlameClient
from rlflame.fleet.flame.session_starter import SessionStarter
from rlflame.rollout import wire
from rlflame.rollout.task import RolloutTask


class Bench:
    """A stub for one test, and fleets on it with their events."""

    def __init__(self, stub: FlameStub) -> None:
        self.stub = stub
        self.events: list[FleetEvent] = []

    def fleet(self, workers: int = 2, **options: Any) -> Any:
        flames.settle(self.stub.environment())
        return flames.fleet(self.events.append, workers, **options)

    def kinds(self, kind: str) -> list[str]:
        return [event.text for event in self.events if event.kind == kind]

    def ours(self) -> tuple[list[str], list[str]]:
        """The applications and object keys of rlflame on the cluster."""
        names = [name for name in self.stub.applications() if name.startswith("rlflame")]
        return names, [key for key in self.stub.objects() if key.startswith("rlflame")]


@pytest.fixture
def bench() -> Iterator[Bench]:
    with FlameStub(executors=2) as stub:
        yield Bench(stub)


def send(fleet: Any, tasks: Sequence[RolloutTask]) -> Any:
    named = [
        dataclasses.replace(task, policy_id=fleet.put(rollouts.weights(task.policy)))
        for task in tasks
    ]
    submission = fleet.submit(named)
    for task in named:
        fleet.release(task.policy_id)
    return submission


def run(fleet: Any, tasks: Sequence[RolloutTask]) -> set[bytes]:
    return {wire.encode(fragment) for fragment in send(fleet, tasks)}


def expected(tasks: Sequence[RolloutTask]) -> set[bytes]:
    return {alone(task) for task in tasks}


# Ordinary life.


def test_nothing_is_left_behind(bench: Bench) -> None:
    with bench.fleet() as fleet:
        assert run(fleet, slots(6)) == expected(slots(6))
        assert bench.ours()[0]
    assert eventually(lambda: bench.ours() == ([], []))
    assert not [session for session in bench.stub.sessions() if session.state == "Open"]


def test_two_runs_share_a_cluster(bench: Bench) -> None:
    tasks = slots(4)
    with bench.fleet(1) as first, flames.fleet(bench.events.append, 1) as second:
        submissions = [send(fleet, tasks) for fleet in (first, second)]
        for submission in submissions:
            assert {wire.encode(fragment) for fragment in submission} == expected(tasks)
        assert len(bench.ours()[0]) == 2
    assert eventually(lambda: bench.ours() == ([], []))


def test_weights_are_uploaded_once_for_all_tasks_of_an_iteration(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    uploads, put = [], object_cache.put

    def count(prefix: str, content: bytes) -> object_cache.Reference:
        uploads.append(prefix)
        return put(prefix, content)

    monkeypatch.setattr(object_cache, "put", count)
    with bench.fleet() as fleet:
        for iteration in range(3):
            name = fleet.put(rollouts.weights(slots(1)[0].policy, seed=iteration))
            named = [dataclasses.replace(task, policy_id=name) for task in slots(4)]
            assert len(list(fleet.submit(named))) == 4
            fleet.release(name)
            assert (
                len([prefix for prefix in uploads if prefix.endswith("/shared")]) == iteration + 1
            )


def test_the_cache_does_not_grow(bench: Bench) -> None:
    with bench.fleet() as fleet:
        sizes = []
        for iteration in range(40):
            name = fleet.put(rollouts.weights(slots(1)[0].policy, seed=iteration))
            named = [dataclasses.replace(task, policy_id=name) for task in slots(4)]
            assert len(list(fleet.submit(named))) == 4
            fleet.release(name)
            assert eventually(lambda: not [k for k in bench.ours()[1] if k.count("-") > 6])
            sizes.append(len(bench.ours()[1]))
        # The code for executors, the lease, and objects that are about to be deleted.
        assert eventually(lambda: len(bench.ours()[1]) <= 2)
        assert max(sizes[20:]) <= max(sizes[:20]) + 2


def test_a_package_of_dependencies_is_installed_where_it_is_asked_for(bench: Bench) -> None:
    with bench.fleet(dependencies="install") as fleet:
        assert run(fleet, slots(3)) == expected(slots(3))
        assert [name for name in bench.ours()[0] if name.endswith("-i")]
        assert any("executors install packages" in text for text in bench.kinds("note"))
    assert eventually(lambda: bench.ours() == ([], []))


def test_a_python_that_executors_lack_is_refused_before_they_are_asked_for(bench: Bench) -> None:
    with bench.fleet(python_version="3.5") as fleet:
        with pytest.raises(FleetError, match="cannot run Python") as caught:
            run(fleet, slots(1))
        assert "Python 3.5" in caught.value.message
        own = f"3.{sys.version_info.minor}"
        assert own in caught.value.message
        assert f"runtime.flame.python_version={own}" in caught.value.hint
        assert not [name for name in bench.ours()[0] if name.endswith("-i")]
    assert eventually(lambda: bench.ours() == ([], []))


def test_the_python_of_the_executors_needs_no_second_session(bench: Bench) -> None:
    with bench.fleet(python_version=f"3.{sys.version_info.minor}") as fleet:
        assert run(fleet, slots(1)) == expected(slots(1))
        assert len(bench.ours()[0]) == 1


def test_what_is_shipped_is_small_and_knows_no_torch() -> None:
    assert len(bundle.make_archive()) < 100_000
    wanted = bundle.list_dependencies(("extra==1",))
    assert wanted[-1] == "extra==1"
    assert not [name for name in wanted if "torch" in name]
    assert len(bundle.make_package("rlflame-x", wanted)) < 4_000


def test_a_task_too_large_for_the_session_manager_goes_through_the_cache(bench: Bench) -> None:
    """For example, an environment that repeats the actions of a long episode."""
    (task,) = slots(1)
    heavy = dataclasses.replace(task, run="x" * (5 << 20))
    with bench.fleet(1) as fleet:
        assert len(wire.encode(heavy)) > 4 << 20
        assert run(fleet, [heavy]) == {alone(heavy)}
    assert eventually(lambda: bench.ours() == ([], []))


# Workers.


def test_an_environment_that_kills_its_process_costs_a_retry(bench: Bench, tmp_path: Path) -> None:
    env = rollouts.fake(fault="kill_once", marker=str(tmp_path / "once"))
    with bench.fleet() as fleet:
        assert run(fleet, slots(4, env)) == expected(slots(4, env))
    assert bench.kinds("retried") == ["killed by signal 9, SIGKILL"]


def test_an_environment_that_always_kills_is_named(bench: Bench) -> None:
    env = rollouts.fake(fault="print_and_die")
    with bench.fleet(max_retries=2) as fleet:
        with pytest.raises(FleetError, match=r"died 3 times .*slot 0 of iteration 0") as caught:
            run(fleet, slots(1, env))
        assert "a word past Python" in caught.value.detail
        # The cluster is as healthy as before the run.
        assert run(fleet, slots(3)) == expected(slots(3))


def test_an_environment_that_hangs_is_named_with_its_place(bench: Bench) -> None:
    victim = slots(1, rows=2)[0].states[1].seed
    env = rollouts.fake(fault="hang", seed=victim)
    with bench.fleet(1, step_deadline_s=1.0) as fleet:
        with pytest.raises(EnvironmentFailure, match=f"row 1, seed {victim}, step 3"):
            run(fleet, slots(1, env, rows=2))
        assert run(fleet, slots(1)) == expected(slots(1))
    assert bench.kinds("retried") == ["its worker did not answer in time"]


def test_a_service_that_is_killed_takes_its_session_up_again(bench: Bench) -> None:
    with bench.fleet(1) as fleet:
        assert run(fleet, slots(2)) == expected(slots(2))
        (before,) = fleet.probe()
        os.kill(int(before["pid"]), signal.SIGKILL)
        assert run(fleet, slots(6)) == expected(slots(6))
        after = [worker for worker in fleet.probe() if worker["name"] != before["name"]]
        assert {worker["pid"] for worker in after} != {before["pid"]}
        # The executor and its processes are the same.
        assert len(bench.stub.executors()) == 1


def test_an_executor_that_is_lost_whole_costs_retries(bench: Bench, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    env = rollouts.fake(fault="wait", marker=str(gate))
    with bench.fleet() as fleet:
        assert run(fleet, slots(2)) == expected(slots(2))
        submission = send(fleet, slots(5, env))
        assert eventually(gate.with_suffix(".here").exists)
        bench.stub.kill_all_children(signal.SIGKILL)
        gate.touch()
        assert {wire.encode(f) for f in submission} == expected(slots(5, env))
    assert bench.kinds("retried")


def test_an_executor_that_fails_all_it_is_given_is_named(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlflame.fleet.flame.scheduler._BREAKER_S", 0.0)
    with bench.fleet(1) as fleet:
        assert run(fleet, slots(1)) == expected(slots(1))
        bench.stub.faults.black_hole = True
        bench.stub.kill_all_children(signal.SIGKILL)
        with pytest.raises(FleetError, match="All recent tasks failed") as caught:
            run(fleet, slots(4))
        (node,) = {executor.node for executor in bench.stub.executors()}
        assert node in caught.value.message
        assert "wait 40 s" in caught.value.hint


# Services.


def test_a_session_manager_that_restarts_is_waited_for(bench: Bench, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    env = rollouts.fake(fault="wait", marker=str(gate))
    with bench.fleet() as fleet:
        assert run(fleet, slots(1)) == expected(slots(1))
        submission = send(fleet, slots(4, env))
        assert eventually(gate.with_suffix(".here").exists)
        bench.stub.restart_session_manager()
        gate.touch()
        assert {wire.encode(f) for f in submission} == expected(slots(4, env))


def test_a_cache_that_forgets_everything_gets_the_weights_again(bench: Bench) -> None:
    with bench.fleet() as fleet:
        assert run(fleet, slots(2)) == expected(slots(2))
        name = fleet.put(rollouts.weights(slots(1)[0].policy, seed=7))
        named = [dataclasses.replace(task, policy_id=name) for task in slots(2)]
        assert len(list(fleet.submit(named))) == 2
        other = fleet.put(rollouts.weights(slots(1)[0].policy, seed=8))
        fleet._policies.find_reference(other)
        bench.stub.restart_cache(lose=True)
        named = [dataclasses.replace(task, policy_id=other) for task in slots(3)]
        found = {wire.encode(fragment) for fragment in fleet.submit(named)}
        assert found == {alone(task, 8) for task in slots(3)}
    assert "its weights were missing from the cache" in bench.kinds("retried")


@pytest.mark.parametrize("lost", ["watch_ends", "watch_empty"])
def test_a_watch_that_ends_without_a_word_is_asked_after(bench: Bench, lost: str) -> None:
    setattr(bench.stub.faults, lost, True)
    with bench.fleet() as fleet:
        assert run(fleet, slots(4)) == expected(slots(4))


@pytest.mark.parametrize("fault", ["fail_tasks", "cancel_tasks", "get_task_errors"])
def test_tasks_that_the_cluster_fails_are_sent_again(bench: Bench, fault: str) -> None:
    with bench.fleet() as fleet:
        assert run(fleet, slots(2)) == expected(slots(2))
        setattr(bench.stub.faults, fault, 3)
        assert run(fleet, slots(4)) == expected(slots(4))


def test_a_lost_node_s_tasks_run_elsewhere(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    env = rollouts.fake(fault="wait", marker=str(gate))
    with FlameStub(executors=2, nodes=2) as stub:
        bench = Bench(stub)
        with bench.fleet(2) as fleet:
            submission = send(fleet, slots(4, env))
            assert eventually(gate.with_suffix(".here").exists)
            nodes = [executor.node for executor in stub.executors()]
            stub.lose_node(nodes[0])
            gate.touch()
            assert {wire.encode(f) for f in submission} == expected(slots(4, env))


# Starting.


def test_an_unreachable_cluster_is_an_error_at_once() -> None:
    flames.settle(
        {"FLAME_ENDPOINT": "http://127.0.0.1:9", "FLAME_CACHE_ENDPOINT": "grpc://[::1]:9"}
    )
    with pytest.raises(
        FleetUnreachableError, match=r"does not answer at http://127.0.0.1:9"
    ) as caught:
        flames.fleet(print)
    assert "comes from FLAME_ENDPOINT" in caught.value.message
    assert "cluster-check" in caught.value.hint
    assert caught.value.exit_code == 3


def test_an_endpoint_without_a_scheme_is_corrected() -> None:
    flames.settle({"FLAME_ENDPOINT": "127.0.0.1:8080"})
    with pytest.raises(ConfigError, match="not have the form http or https://HOST:PORT") as caught:
        FlameClient()
    assert caught.value.hint == "export FLAME_ENDPOINT=http://127.0.0.1:8080"


def test_a_failed_start_keeps_the_message_of_the_cluster(bench: Bench) -> None:
    bench.stub.faults.bind_failure = "the disk is full of sand"
    with bench.fleet() as fleet, pytest.raises(FleetError, match="full of sand"):
        run(fleet, slots(1))
    assert eventually(lambda: bench.ours() == ([], []))


def test_no_executor_within_the_deadline_is_an_end(bench: Bench) -> None:
    bench.stub.faults.no_executors = True
    with (
        bench.fleet(start_deadline_s=1.0) as fleet,
        pytest.raises(FleetUnreachableError, match="No executor answered within 1 s"),
    ):
        run(fleet, slots(1))
    assert eventually(lambda: bench.ours() == ([], []))


def test_a_missing_template_is_named(bench: Bench) -> None:
    bench.stub.faults.flmrun_missing = True
    with (
        bench.fleet() as fleet,
        pytest.raises(FleetUnreachableError, match="no application flmrun"),
    ):
        run(fleet, slots(1))


def test_a_waiting_run_names_the_sessions_that_hold_the_executors() -> None:
    """Of five executors, sessions have two, one and none; two have no session."""

    class Held:
        def call(self, method: str) -> list[Any]:
            assert method == "list_executors"
            states = [SimpleNamespace(session_id=name) for name in ("a", "", "b", "a", "")]
            return [SimpleNamespace(status=status) for status in states]

    starter = SessionStarter(Held(), "app", {}, RuntimeSettings(), print)  # type: ignore[arg-type]
    said = starter.format_situation("mine", 12.0)
    assert "12 s: other sessions have 3 of 5 executors (a has 2)" in said
    assert "cluster-check --clean" in said
    assert starter.format_situation("b", 12.0) == "starting 1 executor, 12 s"
    starter._installs = True
    assert starter.format_situation("a", 3.0) == "installing on 2 executors, 3 s"


@pytest.mark.parametrize("asked", [{"cpu": 3}, {"memory": "9g"}])
def test_a_request_larger_than_every_node_is_an_error(bench: Bench, asked: dict[str, Any]) -> None:
    """The stub's node has two processors and 8 GiB."""
    with (
        bench.fleet(**asked, start_deadline_s=1.0) as fleet,
        pytest.raises(
            FleetUnreachableError,
            match="no node is large enough",
        ),
    ):
        run(fleet, slots(1))


# Ending.


def test_closing_ends_tasks_that_still_run(bench: Bench, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    env = rollouts.fake(fault="wait", marker=str(gate))
    fleet = bench.fleet()
    submission = send(fleet, slots(6, env))
    assert eventually(gate.with_suffix(".here").exists)
    fleet.close()
    with pytest.raises(FleetError, match="closed"):
        list(submission)
    assert bench.ours() == ([], [])
    gate.touch()


def test_closing_before_anything_has_started_leaves_nothing(bench: Bench) -> None:
    bench.stub.faults.cold_start_s = 600.0
    bench.fleet().close()
    assert eventually(lambda: bench.ours()[0] == [])


def test_a_session_that_could_not_be_closed_is_noted_with_the_remedy(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlflame.fleet.flame.fleet._DRAIN_S", 0.5)
    with bench.fleet() as fleet:
        assert run(fleet, slots(1)) == expected(slots(1))
        bench.stub.faults.close_refused = True
    assert "cluster-check --clean" in bench.kinds("note")[-1]


def test_a_straggler_is_given_to_a_second_executor(bench: Bench, tmp_path: Path) -> None:
    """The first executor waits for a file that only the second one creates."""
    env = rollouts.fake(fault="hang_once", marker=str(tmp_path / "once"))
    with bench.fleet(2) as fleet:
        assert run(fleet, slots(4)) == expected(slots(4))
        assert run(fleet, slots(1, env)) == expected(slots(1, env))
    assert [event.kind for event in bench.events].count("speculated") == 1


def test_processes_of_workers_end_with_the_fleet(bench: Bench) -> None:
    with bench.fleet() as fleet:
        run(fleet, slots(4))
        children = [worker["child"] for worker in fleet.probe()]
    assert children
    assert eventually(lambda: not any(_alive(int(pid)) for pid in children))


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    state = Path(f"/proc/{pid}/stat")
    return not state.exists() or state.read_text().rsplit(")", 1)[1].split()[0] != "Z"


def test_a_service_whose_executor_manager_died_ends_itself_once_its_run_is_over() -> None:
    script = """if True:
        import time
        from rlflame.fleet.flame import service
        service._ORPHAN_CHECK_INTERVAL_S, service._ORPHAN_S = 0.05, 0.0
        service._LeaseReader.is_over = lambda self: True
        service.Service(core="", step_deadline_s=1.0, lease={})
        time.sleep(600)
        raise SystemExit("it still lives")
    """
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=120)
    assert ended.returncode == 0, ended.stderr


# Endings that once never came.


def test_executors_that_are_lost_and_cannot_start_again_end_the_run(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlflame.fleet.flame.scheduler._STALLED_S", 0.2)
    with bench.fleet() as fleet:
        assert run(fleet, slots(1)) == expected(slots(1))
        bench.stub.faults.bind_failure = "the disk is full of sand"
        bench.stub.expire_idle()
        with pytest.raises(FleetError, match="full of sand"):
            run(fleet, slots(2))


def test_weights_that_stay_lost_end_the_run(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlflame.fleet.retry_policy.MAX_STRAYS", 3)
    with bench.fleet() as fleet:
        assert run(fleet, slots(1)) == expected(slots(1))
        bench.stub.faults.cache_missing_prefix = f"{fleet._application}/shared"
        bench.stub.faults.cache_missing = True
        name = fleet.put(rollouts.weights(slots(1)[0].policy, seed=9))
        (task,) = (dataclasses.replace(task, policy_id=name) for task in slots(1))
        with pytest.raises(FleetError, match="without being run: its weights were missing"):
            list(fleet.submit([task]))


def test_a_session_manager_that_stays_away_ends_the_run(bench: Bench) -> None:
    with bench.fleet(1, reconnect_s=0.5) as fleet:
        assert run(fleet, slots(1)) == expected(slots(1))
        bench.stub.stop_session_manager()
        with pytest.raises(FleetError, match=r"not answered for 0\.5 s"):
            run(fleet, slots(1))
        bench.stub.start_session_manager()


def test_a_session_closed_by_another_process_is_named_as_the_cause(bench: Bench) -> None:
    """The error is not that the session manager is absent, because it answers."""
    with bench.fleet(1) as fleet:
        assert run(fleet, slots(1)) == expected(slots(1))
        fleet._client.call("close_session", fleet._starter.wait().session.id)
        with pytest.raises(FleetError, match="session is closed or no longer known"):
            run(fleet, slots(1))


def test_a_task_that_is_always_late_ends_the_run(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each attempt occupies another executor, so the number of attempts is limited."""
    monkeypatch.setattr("rlflame.fleet.flame.scheduler._SILENCE_S", 0.2)
    with bench.fleet(task_deadline_s=1.0, max_retries=1) as fleet:
        with pytest.raises(FleetError, match="missed its deadline on 2 executors") as caught:
            run(fleet, slots(1, rollouts.fake(fault="hang")))
        assert "--set runtime.flame.task_deadline_s=10" in caught.value.hint
    assert len(bench.kinds("retried")) == 1


def test_an_observer_that_fails_is_an_end_and_no_wait(bench: Bench) -> None:
    def shout(event: FleetEvent) -> None:
        if event.kind == "running":
            raise BrokenPipeError("nobody reads")

    flames.settle(bench.stub.environment())
    with flames.fleet(shout) as fleet, pytest.raises(FleetError, match="nobody reads"):
        run(fleet, slots(4))


def test_a_cache_that_is_away_is_waited_for_as_long_as_a_session_manager(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlflame.fleet.flame.scheduler._BREAKER_S", 0.0)
    monkeypatch.setattr("rlflame.fleet.flame.scheduler._BREAKER_FAILURES", 1)
    with bench.fleet(1) as fleet:
        assert run(fleet, slots(1)) == expected(slots(1))
        bench.stub.stop_cache()
        submission = send(fleet, slots(2))
        assert eventually(lambda: fleet._scheduler.breaker.saw_outage)
        bench.stub.start_cache()
        assert {wire.encode(fragment) for fragment in submission} == expected(slots(2))
    with bench.fleet(1, reconnect_s=0.1) as fleet:
        assert run(fleet, slots(1)) == expected(slots(1))
        bench.stub.stop_cache()
        with pytest.raises(FleetError, match="object cache no longer answers"):
            run(fleet, slots(2))
        bench.stub.start_cache()


# Objects in the cache.


def test_an_answer_that_comes_when_nobody_waits_any_more_is_deleted(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("rlflame.fleet.flame.scheduler._SILENCE_S", 0.2)
    monkeypatch.setattr("rlflame.fleet.flame.attempt._ABANDONED_INTERVAL_S", 0.2)
    gate = tmp_path / "gate"
    env = rollouts.fake(fault="wait", marker=str(gate))
    with bench.fleet(1) as fleet:
        assert run(fleet, slots(1)) == expected(slots(1))
        submission = send(fleet, slots(1, env))
        assert eventually(gate.with_suffix(".here").exists)
        submission.cancel()
        assert eventually(lambda: not fleet._scheduler.board.attempts)
        assert len(fleet._scheduler.runner.leftover_tasks) == 1
        gate.touch()
        assert eventually(lambda: not fleet._scheduler.runner.leftover_tasks)
        # The code for executors and the lease.
        assert eventually(lambda: len(bench.ours()[1]) == 2)


def test_weights_are_forgotten_where_they_were_missed_and_nowhere_else(bench: Bench) -> None:
    with bench.fleet(1) as fleet:
        assert run(fleet, slots(1)) == expected(slots(1))
        name = fleet.put(rollouts.weights(slots(1)[0].policy, seed=3))
        first = fleet._policies.find_reference(name)
        fleet._policies.forget_reference(name, first)
        second = fleet._policies.find_reference(name)
        assert second != first
        fleet._policies.forget_reference(name, first)  # another attempt reports the same loss later
        assert fleet._policies.find_reference(name) == second
        assert eventually(lambda: first.key not in bench.ours()[1])
        assert second.key in bench.ours()[1]


def test_weights_that_are_released_while_they_are_put_do_not_stay(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    with bench.fleet(1) as fleet:
        assert run(fleet, slots(1)) == expected(slots(1))
        name = fleet.put(rollouts.weights(slots(1)[0].policy, seed=3))
        put = object_cache.put

        def slow(prefix: str, content: bytes) -> Any:
            fleet.release(name)
            return put(prefix, content)

        with monkeypatch.context() as patch:
            patch.setattr(object_cache, "put", slow)
            with pytest.raises(FleetError, match="weights of this task were released"):
                fleet._policies.find_reference(name)
        assert eventually(lambda: len(bench.ours()[1]) == 2)


def test_no_sign_of_life_comes_after_the_end(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlflame.fleet.flame.object_cache.BEAT_INTERVAL_S", 0.002)
    with bench.fleet(1) as fleet:
        assert run(fleet, slots(1)) == expected(slots(1))
    assert bench.ours() == ([], [])


def test_a_first_answer_that_fails_is_asked_for_again(bench: Bench) -> None:
    bench.stub.faults.fail_tasks = 2
    with bench.fleet() as fleet:
        assert run(fleet, slots(1)) == expected(slots(1))
    assert not [text for text in bench.kinds("phase") if "lack the required packages" in text]
