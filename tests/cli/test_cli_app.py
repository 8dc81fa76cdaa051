"""Commands as processes: signals, imports, closed streams, missing folders."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from commands import TINY, finished, is_alive, process, rlflame, wait_until
from flame_stub import Faults, FlameStub

from rlflame.errors import Interruption
from rlflame.storage import checkpoint
from rlflame.training.stop_signal import SignalStop, exit_on_signal
from rlflame.training.trainer import StopInterrupt

#: Two worker processes for the small run of these tests.
LOCAL = (*TINY, "--fleet", "local", "--workers", "2")


def children_of(pid: int) -> list[int]:
    shown = subprocess.run(["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True)
    pairs = (line.split() for line in shown.stdout.splitlines())
    return [int(child) for child, parent in pairs if int(parent) == pid]


def events_until(running: subprocess.Popen[str], name: str) -> None:
    for line in running.stdout:
        if json.loads(line)["event"] == name:
            return
    raise AssertionError(f"no {name}: {running.stderr.read()}")


def test_an_unknown_option_is_an_error_in_json_too():
    spoken = process("train", "--stepz", "5", "--json")
    out, err = spoken.communicate(timeout=60)
    event = json.loads(out)
    assert (spoken.returncode, event["event"], event["exit_code"]) == (2, "error", 2)
    assert "No such option: --stepz" in event["message"]
    assert "No such option: --stepz" in err


def test_an_option_of_the_recipe_is_refused_by_resume_with_the_command_for_a_new_run():
    spoken = finished(process("resume", "runs/x", "--device", "cpu"))
    assert (spoken.code, spoken.out) == (2, "")
    assert "A resumed run keeps its recipe" in spoken.err
    assert "rlflame train --config RUN/config.toml --init-from RUN --device" in spoken.err


@pytest.mark.parametrize(
    ("words", "command"),
    [
        (("trian",), "rlflame"),
        (("train", "--stepz", "5"), "rlflame train"),
        (("eval",), "rlflame eval"),
        (("train", "--workers", "x"), "rlflame train"),
        (("bench", "nosuch"), "rlflame bench"),
    ],
)
def test_a_word_that_means_nothing_is_a_sentence_and_the_next_command(words, command):
    spoken = finished(process(*words))
    assert (spoken.code, spoken.out) == (2, "")
    sentence, hint = spoken.err.splitlines()
    assert sentence.startswith("rlflame: ")
    assert sentence[-1] in ".?)"
    assert hint == f"  hint: {command} --help"


@pytest.mark.parametrize(
    ("words", "option"),
    [
        (("train", "--steps", "1e4x"), "--steps"),
        (("train", "--steps=", "--env", "hopper"), "--steps"),
        (("train", "--until-return", "abc"), "--until-return"),
        (("bench", "rollouts", "--seconds", "-1"), "--seconds"),
        (("bench", "scaling", "--repeat=0"), "--repeat"),
    ],
)
def test_the_option_of_what_is_no_number_is_named(words, option):
    spoken = finished(process(*words))
    assert spoken.code == 2
    assert f"Invalid value for '{option}'" in spoken.err


# Signals


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
def test_no_room_for_the_results_is_a_sentence_and_nothing_else():
    with open("/dev/full", "w") as full:
        spoken = finished(process("envs", stdout=full))
    assert spoken.code == 1
    assert spoken.err == (
        "rlflame: System error: No space left on device.\n"
        "  hint: fix the cause, then run the same command again\n"
    )


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
@pytest.mark.parametrize(
    "words",
    [("--help",), ("--version",), ("train", "--help"), ("bench", "learners", "-h")],
    ids=str,
)
def test_no_room_for_help_or_version_is_a_sentence(words):
    with open("/dev/full", "w") as full:
        spoken = finished(process(*words, stdout=full))
    assert spoken.code == 1
    assert "Traceback" not in spoken.err
    assert "No space left on device" in spoken.err
    assert "hint: " in spoken.err


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
def test_a_run_whose_lines_nobody_can_keep_goes_on_and_says_so(tmp_path):
    with open("/dev/full", "w") as full:
        words = (*TINY, "--steps", "64", "--out", tmp_path / "run", "--json")
        spoken = finished(process("train", *words, stdout=full))
    assert spoken.code == 0
    assert spoken.err.count("Standard output is lost from here on: No space left on device.") == 1
    assert (tmp_path / "run/result.json").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_saves_and_says_how_to_go_on(tmp_path, number):
    out = tmp_path / "x"
    words = ("train", *LOCAL, "--set", "horizon_steps=9999999", "--json", "--out", out)
    running = process(*words, "--steps", "9999999")
    events_until(running, "iteration")
    children = children_of(running.pid)
    assert len(children) >= 2
    running.send_signal(number)
    spoken = finished(running)
    assert spoken.code == 128 + number
    assert not any(map(is_alive, children))
    end, error = spoken.events()[-2:]
    assert (end["event"], end["complete"]) == ("end", False)
    assert error == {
        "event": "error",
        "message": f"Stopped at step {end['steps']:,}; everything is saved.",
        "hint": f"rlflame resume {out}",
        "exit_code": 128 + number,
    }
    assert "Traceback" not in spoken.err

    # The saved run can be resumed, and is identical to an undisturbed run.
    goal = str(end["steps"] + 128)
    resumed = rlflame("resume", out, "--steps", goal, "--fleet", "inline", "--json").events()[-1]
    words = ("train", *TINY, "--set", "horizon_steps=9999999", "--out", tmp_path / "y")
    undisturbed = rlflame(*words, "--steps", goal, "--json").events()[-1]
    assert resumed["state_digest"] == undisturbed["state_digest"]
    for name in ("metrics.jsonl", "episodes.csv"):
        assert (out / name).read_bytes() == (tmp_path / "y" / name).read_bytes()


@contextlib.contextmanager
def on_a_terminal(*words):
    """Run a command with its own terminal; yield it and a function that closes it."""
    ours, theirs = pty.openpty()
    code = "import fcntl, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
    code += "from rlflame.__main__ import main; main()"
    running = subprocess.Popen(
        [sys.executable, "-c", code, *words],
        stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True,
        env={**os.environ, "TERM": "xterm"},
    )  # fmt: skip
    os.close(theirs)
    threading.Thread(target=_drain, args=(ours,), daemon=True).start()

    def gone():
        running.send_signal(signal.SIGSTOP)  # both signals of the terminal arrive together
        running.send_signal(signal.SIGHUP)
        running.send_signal(signal.SIGCONT)
        os.close(ours)
        return running.wait(60)

    try:
        yield running, gone
    finally:
        running.kill()
        running.wait()


def test_a_terminal_that_goes_away_ends_and_saves_a_run(tmp_path):
    """The command cannot print anything any more, neither its progress nor its end."""
    out = tmp_path / "x"
    with on_a_terminal("train", *LOCAL, "--steps", "9999999", "--out", out) as (running, gone):
        wait_until(lambda: list(out.glob("metrics.jsonl")) and (out / "metrics.jsonl").read_text())
        children = children_of(running.pid)
        assert gone() == 128 + signal.SIGHUP
    wait_until(lambda: not any(map(is_alive, children)))
    before = (out / "metrics.jsonl").read_text()
    goal = json.loads(before.splitlines()[-1])["steps"] + 128
    assert rlflame("resume", out, "--steps", str(goal), "--fleet", "inline", "-q").code == 0
    assert (out / "metrics.jsonl").read_text().startswith(before)


def test_a_terminal_that_goes_away_ends_a_benchmark_that_keeps_what_it_has(tmp_path):
    words = ("bench", "scaling", "--episode-ms", "0,2000", "--episodes", "8", "--repeat", "3")
    kept = tmp_path / "x/scaling.json"
    with on_a_terminal(*words, "--workers", "1", "--compare", "inline", "-o", tmp_path / "x") as (
        _,
        gone,
    ):
        wait_until(kept.exists)
        assert gone() == 128 + signal.SIGHUP
    found = json.loads(kept.read_text())
    assert not found["complete"]
    assert [cell["case"] for cell in found["cells"]] == ["0 ms"]


def _drain(terminal):
    with contextlib.suppress(OSError):
        while os.read(terminal, 65536):
            pass


def test_a_hangup_signal_that_is_ignored_stays_ignored():
    """nohup ignores SIGHUP."""
    previous = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with SignalStop() as stop:
            signal.raise_signal(signal.SIGHUP)
            assert not stop.is_requested
    finally:
        signal.signal(signal.SIGHUP, previous)


def test_a_terminal_that_says_twice_that_it_goes_is_heard_once():
    previous = signal.getsignal(signal.SIGHUP)
    try:
        with SignalStop() as stop:
            signal.raise_signal(signal.SIGHUP)
            signal.raise_signal(signal.SIGHUP)
            assert stop.signal_number == signal.SIGHUP
        signal.raise_signal(signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, previous)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_that_does_not_end_a_wait_is_not_lost(number):
    """A signal may come just before the wait. Here, another thread receives it."""
    previous = signal.getsignal(signal.SIGHUP)
    waiting, nothing = threading.Event(), queue.SimpleQueue()

    def take():
        waiting.wait()
        time.sleep(0.05)
        signal.pthread_kill(threading.get_ident(), number)

    def wait():
        waiting.set()
        nothing.get(timeout=60)  # after which the signal is handled in any case

    began = time.monotonic()
    try:
        thread = threading.Thread(target=take)
        with SignalStop() as stop:
            thread.start()
            with pytest.raises(StopInterrupt), stop.allow_interrupt():
                wait()
            assert stop.signal_number == number
        thread.join()
        signal.signal(signal.SIGHUP, previous)
        waiting.clear()
        thread = threading.Thread(target=take)
        thread.start()
        with pytest.raises((Interruption, KeyboardInterrupt)), exit_on_signal():
            wait()
        assert time.monotonic() - began < 55
    finally:
        thread.join()
        signal.signal(signal.SIGHUP, previous)


FORKED = """
import os, signal, time
from rlflame.training.stop_signal import SignalStop

