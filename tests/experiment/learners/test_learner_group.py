"""Learner processes on one machine: identical results, even if some are lost."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from commands import (
    ENDLESS_RUN,
    SHARDED_RUNS,
    SHARDS,
    TINY,
    finished,
    is_alive,
    process,
    rlflame,
    wait_until,
)
from halves import assert_same, batches, learner, settings, spec_of

from rlflame.config.flags import TrainFlags
from rlflame.config.recipe import LearningSettings, count_useful_learners, find_shards
from rlflame.config.resolve import resolve
from rlflame.config.runtime import RuntimeSettings
from rlflame.errors import LearningError
from rlflame.experiment.learners import learner_group
from rlflame.experiment.learners.learner_group import LearnerGroup
from rlflame.experiment.learners.learner_trial import LearnerTrial
from rlflame.storage import checkpoint
from rlflame.training.trainer import Progress


def running_learners(pid: int) -> list[int]:
    """The learner processes that a run has started."""
    shown = subprocess.run(
        ["ps", "-A", "-ww", "-o", "pid=,ppid=,args="], capture_output=True, text=True, check=True
    )
    rows = [line.split(None, 2) for line in shown.stdout.splitlines()]
    return [
        int(row[0])
        for row in rows
        if int(row[1]) == pid and "rlflame.experiment.learners.learner_main" in row[2]
    ]


def has_joined(pid: int) -> bool:
    """Whether a learner uses the group's memory and therefore knows its parent."""
    maps = Path(f"/proc/{pid}/maps")
    return not maps.exists() or "rlflame-learners" in maps.read_text()


class Group:
    """One learner, and a group of learners in the same state."""

    def __init__(self, learning: LearningSettings, size: int, **runtime: object) -> None:
        self.notes: list[str] = []
        spec = spec_of()
        settings = RuntimeSettings(**runtime)
        self.group = LearnerGroup(
            learner(learning, spec), learning, spec, settings, size, self.notes.append
        )
        assert self.group.wait_for_others(120.0)

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self.group._processes]


@pytest.fixture
def make_group():
    """Makes groups and closes them at the end of the test."""
    made: list[Group] = []

    def make(*words, **runtime) -> Group:
        made.append(Group(*words, **runtime))
        return made[-1]

    yield make
    pids = [pid for group in made for pid in group.pids]
    for group in made:
        group.group.close()
    assert not any(map(is_alive, pids))


class Alone:
    """Batches, and the metrics and state of one learner after each of them."""

    def __init__(self, **options: object) -> None:
        self.learning = LearningSettings.model_validate(
            settings().model_dump(exclude={"gradient_shards"}) | options
        )
        self.data = batches(spec_of(), self.learning, 4)
        alone = learner(self.learning, spec_of())
        self.metrics, self.states = [], []
        for batch in self.data:
            self.metrics.append(alone.update(batch, 0.1))
            self.states.append(alone.get_state())


@pytest.fixture(scope="module")
def plain():
    return Alone()


@pytest.fixture(scope="module")
def sharded():
    return Alone(gradient_shards=4)


@pytest.mark.parametrize(("shards", "size"), [(1, 2), (4, 2), (4, 3), (4, 4), (4, 8)])
def test_any_number_of_learners_has_the_metrics_and_the_state_of_one(
    shards, size, plain, sharded, make_group
):
    alone = plain if shards == 1 else sharded
    made = make_group(alone.learning, size, compare_learners_every=1)
    for batch, metrics, state in zip(alone.data, alone.metrics, alone.states, strict=True):
        assert made.group.update(batch, 0.1) == metrics
        assert_same(made.group.get_state(), state)
    assert made.group.batch_count == 4
    assert made.notes == []


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs /proc")
def test_learners_that_compute_with_numpy_load_no_torch(plain, make_group):
    (pid,) = make_group(plain.learning, 2).pids
    libraries = Path(f"/proc/{pid}/maps").read_text()
    assert "numpy" in libraries
    assert "libtorch" not in libraries


