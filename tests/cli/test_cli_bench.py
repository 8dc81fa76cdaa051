"""`rlflame bench`: output, files and exit codes, with local fleets and Flame."""

from __future__ import annotations

import csv
import importlib
import json
import pathlib
import signal
import sys
import threading

import pytest
from commands import finished, process, rlflame
from flame_stub import FlameStub

from rlflame.bench import machine_load, result, rollouts, scaling
from rlflame.errors import RlflameError

QUICK = ("--episode-ms", "0", "--episodes", "2", "--repeat", "2")


@pytest.fixture(autouse=True, scope="module")
def _short_sample():
    """Measures the load of the machine, which no test checks, for a short time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(machine_load, "_SAMPLE_S", 0.01)
        yield


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """A small benchmark: the folder and the output."""
    folder = tmp_path_factory.mktemp("bench") / "new"
    spoken = rlflame("bench", "scaling", "--compare", "inline", "--workers", "1", *QUICK, "-o",
                     folder)  # fmt: skip
    assert spoken.code == 0, spoken.err
    return folder, spoken


def test_results_are_printed_and_written_and_the_files_agree(measured):
    folder, spoken = measured
    assert spoken.out.strip() == (folder / "scaling.md").read_text().strip()
    facts = json.loads((folder / "scaling.json").read_text())
    (cell,) = facts["cells"]
    seconds = [one["seconds"] for one in cell["repetitions"]]
    assert len(seconds) == 2
    assert facts["complete"]
    assert facts["measurements"] == [
        {
            "name": "0 ms, inline with 1",
            "unit": "s",
            "better": "lower",
            "values": seconds,
            "retried": [0, 0],
            "work": facts["measurements"][0]["work"],
        }
    ]
    work = facts["measurements"][0]["work"]
    assert (work["stop_at_iterations"], work["rollout.num_slots"]) == (1, 2)
    assert work["environment.kwargs"]["episode_ms"] == 0.0
    assert "seed" not in work
    rows = (folder / "scaling.csv").read_text().splitlines()
    assert [float(row.split(",")[3]) for row in rows[1:]] == seconds
    assert facts["machine"]["processor"] in spoken.out
    assert facts["threads"]["OPENBLAS_NUM_THREADS"] == "1"
    assert facts["at_work"] is None or facts["at_work"] >= 0.0
    (case,) = facts["cases"]
    assert (case["tasks"], case["iterations"], case["same_bits"]) == (2, 1, True)
    # Two episodes of ten steps.
    assert cell["repetitions"][0]["steps"] == 20


def test_the_table_can_be_drawn_and_the_results_reported(measured):
    folder, _ = measured
    assert "1" in rlflame("plot", folder / "scaling.csv", "-o", "-").out
    assert rlflame("report", folder / "scaling.json", "--json").json()["measurements"]


def test_without_matplotlib_all_but_the_picture_is_there(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    spoken = rlflame(
        "bench", "scaling", "--compare", "inline", "--workers", "1", *QUICK, "-o", "it"
    )
    assert spoken.code == 0, spoken.err
    assert "no image: matplotlib is not installed" in spoken.err
    assert sorted(file.suffix for file in (tmp_path / "it").iterdir()) == [".csv", ".json", ".md"]
    assert "## Measured on" in spoken.out


@pytest.mark.parametrize(
    ("broken", "failure"),
    [("rlflame.bench.result.ResultFolder.draw", OSError("no room")),
     ("rlflame.bench.result.ResultFolder.write", RuntimeError("a bug")),
     ("rlflame.bench.scaling.ScalingBenchmark.measure", RuntimeError("a bug"))],
)  # fmt: skip
def test_what_fails_after_results_says_no_second_document(broken, failure, monkeypatch):
    measure = scaling.ScalingBenchmark.measure

    def fails(self, *words):
        if isinstance(self, scaling.ScalingBenchmark):
            yield from measure(self, *words)
        raise failure

    def fails_at_once(self, *words):
        raise failure

    monkeypatch.setattr(broken, fails if broken.endswith("measure") else fails_at_once)
    few = ("--compare", "inline", "--workers", "1", "--repeat", "1", "--episode-ms", "0")
    out = () if broken.endswith("measure") else ("-o", "it")
    spoken = rlflame("bench", "scaling", *few, "--episodes", "2", *out, "--json")
    assert spoken.code == 1
    assert str(failure) in spoken.err
    assert json.loads(spoken.out)["cells"]


def test_results_are_never_overwritten(measured):
    folder, _ = measured
    spoken = rlflame("bench", "scaling", *QUICK, "-o", folder)
    assert spoken.code == 2
    assert "scaling.json already exists" in spoken.err


def test_what_is_small_keeps_three_digits(tmp_path):
    for name, values in (("old", [0.001234]), ("new", [123456.789]), ("tiny", [1.2345e-30])):
        one = {"name": "a", "unit": "s", "better": "lower", "values": values}
        (tmp_path / f"{name}.json").write_text(json.dumps({"measurements": [one]}))
    assert "0.00123" in rlflame("report", "old.json").out
    assert "123,456.79" in rlflame("bench", "--diff", "old.json", "new.json").out
    assert "1.23e-30" in rlflame("report", "tiny.json").out


def test_numbers_that_count_nothing_are_refused(tmp_path):
    too_many = rlflame("bench", "scaling", "--workers", "5000")
    assert "'5000' is not a list of numbers from 1 to 4,096" in too_many.err
    for seconds in ("inf", "nan"):
        spoken = rlflame("bench", "rollouts", "--seconds", seconds)
        assert (spoken.code, "Invalid value for '--seconds'" in spoken.err) == (2, True)
    one = {"name": "a", "unit": "s", "better": "lower", "values": []}
    odd = ([True], ["x"], "many", {"a": 1}, [1.0], [0, 0], [-1], None)
    for changes in (
        *({"values": [value]} for value in (1e308, -1.0, True, "1.0")),
        *({"values": [1.0], "retried": retried} for retried in odd),
    ):
        found = {"measurements": [{**one, **changes}]}
        (tmp_path / "old.json").write_text(json.dumps(found))
        assert "does not contain benchmark results" in rlflame("report", "old.json").err


def test_two_results_are_compared_by_medians_and_percent(tmp_path):
    for name, values in (("old", [4.0, 5.0, 6.0]), ("new", [4.0, 4.0, 4.0])):
        one = {"name": "a", "unit": "s", "better": "lower", "values": values}
        (tmp_path / f"{name}.json").write_text(json.dumps({"measurements": [one]}))
    (change,) = rlflame("bench", "--diff", "old.json", "new.json", "--json").json()["changes"]
    assert change["medians"] == [4.0, 5.0]
    # If higher is better, it is another measurement.
    new = json.loads((tmp_path / "new.json").read_text())
    new["measurements"][0]["better"] = "higher"
    (tmp_path / "other.json").write_text(json.dumps(new))
    said = rlflame("bench", "--diff", "old.json", "other.json").err
    assert 'a was measured with better "lower" before, and with "higher" now' in said
    # The values are seconds, and less is better: a fifth of them is gone.
    assert change["improvement"]["value"] == pytest.approx(20.0)
    assert "+20.0 [" in rlflame("bench", "--diff", "old.json", "new.json").out


def test_results_of_other_work_or_of_less_are_not_compared_in_silence(tmp_path):
    def written(name, tasks, names, **more):
        work = {"tasks": tasks, f"only {name} has it": 1}
        each = [
            {"name": one, "unit": "s", "better": "lower", "values": [4.0], "work": work}
            for one in names
        ]
        (tmp_path / name).write_text(json.dumps({"measurements": each, **more}))

    before = {"processor": "one", "usable_cores": 2, "blas": "Zen", "packages": {"torch": "1"}}
    now = {
        "processor": "another",
        "usable_cores": 4,
        "blas": "Zen",
        "packages": {"torch": "2", "numpy": "2"},
    }
    written("old.json", 8, "ab", busy=True, machine=before, threads={})
    threads = {"OMP_NUM_THREADS": "1"}
    written("new.json", 8, "ac", complete=False, machine=now, threads=threads)
    said = rlflame("bench", "--diff", "old.json", "new.json").out
    assert "old.json was measured on a machine that was busy" in said
    assert "new.json is incomplete because the benchmark was stopped" in said
    assert (
        "The conditions differ: processor one before, another now; usable_cores 2 before, "
        "4 now; packages.torch 1 before, 2 now; packages.numpy absent before, 2 now; "
        "OMP_NUM_THREADS absent before, 1 now." in said
    )
    assert "Only in new.json: c; only new.json has it (1)." in said
    assert "Only in old.json: b; only old.json has it (1)." in said
    assert "is incomplete because the benchmark was stopped" in rlflame("report", "new.json").out
    written("more.json", 16, "a")
    spoken = rlflame("bench", "--diff", "old.json", "more.json")
    assert spoken.code == 2
    assert "a was measured with tasks 8 before, and with 16 now." in spoken.err


def test_rates_of_workers(tmp_path, monkeypatch):
    beside = []

    make_collectors = rollouts.make_collectors

    def recorded(case, workers, stop):
        beside.append(workers)
        return make_collectors(case, workers, stop)

    monkeypatch.setattr(rollouts, "make_collectors", recorded)
    spoken = rlflame(
        "bench", "rollouts", "--env", "cartpole", "--fleet", "inline", "--seconds", "0",
        "--workers", "1,2", "--repeat", "2", "--set", "rollout.steps=32", "--json",
        "-o", tmp_path / "it",
    )  # fmt: skip
    assert spoken.code == 0, spoken.err
    facts = spoken.json()
    assert facts["environment"] == "CartPole-v1"
    assert [rate["workers"] for rate in facts["rates"]] == [1, 2]
    assert beside == [2]  # one worker is this process
    for rate in facts["rates"]:
        assert rate["limits"].keys() == {"gymnasium"}
        assert rate["ms_per_episode"] > 0.0
        assert len(rate["steps_per_s"]) == len(rate["shares"]["gymnasium"]) == 2
    assert json.loads((tmp_path / "it" / "rollouts.json").read_text()) == facts
    written = (tmp_path / "it" / "rollouts.md").read_text()
    assert "each is a separate process with its own seed" in written


def test_a_real_environment_is_timed_by_its_preset():
    spoken = rlflame(
        "bench", "scaling", "--env", "cartpole", "--compare", "inline", "--workers", "1",
        "--repeat", "1", "--set", "rollout.steps=8", "--json",
    )  # fmt: skip
    assert spoken.code == 0, spoken.err
    (case,) = spoken.json()["cases"]
    assert (case["environment"], case["episode_ms"], case["iterations"]) == ("CartPole-v1", None, 3)


def test_a_replay_is_filled_and_drawn_from():
    spoken = rlflame(
        "bench", "replay", "--transitions", "90", "--compare", "inline,local", "--workers", "2",
        "--set", "rollout.num_slots=3", "--set", "rollout.steps=10", "--repeat", "2", "-o", "it",
        "--json",
    )  # fmt: skip
    assert spoken.code == 0, spoken.err
    facts = spoken.json()
    assert [(one["fleet"], one["workers"]) for one in facts["fillings"]] == [
        ("inline", 1),
        ("local", 2),
    ]
    assert facts["same_bits"]
    assert facts["iterations"] == 3
    inline, local = (one["fills"] for one in facts["fillings"])
    assert {fill["transitions"] for fill in inline + local} == {90}
    for fill in inline + local:
        seconds = sum(
            one["collect_s"] + one["add_s"] + one["sample_s"] for one in fill["iterations"]
        )
        assert [one["total_added"] for one in fill["iterations"]] == [30, 60, 90]
        assert fill["transitions_per_s"] == pytest.approx(90 / seconds)
    # Only new data is sent, so the third iteration sends no more than the first.
    assert {one["bytes_in"] for fill in inline for one in fill["iterations"]} == {0}
    for fill in local:
        first, _, last = (one["bytes_in"] for one in fill["iterations"])
        assert last == pytest.approx(first, rel=0.2)
    assert facts["measurements"][1]["unit"] == "transitions/s"


def test_without_a_cluster_flame_is_unreachable():
    spoken = rlflame("bench", "scaling", "--compare", "local,flame", "--workers", "1", *QUICK)
    assert spoken.code == 3
    assert "Flame" in spoken.err
    assert "hint:" in spoken.err


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--debug",), "bench needs a command"),
        (("--diff", "a.json", "b.json", "scaling"), "bench needs a command"),
        (("scaling", "-o", "-"), "- is not a folder"),
        (("scaling", "-o", "/dev/null", *QUICK), "/dev/null is not a folder"),
        (("--debug", "rollouts"), "followed by its options"),
        (("scaling", "--workers", "1,two"), "--workers '1,two'"),
        (("scaling", "--workers", "0"), "--workers '0'"),
        (("scaling", "--episode-ms", "1,-5"), "--episode-ms '1,-5'"),
        (("scaling", "--episode-ms", "nan"), "--episode-ms 'nan'"),
        (("scaling", "--episode-ms", "1e9"), "numbers from 0 to 600,000"),
        (("scaling", "--compare", "moon"), "no fleet 'moon'"),
        (("rollouts", "--fleet", "local,flame"), "--fleet is local,flame"),
        (("scaling", "--env", "ant", "--episode-ms", "5"), "cannot be combined with --episode-ms"),
        (("scaling", "--algo", "ppo"), "need --env"),
        (("rollouts", "--env", "hoper"), "Did you mean"),
        (("replay", "--env", "cartpole"), "SAC"),
        (("replay", "--transitions", "1000000001"), "'--transitions'"),
        (("replay", "--transitions", "0"), "--transitions"),
        (("replay", "--env", "ant", "--transitions", "1000000000"), "memory"),
        (("replay", "--set", "rollout.stepps=3"), "stepps"),
        (
            ("rollouts", "--set", "runtime.fleet=flame"),
            "runtime.workers are options of a benchmark",
        ),
        (("scaling", "--set", "runtime.workers=5"), "runtime.workers are options of a benchmark"),
        (("scaling", "--set", "environment.kwargs.episode_ms=50"), "use --episode-ms instead"),
        (("scaling", "--env", "cartpole", "--episodes", "4"), "collects steps, not whole episodes"),
        (("--diff", "runs/a", "runs/b"), "must be benchmark results"),
    ],
)
def test_what_cannot_be_measured_is_refused_in_words(words, sentence):
    spoken = rlflame("bench", *words)
    assert spoken.code == 2
    assert sentence in spoken.err
    assert spoken.out == ""


def test_rates_are_kept_as_they_come(tmp_path):
    """Each result is written at once, so SIGKILL does not lose it."""
    running = process(
        "bench", "rollouts", "--no-limit", "--fleet", "inline", "--workers", "1,2", "--repeat",
        "1", "--seconds", "0.1", "-o", tmp_path / "it", "--set", "rollout.num_slots=2",
    )  # fmt: skip
    try:
        file = tmp_path / "it" / "rollouts.json"
        for _ in range(6000):
            if file.exists() or running.poll() is not None:
                break
            threading.Event().wait(0.01)
        facts = json.loads(file.read_text())
    finally:
        running.kill()
    finished(running)
    assert [rate["workers"] for rate in facts["rates"]][:1] == [1]


def test_a_disk_that_is_full_for_a_while_ends_nothing(tmp_path, monkeypatch):
    write, failed = result.write_atomically, []

    def full_at_first(path, data):
        if not failed:
            failed.append(path)
            raise OSError(28, "No space left on device")
        write(path, data)

    monkeypatch.setattr(result, "write_atomically", full_at_first)
    spoken = rlflame(
        "bench", "rollouts", "--no-limit", "--seconds", "0.05", "--repeat", "1", "--fleet",
        "inline", "--workers", "1", "-o", tmp_path / "it",
    )  # fmt: skip
    assert spoken.code == 0, spoken.err
    assert "Partial results are not saved yet: " in spoken.err
    assert json.loads((tmp_path / "it" / "rollouts.json").read_text())["complete"]


@pytest.mark.parametrize("words", [("scaling", "--compare", "flame"),
                                   ("rollouts", "--fleet", "flame")])  # fmt: skip
def test_without_a_cluster_the_error_names_the_local_fleet(words, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    spoken = rlflame("bench", *words, "--workers", "1")
    assert spoken.code == 3
    assert "use local instead of flame" in spoken.err


def test_a_file_is_no_folder(tmp_path):
    (tmp_path / "it").write_text("")
    spoken = rlflame("bench", "rollouts", "-o", tmp_path / "it")
    assert spoken.code == 2
    assert "it is not a folder." in spoken.err


@pytest.mark.parametrize("words", [(), ("--json",)])
def test_what_was_measured_outlives_an_interruption(words, tmp_path):
    """The second case would sleep for ten minutes, but the command does not wait."""
    running = process(
        "bench", "scaling", "--compare", "local", "--workers", "1", "--episode-ms", "0,600000",
        "--episodes", "1", "--repeat", "1", "-o", tmp_path / "it", *words,
    )  # fmt: skip
    try:
        file = tmp_path / "it" / "scaling.json"
        for _ in range(6000):
            if file.exists() or running.poll() is not None:
                break
            threading.Event().wait(0.01)
        running.send_signal(signal.SIGINT)
        spoken = finished(running)
    finally:
        running.kill()
    assert spoken.code == 130, spoken.err
    assert "Traceback" not in spoken.err
    assert str(tmp_path / "it") in spoken.err
    assert "Stopped during " in spoken.err
    facts = json.loads(file.read_text())
    assert not facts["complete"]
    assert [cell["case"] for cell in facts["cells"]] == ["0 ms"]
    if words:
        assert json.loads(spoken.out) == facts  # one document and nothing after it
    else:
        assert "scaling.json is incomplete because the benchmark was stopped." in spoken.out


def test_a_folder_is_there_when_something_is_in_it(tmp_path):
    empty = result.BenchResult("scaling", {}, [], [])
    folder = result.ResultFolder(tmp_path / "a" / "b", "scaling")
    assert not list(tmp_path.iterdir())
    folder.write(empty)
    assert (tmp_path / "a" / "b" / "scaling.json").exists()
    result.ResultFolder(tmp_path / "a", "scaling")  # the folder existed before and remains
    assert (tmp_path / "a" / "b" / "scaling.json").exists()


@pytest.mark.parametrize(
    "words",
    [("rollouts", "--no-limit", "--seconds", "0.1"),
     ("scaling", "--compare", "inline", "--episode-ms", "0", "--episodes", "2")],
)  # fmt: skip
def test_what_was_measured_outlives_a_closed_output(words, tmp_path):
    running = process("bench", *words, "--workers", "1", "--repeat", "1", "-o", tmp_path / "it")
    running.stdout.close()
    running.stdout = None
    spoken = finished(running)
    assert "Traceback" not in spoken.err
    assert f"written: {tmp_path / 'it' / words[0]}.json" in spoken.err
    assert json.loads((tmp_path / "it" / f"{words[0]}.json").read_text())["complete"]


@pytest.mark.parametrize(
    ("words", "other"),
    [
        (("rollouts", "--no-limit", "--seconds", "0", "--fleet", "inline"), "rollout.steps=7"),
        (("replay", "--compare", "inline", "--transitions", "400"), "rollout.num_slots=3"),
        (("learners", "--learners", "1", "--env", "cartpole", "--iterations", "1"),
         "ppo.epochs=2"),
        (("scaling", "--compare", "inline", "--env", "cartpole", "--iterations", "1"),
         "rollout.envs_per_slot=2"),
    ],
)  # fmt: skip
def test_other_work_is_not_compared(words, other, tmp_path):
    workers = () if words[0] == "learners" else ("--workers", "1")
    small = ("--repeat", "1", "--set", "rollout.steps=8")
    for name, sets in (("a", ()), ("b", ("--set", other)), ("c", ())):
        spoken = rlflame("bench", *words, *workers, *small, "-o", tmp_path / name, *sets)
        assert spoken.code == 0, spoken.err
    a, b, c = (tmp_path / name / f"{words[0]}.json" for name in "abc")
    refused = rlflame("bench", "--diff", a, b)
    assert refused.code == 2
    assert "compare results of the same work" in refused.err
    assert rlflame("bench", "--diff", a, c).code == 0


@pytest.mark.parametrize("broken", ["environment", "folder"])
def test_the_json_output_before_a_failure_is_one_document(broken, monkeypatch, tmp_path):
    """The second number of workers is not available, or the output is closed."""

    def fail(*_: object) -> bool:
        raise RlflameError("It broke.", "mend it")

    if broken == "environment":
        measure, counts = rollouts.RolloutsBenchmark._measure_side, []

        def once(*words: object) -> None:
            counts.append(words)
            measure(*words) if len(counts) == 1 else fail()

        monkeypatch.setattr(rollouts.RolloutsBenchmark, "_measure_side", once)
    else:
        monkeypatch.setattr(result, "write_atomically", fail)
    spoken = rlflame(
        "bench", "rollouts", "--no-limit", "--seconds", "0.05", "--repeat", "1", "--fleet",
        "inline", "--workers", "1,2", "--json", "-o", tmp_path / "it",
    )  # fmt: skip
    assert spoken.code == 1
    assert "It broke." in spoken.err
    facts = json.loads(spoken.out)
    assert facts["complete"] == (broken == "folder")
    assert facts["rates"][0]["workers"] == 1


def test_both_sides_on_a_flame_learn_the_same(monkeypatch):
    FlameStub.reset_client()
    with FlameStub(executors=1) as stub:
        for name, value in stub.environment().items():
            monkeypatch.setenv(name, value)
        spoken = rlflame("bench", "scaling", "--workers", "1", *QUICK, "--json")
        assert stub.applications() == []
    FlameStub.reset_client()
    assert spoken.code == 0, spoken.err
    facts = spoken.json()
    assert [cell["fleet"] for cell in facts["cells"]] == ["local", "flame"]
    assert facts["cases"][0]["same_bits"]
    ours, theirs = [row["seconds"]["value"] for row in facts["rows"]]
    gain = facts["rows"][1]["gain_pct"]["value"]
    assert gain == pytest.approx(100 * (ours / theirs - 1))


@pytest.mark.parametrize(
    ("words", "patched", "file"),
    [
        (("scaling", "--algo", "reinforce", "--episodes", "4", "--compare", "local", "--repeat",
          "2", "--iterations", "1"), "scaling.run_case", "scaling"),
        (("replay", "--compare", "local", "--repeat", "2", "--transitions", "80", "--set",
          "rollout.num_slots=4", "--set", "rollout.steps=10"), "replay.fill_replay", "replay"),
        (("rollouts", "--fleet", "local", "--no-limit", "--seconds", "0", "--repeat", "2"),
         "rollouts.measure_rounds", "rollouts"),
    ],
)  # fmt: skip
def test_a_repetition_in_which_a_worker_died_is_marked_wherever_it_is_written(
    words, patched, file, tmp_path, monkeypatch
):
    """The environment kills its process once, in the second repetition."""
    module, _, name = patched.partition(".")
    owner = importlib.import_module(f"rlflame.bench.{module}")
    *path, name = name.split(".")
    for part in path:
        owner = getattr(owner, part)
    marker, usual, calls = tmp_path / "once", getattr(owner, name), []
    marker.touch()

    def one(*words, **more):
        calls.append(1)
        if len(calls) == 2:
            marker.unlink()
        return usual(*words, **more)

    monkeypatch.setattr(owner, name, one)
    kwargs = f"environment.kwargs={{fault='kill_once', continuous=true, marker='{marker}'}}"
    spoken = rlflame(
        "bench", *words, "--env", "fakes:Fake-v0", "--set", kwargs, "--workers", "2", "-o", "it"
    )
    assert spoken.code == 0, spoken.err
    facts = json.loads(pathlib.Path(f"it/{file}.json").read_text())
    (found,) = facts["measurements"]
    # The task, and another one if that was waiting at the same worker.
    before, lost = found["retried"]
    assert (before, lost > 0) == (0, True)
    assert f"contains retried tasks, which take longer: {found['name']}." in spoken.out
    if file == "scaling":
        table = csv.DictReader(pathlib.Path("it/scaling.csv").read_text().splitlines())
        assert [int(row["retried"]) for row in table] == [0, lost]
        assert [one["retried"] for one in facts["cells"][0]["repetitions"]] == [0, lost]
    results = pathlib.Path(f"it/{file}.json")
    doubt = f"{results} contains retried tasks"
    assert doubt in rlflame("bench", "--diff", results, results).out