with SignalStop() as stop:
    for _ in range(2):
        here, there = os.pipe()
        if not (child := os.fork()):
            os.write(there, b".")
            time.sleep(600)
        os.read(here, 1)
        os.kill(child, signal.SIGTERM)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
    time.sleep(1.5)
    assert not stop.is_requested
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(1.5)
    assert stop.is_requested
"""


def test_what_was_forked_ends_as_ever_and_rings_nobody():
    """An environment may start processes and end them with a signal."""
    running = subprocess.run([sys.executable, "-c", FORKED], capture_output=True, timeout=60)
    assert running.returncode == 0, running.stderr


@pytest.mark.parametrize("episodes", ["auto", "reuse"])
def test_a_signal_does_not_wait_for_a_rollout(episodes, tmp_path):
    """A worker hangs inside a step, but the run ends. With auto, it hangs before the run starts."""
    marker = tmp_path / "never"
    kwargs = ("--env-kwargs", "fault=wait", "--env-kwargs", f"marker={marker}")
    kwargs += ("--set", f"environment.episodes={episodes}")
    words = ("train", "--env", "fakes:Fake-v0", *kwargs, *LOCAL, "--out", tmp_path / "x")
    running = process(*words)
    wait_until(marker.with_suffix(".here").exists)
    children = children_of(running.pid)
    running.send_signal(signal.SIGINT)
    spoken = finished(running)
    assert spoken.code == 130
    assert not any(map(is_alive, children))
    file = tmp_path / "x/latest.safetensors"
    assert file.exists() == (episodes == "reuse")
    if file.exists():
        assert checkpoint.load(file).progress.steps == 0


def test_a_signal_does_not_wait_for_an_executor(tmp_path):
    """The cluster has no executor to offer."""
    with FlameStub(faults=Faults(no_executors=True)) as stub:
        words = ("train", *TINY, "--fleet", "flame", "--json", "--out", tmp_path / "x")
        running = process(*words, environment=stub.environment())
        events_until(running, "start")
        running.send_signal(signal.SIGTERM)
        assert finished(running).code == 143
        assert not [name for name in stub.applications() if name.startswith("rlflame")]


def test_a_signal_leaves_nothing_of_an_evaluation_on_a_cluster(tmp_path):
    policy = Path(__file__).parents[2] / "checkpoints" / "cartpole.safetensors"
    with FlameStub(faults=Faults(no_executors=True)) as stub:
        running = process("eval", policy, "--fleet", "flame", environment=stub.environment())
        wait_until(lambda: any(name.startswith("rlflame") for name in stub.applications()))
        running.send_signal(signal.SIGTERM)
        spoken = finished(running)
        assert spoken.code == 143
        assert "Terminated" in spoken.err
        assert not [name for name in stub.applications() if name.startswith("rlflame")]


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGHUP])
def test_what_is_being_closed_is_closed_to_its_end(second):
    """A closed terminal sends two signals."""
    closed = []

    @contextlib.contextmanager
    def opened():
        try:
            yield
        finally:
            os.kill(os.getpid(), second)
            time.sleep(0.01)
            closed.append(True)

    with pytest.raises(Interruption, match="Terminated"), exit_on_signal(), opened():
        os.kill(os.getpid(), signal.SIGTERM)
    assert closed


SLOW_TO_MAKE = """
import pathlib, time
import gymnasium