def test_a_group_continues_from_a_loaded_state(sharded, make_group):
    made = make_group(sharded.learning, 4)
    made.group.load_state(sharded.states[1])
    made.group.update(sharded.data[2], 0.1)
    made.group.load_state(sharded.states[0])
    made.group.update(sharded.data[1], 0.1)
    made.group.update(sharded.data[2], 0.1)
    assert_same(made.group.get_state(), sharded.states[2])


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("exchange", [0, 1, 5, 12])
def test_a_learner_that_is_lost_at_any_exchange_costs_no_bit(
    number, exchange, sharded, make_group, monkeypatch
):
    """Before and after the loss, the results of three learners are identical to one learner's."""
    made = make_group(sharded.learning, 3, learner_deadline_s=1.0)
    pid, group = made.pids[1], made.group._group
    gather, calls = group.gather, []

    def lose(values):
        if len(calls) == exchange:
            os.kill(pid, number)
            if number == signal.SIGKILL:
                wait_until(lambda: not is_alive(pid))
        calls.append(values)
        return gather(values)

    monkeypatch.setattr(group, "gather", lose)
    for batch, metrics in zip(sharded.data, sharded.metrics, strict=True):
        assert made.group.update(batch, 0.1) == metrics
        wait_until(lambda: not made.group._processes or made.group.wait_for_others(1.0))
    assert_same(made.group.get_state(), sharded.states[-1])
    assert len(made.notes) == 1
    assert len(made.pids) == 1
    assert made.group.batch_count == 3
    assert not is_alive(pid)


def test_a_learner_that_hangs_before_it_has_loaded_is_given_up(sharded, monkeypatch):
    notes = []
    spec = spec_of()
    algorithm = learner(sharded.learning, spec)
    group = LearnerGroup(algorithm, sharded.learning, spec, RuntimeSettings(), 4, notes.append)
    try:
        pids = [process.pid for process in group._processes]
        os.kill(pids[1], signal.SIGSTOP)
        wait_until(lambda: group.wait_for_others(0.1) or len(group._waiting) == 1)
        assert group.update(sharded.data[0], 0.1) == sharded.metrics[0]
        assert notes == []
        monkeypatch.setattr(group, "_loading_end_s", 0.0)
        assert group.update(sharded.data[1], 0.1) == sharded.metrics[1]
        assert not any(map(is_alive, pids))
        assert group.wait_for_others(120.0)
        assert group.update(sharded.data[2], 0.1) == sharded.metrics[2]
        assert_same(group.get_state(), sharded.states[2])
        assert group.batch_count == 1
        assert len(group._processes) == 2
    finally:
        group.close()
    assert notes == [
        "1 learner did not load within 60 s. Learning continues with 3 learners, bit-identically."
    ]


def test_the_loss_of_a_learner_tells_how_many_can_continue(sharded, make_group):
    """Four learners compute two of the eight units each; seven would finish no sooner."""
    made = make_group(sharded.learning, 8)
    os.kill(made.pids[0], signal.SIGKILL)
    wait_until(lambda: made.group._processes[0].has_exited)
    assert made.group.update(sharded.data[0], 0.1) == sharded.metrics[0]
    assert "Learning continues with 4 of the 7 remaining learners" in made.notes[0]


def test_all_other_learners_may_be_lost_at_once(sharded, make_group):
    made = make_group(sharded.learning, 3)
    for pid in made.pids:
        os.kill(pid, signal.SIGKILL)
    # A zombie whose threads still end has not exited yet.
    wait_until(lambda: all(process.has_exited for process in made.group._processes))
    for batch in sharded.data:
        made.group.update(batch, 0.1)
    assert_same(made.group.get_state(), sharded.states[-1])
    assert made.pids == []