def make(**kwargs):
    pathlib.Path({marker!r}).touch()
    time.sleep(600)

gymnasium.register("Slow-v0", make)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_an_environment_is_made(tmp_path, number):
    """Nothing has begun and nothing is saved, but the exit code shows the signal."""
    marker = tmp_path / "here"
    (tmp_path / "slow.py").write_text(SLOW_TO_MAKE.format(marker=str(marker)))
    words = ("--env-file", tmp_path / "slow.py", "--env", "Slow-v0", "--steps", "64", "--local")
    running = process("train", *words, "--workers", "1", "--out", tmp_path / "x")
    wait_until(marker.exists)
    running.send_signal(number)
    spoken = finished(running)
    assert spoken.code == 128 + number
    assert "Traceback" not in spoken.err


STUCK = """
import sys, time
from rlflame.training import stop_signal as stop
from rlflame.learning.ppo import ppo

def update(self, *args):
    print("UPDATING", flush=True)
    while True:
        time.sleep(0.01)

def handle(self, number, frame, handle=stop.SignalStop._handle):
    handle(self, number, frame)
    print("HEARD", flush=True)

ppo.Ppo.update = update
stop.SignalStop._handle = handle
sys.argv[0] = "rlflame"
from rlflame.cli.app import main
main()
"""


def test_a_second_signal_ends_at_once(tmp_path):
    """The learner hangs, so the first signal, which waits for it, is not enough."""
    words = ("train", *LOCAL, "--quiet", "--out", str(tmp_path / "x"))
    running = subprocess.Popen(
        [sys.executable, "-c", STUCK, *words], stdout=subprocess.PIPE, text=True
    )
    assert running.stdout.readline() == "UPDATING\n"
    children = children_of(running.pid)
    running.send_signal(signal.SIGINT)
    assert running.stdout.readline() == "HEARD\n"
    running.send_signal(signal.SIGINT)
    assert running.wait(60) == -signal.SIGINT
    running.stdout.close()
    wait_until(lambda: not any(map(is_alive, children)))


def test_eval_interrupted_says_so_without_traceback(tmp_path):
    marker = tmp_path / "never"
    kwargs = f"environment.kwargs={{fault='wait', marker='{marker}'}}"
    marker.touch()
    words = (*TINY, "--env", "fakes:Fake-v0", "--set", kwargs, "--steps", "64")
    made = rlflame("train", *words, "--out", tmp_path / "x")
    assert made.code == 0, made.err
    # From now on, an episode never ends.
    marker.unlink()
    marker.with_suffix(".here").unlink()
    file = tmp_path / "x/best.safetensors"
    running = process("eval", file, "--workers", "1")
    wait_until(marker.with_suffix(".here").exists)
    children = children_of(running.pid)
    running.send_signal(signal.SIGINT)
    spoken = finished(running)
    assert (spoken.code, spoken.out) == (130, "")
    assert spoken.err == "rlflame: Interrupted.\n  hint: run the same command again\n"
    assert not any(map(is_alive, children))