def test_a_batch_is_computed_alone_until_the_others_have_loaded(plain, monkeypatch):
    with monkeypatch.context() as loading:
        loading.setattr(LearnerGroup, "_join", lambda self: None)
        group = LearnerGroup(
            learner(plain.learning, spec_of()),
            plain.learning,
            spec_of(),
            RuntimeSettings(),
            2,
            print,
        )
        group.update(plain.data[0], 0.1)
        assert not group.is_joined
    try:
        assert group.wait_for_others(120.0)
        group.update(plain.data[1], 0.1)
        assert group.batch_count == 1
        assert_same(group.get_state(), plain.states[1])
    finally:
        group.close()


def test_an_error_of_the_recipe_ends_the_group(plain, make_group, monkeypatch):
    made = make_group(plain.learning, 2)
    monkeypatch.setattr(made.group._algorithm._guard, "limit", 0)
    monkeypatch.setattr(made.group._algorithm._guard, "is_refused", fail)
    with pytest.raises(LearningError):
        made.group.update(plain.data[0], 0.1)
    assert made.pids == []


def fail(*_: object) -> bool:
    raise LearningError("It is not finite.", "another learning rate")


def test_a_trial_keeps_the_faster_side_and_the_bits(sharded, make_group, monkeypatch):
    clock = iter(range(1000))
    monkeypatch.setattr(learner_group.time, "perf_counter", lambda: float(next(clock)))
    made = make_group(sharded.learning, 2)
    made.group._trial = LearnerTrial()
    for batch in (*sharded.data, *sharded.data):
        made.group.update(batch, 0.1)
    # Both variants take one tick of the fake clock, so one process is chosen.
    assert made.pids == []
    assert len(made.notes) == 1
    alone = learner(sharded.learning, spec_of())
    for batch in (*sharded.data, *sharded.data):
        alone.update(batch, 0.1)
    assert_same(made.group.get_state(), alone.get_state())