def test_the_error_of_an_environment_reaches_the_user(tmp_path):
    kwargs = ("--env-kwargs", "fault=print_and_raise", "--env-kwargs", "at=4")
    words = ("train", "--env", "fakes:Fake-v0", *kwargs, *LOCAL, "--out", tmp_path / "x", "--quiet")
    spoken = finished(process(*words))
    assert (spoken.code, spoken.out) == (1, "")
    assert "the moon is wrong" in spoken.err
    assert "a word past Python" in spoken.err
    assert re.search(r"slot \d+, row \d+, seed \d+, step \d+", spoken.err)
    assert "in _raise" in spoken.err  # the environment's own traceback
    assert "rlflame/training/trainer.py" not in spoken.err  # none of rlflame's


# Imports

HEAVY = ("numpy", "torch", "gymnasium", "mujoco", "pydantic", "rich", "safetensors", "matplotlib")


@pytest.mark.parametrize("words", [["--help"], ["train", "--help"], ["--version"], ["nonsense"]])
def test_help_loads_nothing_heavy(words):
    command = [sys.executable, "-X", "importtime", "-m", "rlflame", *words]
    shown = subprocess.run(command, capture_output=True, text=True).stderr
    loaded = {line.rsplit("|", 1)[1].strip() for line in shown.splitlines() if "|" in line}
    assert "rlflame.cli.app" in loaded
    roots = {name.partition(".")[0] for name in loaded}
    # Typer imports pydantic for a command's options, but not for the list of commands.
    own = {"pydantic"} if words[0] in ("train", "nonsense") else set()
    assert not roots & set(HEAVY) - own
    assert "click" not in roots


def test_training_and_looking_load_no_torch(tmp_path):
    """This process and its workers find a torch that cannot be imported."""
    (tmp_path / "torch.py").write_text("raise ImportError('torch was asked for')\n")
    path = os.pathsep.join([str(tmp_path), os.environ["PYTHONPATH"]])
    out = str(tmp_path / "x")
    script = f"""
from commands import rlflame, LOCAL
for words in (
    ["train", *LOCAL, "--steps", "128", "--set", "horizon_steps=192", "--out", {out!r}],
    ["resume", {out!r}, "--steps", "192"],
    ["eval", {out!r} + "/best.safetensors", "--episodes", "2"],
    ["inspect", {out!r}],
    ["runs", {out!r}],
    ["config"],
):
    spoken = rlflame(*words)
    assert spoken.code == 0, (words, spoken)
import sys
assert "torch" not in sys.modules
refused = rlflame("train", *LOCAL, "--set", "learning.provider=torch", "--steps", "64")
assert refused.code == 1, refused
""".replace("import rlflame, LOCAL", f"import rlflame\nLOCAL = {LOCAL!r}")
    environment = {**os.environ, "PYTHONPATH": path}
    command = [sys.executable, "-c", script]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, cwd=tmp_path, timeout=120
    )
    assert done.returncode == 0, done.stderr


def test_a_start_loads_nothing_that_draws_no_torch_and_what_steps_only_where_it_steps(tmp_path):
    """This process and its workers find modules that cannot be imported."""
    for name in ("torch", "glfw", "imageio", "PIL", "matplotlib"):
        (tmp_path / f"{name}.py").write_text(f"raise ImportError('{name} was asked for')\n")
    path = os.pathsep.join([str(tmp_path), os.environ["PYTHONPATH"]])
    words = ["train", "--env", "hopper", "--steps", "2048", "--workers", "2", "--out", "x"]
    command = [sys.executable, "-X", "importtime", "-m", "rlflame", *words]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": path},
        capture_output=True, text=True, cwd=tmp_path, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    loaded = {line.rsplit("|", 1)[1].strip() for line in done.stderr.splitlines() if "|" in line}
    assert "rlflame.training.trainer" in loaded
    elsewhere = {"gymnasium", "mujoco", "rlflame.rollout.worker"}
    assert not loaded & {
        *elsewhere,
        "rlflame.rendering.policy_render",
        "rlflame.api",
        "flamepy",
    }


COUNT_WORKERS = """
import os, sys
os.sched_getaffinity = lambda pid: range(2)
from rlflame.__main__ import main
from rlflame.rollout.process.worker_process import WorkerProcess
begin, begun = WorkerProcess.__init__, []
def counted(self, **named):
    begun.append("typer" in sys.modules)
    begin(self, **named)
WorkerProcess.__init__ = counted
sys.argv = ["rlflame", *sys.argv[1:]]
try:
    main()
finally:
    print("BEGUN", begun)
"""


def test_a_worker_begins_before_the_command_is_read_and_is_one_of_those_that_work(tmp_path):
    words = ["train", "--steps", "2048", "--workers", "2", "--out", str(tmp_path / "x")]
    command = [sys.executable, "-c", COUNT_WORKERS, *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "BEGUN [False, True]" in done.stdout.splitlines()


SHOW_THREADS = """
import os, sys
from rlflame.cli.app import main
class Watch:
    def find_spec(self, name, path=None, target=None):
        if name == "numpy" and path is None:
            print("THREADS", os.environ["OPENBLAS_NUM_THREADS"], os.environ["OMP_NUM_THREADS"])
sys.meta_path.insert(0, Watch())
sys.argv = ["rlflame", *sys.argv[1:]]
main()
"""


@pytest.mark.parametrize("count", [1, 3])
def test_threads_are_limited_before_numpy_is_loaded(tmp_path, count):
    words = ("train", "--dry-run", "--set", f"learning.threads={count}")
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "7", "OMP_NUM_THREADS": "7"}
    done = subprocess.run(
        [sys.executable, "-c", SHOW_THREADS, *words],
        capture_output=True,
        text=True,
        env=environment,
        cwd=tmp_path,
    )
    assert done.stdout.splitlines()[0] == f"THREADS {count} {count}", done.stderr