def test_a_trial_in_which_sharing_is_faster_keeps_the_learners(plain, make_group, monkeypatch):
    # A batch takes one second with all learners and three seconds with one.
    costs_s = itertools.cycle((1.0, 1.0, 1.0, 3.0))
    # The first batch is not part of the trial.
    clock = itertools.accumulate(itertools.chain((1.0, 1.0), costs_s))
    monkeypatch.setattr(learner_group.time, "perf_counter", lambda: next(clock))
    alone = learner(plain.learning, spec_of())
    alone.update(plain.data[0], 0.1)
    # The learners compare their states after one and a half batches.
    made = make_group(plain.learning, 2, compare_learners_every=3 * alone._updates.value // 2)
    made.group._trial = LearnerTrial()
    made.group.update(plain.data[0], 0.1)
    for batch in (*plain.data[1:], *plain.data):
        alone.update(batch, 0.1)
        made.group.update(batch, 0.1)
    assert len(made.pids) == 1
    assert [note.split(":")[0] for note in made.notes] == ["Learning with 2 learners"]
    assert made.group.batch_count == 5
    assert_same(made.group.get_state(), alone.get_state())


def test_a_trial_goes_on_with_half_as_many_learners(sharded, make_group, monkeypatch):
    """With four learners a batch takes 4 s, with two 2 s, and with one 3 s."""
    now_s, costs_s = [0.0], {4: 4.0, 2: 2.0}
    monkeypatch.setattr(learner_group.time, "perf_counter", lambda: now_s[0])
    made = make_group(sharded.learning, 4)
    group = made.group
    group._trial = LearnerTrial()
    for name in ("_update", "_update_alone"):
        method = getattr(group, name)

        def update(batch, progress, method=method, name=name):
            size = 1 + len(group._processes)
            metrics = method(batch, progress)
            now_s[0] += costs_s[size] if name == "_update" and size > 1 else 3.0
            return metrics

        monkeypatch.setattr(group, name, update)
    alone = learner(sharded.learning, spec_of())
    for number, batch in enumerate((*sharded.data, *sharded.data, *sharded.data, *sharded.data)):
        made.group.wait_for_others(60.0)
        group.update(batch, 0.1)
        alone.update(batch, 0.1)
        if number == 0:
            assert len(made.pids) == 3
    assert len(made.pids) == 1
    (note,) = made.notes
    assert note.startswith("Learning with 2 learners: an optimizer step takes ")
    assert_same(made.group.get_state(), alone.get_state())


def test_the_first_batch_after_a_resume_is_not_timed(plain, make_group):
    """The number of earlier optimizer steps is not known."""
    made = make_group(plain.learning, 2)
    trial = made.group._trial = LearnerTrial()
    for batch in plain.data[:2]:
        made.group.update(batch, 0.1)
    assert trial._times_s[2][:1]
    made.group.load_state(made.group.get_state())
    count = sum(map(len, trial._times_s.values()))
    made.group.update(plain.data[2], 0.1)
    assert sum(map(len, trial._times_s.values())) == count


@pytest.mark.parametrize("name", ["ReplicatedAlgorithm", "broadcast_state"])
def test_without_file_descriptors_no_group_is_formed(name, plain, make_group, monkeypatch):
    made = make_group(plain.learning, 2)

    def fail_to_share(*_: object) -> None:
        raise OSError(24, "Too many open files")

    if name == "broadcast_state":
        monkeypatch.setattr(made.group._replicator, name, fail_to_share)
        made.group.load_state(made.group.get_state())
    else:
        made.group._replicator = None
        monkeypatch.setattr(learner_group, name, fail_to_share)
    alone = learner(plain.learning, spec_of())
    for batch in plain.data:
        made.group.update(batch, 0.1)
        alone.update(batch, 0.1)
    assert made.pids == []
    assert "Too many open files" in made.notes[0]
    assert_same(made.group.get_state(), alone.get_state())


def test_without_file_descriptors_learning_continues_alone(plain, make_group, monkeypatch):
    made = make_group(plain.learning, 2)
    alone = learner(plain.learning, spec_of())

    def fail_to_share(*_: object) -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(made.group._replicator, "update", fail_to_share)
    for batch in plain.data:
        made.group.update(batch, 0.1)
        alone.update(batch, 0.1)
    assert made.pids == []
    assert "Too many open files" in made.notes[0]
    assert "Learning continues with 1 learner, bit-identically." in made.notes[0]
    assert_same(made.group.get_state(), alone.get_state())


def test_without_file_descriptors_no_learner_is_started_again(plain, make_group, monkeypatch):
    made = make_group(plain.learning, 3)

    def fail_to_start(size: int) -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(made.group, "_start", fail_to_start)
    os.kill(made.pids[0], signal.SIGKILL)
    alone = learner(plain.learning, spec_of())
    for batch in plain.data:
        made.group.update(batch, 0.1)
        alone.update(batch, 0.1)
    assert made.notes[-1].startswith("Learning uses one process: no other learner could be started")
    assert_same(made.group.get_state(), alone.get_state())


@pytest.mark.parametrize(
    ("units", "learners", "useful"),
    [(2, 1, 1), (2, 2, 2), (2, 9, 2), (8, 3, 3), (8, 5, 4), (4, 3, 2)],
)
def test_learners_without_a_unit_are_not_started(units, learners, useful):
    assert count_useful_learners(units, learners) == useful


@pytest.mark.parametrize(
    ("algorithm", "sets", "learners", "shards"),
    [
        ("ppo", [], 64, 32),
        ("ppo", [], 3, 3),
        ("ppo", ["gradient_shards=4"], 5, 5),
        ("ppo", ["ppo.minibatch_size=8"], 64, 8),
        ("sac", [], 4, 4),
        ("sac", ["sac.critic_norm=batch"], 4, 1),
    ],
)
def test_the_shards_give_each_learner_the_same_work(algorithm, sets, learners, shards):
    config, _ = resolve(TrainFlags(env="hopper", algo=algorithm, sets=sets), lambda _: True)
    assert find_shards(config.learning, learners) == shards


@pytest.mark.parametrize(
    ("sets", "cores", "is_idle", "size"),
    [
        ([], 2, True, 2),
        ([], 8, True, 2),
        ([], 1.5, True, 1),
        ([], 8, False, 1),
        (["runtime.learners=1"], 8, True, 1),
        (["runtime.learners=2"], 1, False, 2),
        (["runtime.learners=9"], 1, False, 2),
        (["ppo.epochs=1"], 8, True, 1),
        (["rollout.staleness=1"], 8, True, 1),
        (["threads=2"], 8, True, 1),
        (["provider=torch"], 8, True, 1),
        (["gradient_shards=4"], 8, True, 8),
    ],
)
def test_learners_are_started_automatically_where_they_pay(sets, cores, is_idle, size, monkeypatch):
    monkeypatch.setattr(learner_group.machine, "compute_usable_share", lambda: cores)
    flags = TrainFlags(env="hopper", steps=100_000, sets=["ppo.epochs=3", *sets])
    config, _ = resolve(flags, lambda _: True)
    progress = Progress()
    recipe = config.recipe
    chosen = learner_group.choose_size(recipe, config.runtime, progress, has_idle_cores=is_idle)
    assert chosen == size


def test_a_short_rest_of_a_run_is_learned_by_one_process(monkeypatch):
    monkeypatch.setattr(learner_group.machine, "compute_usable_share", lambda: 2)
    config, _ = resolve(TrainFlags(env="hopper", steps=100_000), lambda _: True)
    passes = config.learning.settings.passes
    for remaining, size in ((300_000 // passes, 2), (300_000 // passes - 1, 1)):
        progress = Progress(steps=100_000 - remaining)
        recipe, runtime = config.recipe, config.runtime
        chosen = learner_group.choose_size(recipe, runtime, progress, has_idle_cores=True)
        assert chosen == size


# Whole runs


@pytest.mark.parametrize("algorithm", SHARDED_RUNS)
def test_runs_with_several_learners_end_in_the_bits_of_one(algorithm, tmp_path, monkeypatch):
    update = LearnerGroup.update

    def update_together(group, *batch):
        assert group.wait_for_others(60.0)
        return update(group, *batch)

    monkeypatch.setattr(LearnerGroup, "update", update_together)
    words = ("train", *SHARDED_RUNS[algorithm], "--quiet")
    assert rlflame(*words, "--out", tmp_path / "1").code == 0
    for learners in (2, 4) if algorithm == "ppo" else (2,):
        out = tmp_path / str(learners)
        shared = ("--learners", str(learners), "--set", "runtime.compare_learners_every=1")
        assert rlflame(*words, *shared, "--out", out).code == 0
        assert json.loads((out / "machines.json").read_text())[-1]["shared_batches"] > 0
        for name in ("metrics.jsonl", "episodes.csv", "latest.safetensors"):
            assert (out / name).read_bytes() == (tmp_path / "1" / name).read_bytes()


@pytest.fixture
def endless(tmp_path, monkeypatch):
    """An endless run with three learners, and the processes of two of them."""
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    words = ("train", *ENDLESS_RUN, "--learners", "3", "--json", "--out", tmp_path / "x")
    running = process(*words, "--set", "runtime.learner_deadline_s=3")
    try:
        for line in running.stdout:
            if '"iteration"' in line:
                break
        wait_until(lambda: len(running_learners(running.pid)) == 2)
        wait_until(lambda: all(map(has_joined, running_learners(running.pid))))
        yield running, running_learners(running.pid)
    finally:
        running.kill()


def test_no_learner_and_no_file_outlives_a_killed_run(endless, tmp_path):
    running, learners = endless
    running.kill()
    running.wait()
    wait_until(lambda: not any(map(is_alive, learners)))
    assert not any((tmp_path / "temporary").iterdir())


def test_no_stopped_learner_outlives_a_killed_run(endless):
    running, learners = endless
    os.kill(learners[0], signal.SIGSTOP)
    running.kill()
    running.wait()
    if sys.platform == "linux":  # on other systems, a stopped process remains until it continues
        wait_until(lambda: not any(map(is_alive, learners)))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_all_learners_saves_and_ends_the_run(number, endless, tmp_path):
    running, learners = endless
    for pid in learners:
        os.kill(pid, number)
    running.send_signal(number)
    spoken = finished(running, 120.0)
    assert spoken.code == 128 + number
    assert not any(map(is_alive, learners))
    assert checkpoint.load(tmp_path / "x/latest.safetensors").progress.steps > 0


def test_the_second_signal_ends_a_run_that_waits_for_a_learner(tmp_path):
    words = ("train", *ENDLESS_RUN, "--learners", "2", "--json", "--out", tmp_path / "x")
    running = process(*words, "--set", "runtime.learner_deadline_s=600")
    try:
        wait_until(
            lambda: (tmp_path / "x/metrics.jsonl").exists() and running_learners(running.pid)
        )
        (pid,) = running_learners(running.pid)
        os.kill(pid, signal.SIGSTOP)
        running.send_signal(signal.SIGTERM)
        time.sleep(0.3)  # equal signals merge until they are delivered
        running.send_signal(signal.SIGINT)
        assert running.wait(timeout=60) in (130, -signal.SIGINT, 143)
        wait_until(lambda: not is_alive(pid))
    finally:
        running.kill()


#: Python runs this module at start. It breaks the gradients of the other learners only.
BREAKS = """
import sys
if "rlflame.experiment.learners.learner_main" in sys.orig_argv:
    from rlflame.learning.ppo import loss
    def compute_shards(self, minibatch, count, networks, shards):
        raise ZeroDivisionError("of the second learner")
    loss.NumpyPpo.compute_shards = compute_shards
"""


def test_a_learner_that_fails_by_itself_is_reported_and_the_run_continues(tmp_path, monkeypatch):
    (tmp_path / "sitecustomize.py").write_text(BREAKS)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    words = ("train", *TINY, *SHARDS, "--steps", "4096", "--plain")
    spoken = finished(process(*words, "--learners", "2", "--out", tmp_path / "2"), 120.0)
    assert spoken.code == 0, spoken.err
    monkeypatch.undo()
    assert rlflame(*words, "--out", tmp_path / "1").code == 0
    digests = {checkpoint.load(tmp_path / n / "latest.safetensors").digest for n in "12"}
    assert len(digests) == 1


def test_the_recipe_does_not_depend_on_the_number_of_learners():
    configs = []
    for learners in ("1", "2", "auto"):
        spoken = rlflame("train", *TINY, "--learners", learners, "--dry-run", "--json")
        configs.append(spoken.json()["config"]["learning"])
    assert configs[0] == configs[1] == configs[2]
    assert json.dumps(configs[0]["gradient_shards"]) == "1"


@pytest.mark.parametrize(("learners", "code"), [("0", 2), ("two", 2), ("1025", 2), ("auto", 0)])
def test_a_number_of_learners_is_checked(learners, code, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    spoken = rlflame("train", *TINY, "--learners", learners, "--dry-run")
    assert spoken.code == code, spoken.err
    assert "parse" not in spoken.err
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("cores", [1, 2])
def test_more_learners_than_cores_are_reported(cores, tmp_path, monkeypatch):
    monkeypatch.setattr(learner_group.machine, "count_usable_cores", lambda: cores)
    spoken = rlflame("train", *TINY, "--steps", "64", "--learners", "2", "--out", tmp_path / "x")
    assert spoken.code == 0, spoken.err
    told = "2 learners share 1 core, which makes the run slower." in spoken.out + spoken.err
    assert told == (cores == 1)