def test_a_resumed_run_has_the_threads_of_its_recipe(tmp_path):
    sets = ("--set", "learning.threads=3", "--set", "horizon_steps=128")
    words = (*TINY, *sets, "--steps", "64", "--out", tmp_path / "x")
    assert finished(process("train", *words)).code == 0
    done = subprocess.run(
        [sys.executable, "-c", SHOW_THREADS, "resume", str(tmp_path / "x"), "--steps", "128"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0] == "THREADS 3 3"


# Closed streams and missing folders


@pytest.mark.parametrize("closed", ["<&- >&- 2>&-", ">&-", ">&- 2>&-"])
def test_closed_streams_and_no_home(closed, tmp_path):
    """Output past Python would go into a file with the number of a closed stream."""
    environment = {key: value for key, value in os.environ.items() if key != "HOME"}
    env = ("--env", "fakes:Fake-v0", "--env-kwargs", "fault=print")
    words = " ".join(f"'{word}'" for word in (*env, *TINY, "--steps", "128"))
    command = f"'{sys.executable}' -m rlflame train {words} --out x {closed}"
    done = subprocess.run(["sh", "-c", command], cwd=tmp_path, env=environment, timeout=60)
    assert done.returncode == 0
    assert json.loads((tmp_path / "x/result.json").read_text())["steps"] == 128
    assert checkpoint.load(tmp_path / "x/latest.safetensors").progress.steps == 128
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x"]
    for file in (tmp_path / "x").rglob("*"):
        assert not file.is_file() or b"a word" not in file.read_bytes(), file


@pytest.mark.parametrize("words", [(), ("--help",), ("trust",), ("bench", "--help")])
def test_help_into_a_closed_pipe_ends_quietly(words):
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = finished(process(*words, stdout=writer))
    finally:
        os.close(writer)
    assert (done.code, done.err) == (1, "")


@pytest.mark.parametrize("words", ["train --env cartpole", "runs", "eval x.safetensors"])
def test_a_current_folder_that_is_gone_is_a_sentence(words, tmp_path):
    gone = tmp_path / "gone"
    gone.mkdir()
    run = f"cd '{gone}' && rmdir '{gone}' && exec '{sys.executable}' -m rlflame {words}"
    done = subprocess.run(["sh", "-c", run], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "cd to another folder" in done.stderr


def test_commands_that_do_not_train_do_without_what_begins_early():
    code = "import sys\nfrom rlflame.__main__ import main\nsys.argv = ['rlflame', '--version']\n"
    code += (
        "try:\n    main()\nexcept SystemExit:\n    print('rlflame.fleet.prestart' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "False"


def test_a_mujoco_that_cannot_be_loaded_is_the_environment_s_trouble(tmp_path):
    """MuJoCo is installed, so only importing it shows the error."""
    broken = tmp_path / "broken" / "mujoco"
    broken.mkdir(parents=True)
    (broken / "__init__.py").write_text("raise ImportError('libOdd.so: cannot open it')")
    words = ("train", "--env", "hopper", "--steps", "2048", "--workers", "1", "--out", "run")
    path = os.pathsep.join([str(broken.parent), *sys.path])
    for more, code in (((), 1), (("--dry-run",), 2)):
        running = process(*words, *more, cwd=tmp_path, environment={"PYTHONPATH": path})
        spoken = finished(running)
        assert spoken.code == code, spoken.err
        said = " ".join(spoken.err.split())
        assert "Hopper-v5" in said
        assert "libOdd" in said
        assert "bug in rlflame" not in said
        assert "bug" not in said


def test_a_list_cut_short_by_its_reader_is_quiet():
    running = process("config", "--schema")
    running.stdout.close()
    assert running.wait(60) == 1
    assert running.stderr.read() == ""


def test_a_full_disk_is_a_sentence():
    if not Path("/dev/full").exists():
        pytest.skip("this system has no /dev/full")
    with Path("/dev/full").open("w") as full:
        spoken = finished(process("config", stdout=full))
    assert spoken.code == 1
    assert "No space left on device" in spoken.err
    assert "bug" not in spoken.err


@pytest.mark.parametrize("words", [(), ("trust",), ("bench",)], ids=["rlflame", "trust", "bench"])
def test_a_group_without_a_command_shows_its_help_in_lines(words):
    shown = finished(process(*words))
    assert (shown.code, shown.err) == (0, "")
    assert shown.lines[0].startswith("Usage: rlflame")
    assert "Commands:" in shown.lines


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (("--lr", "1"), "--set learning_rate=VALUE"),
        (("--ent-coef=1",), "--set entropy_weight=VALUE or --set entropy_coefficient=VALUE"),
        (("--total-timesteps", "1"), "--steps N"),
    ],
)
def test_an_option_of_another_library_is_answered_with_ours(words, hint):
    spoken = finished(process("train", *words))
    assert (spoken.code, spoken.out) == (2, "")
    assert spoken.err.splitlines()[-1] == f"  hint: {hint}"


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("rlflame res", {"resume"}),
        ("rlflame train --algo r", {"reinforce"}),
        ("rlflame train --preset hopper-s", {"hopper-sac"}),
        ("rlflame train --env hum", {"humanoid"}),
    ],
)
def test_a_shell_completes_commands_and_values(line, expected):
    variables = {
        "_RLFLAME_COMPLETE": "complete_bash",
        "COMP_WORDS": line,
        "COMP_CWORD": str(len(line.split()) - 1),
    }
    assert set(finished(process(environment=variables)).lines) == expected
    # Without a shell among its parents, the process cannot detect one.
    variables = {"_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    script = finished(process("--show-completion", "bash", environment=variables))
    assert "complete_bash" in script.out


#: Exits with 9 if a command limits BLAS threads after numpy has read their number.
LIMITS_IN_TIME = """
import sys
from rlflame.rollout import blas
limit_threads = blas.limit_threads
def limit(count):
    if "numpy" in sys.modules:
        sys.exit(9)
    limit_threads(count)
blas.limit_threads = limit
from rlflame.__main__ import main
main()
"""


def test_no_command_loads_numpy_before_it_limits_the_threads(tmp_path: Path) -> None:
    for words in (
        ["train", "--env", "cartpole", "--steps", "2048", "--fleet", "inline", "--out", "run"],
        ["resume", "run"],
        ["eval", "run/latest.safetensors", "--episodes", "1"],
    ):
        ended = subprocess.run(
            [sys.executable, "-c", LIMITS_IN_TIME, *words], cwd=tmp_path, capture_output=True
        )
        assert ended.returncode == 0, ended.stderr
