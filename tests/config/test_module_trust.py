"""No file runs code that the user has not named, such as modules."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import gymnasium
import pytest

from rlflame import api
from rlflame.config import module_trust
from rlflame.config.recipe import RunConfig
from rlflame.errors import ConfigError
from rlflame.rendering import gl_backend
from rlflame.rollout.envs.make import defer_imports, make_env
from rlflame.rollout.envs.user_code import ModuleAccessError, find_named_modules
from rlflame.storage import checkpoint
from rlflame.storage.checkpoint import Checkpoint
from rlflame.training.evaluation import EvaluationPlan

SHIPPED = Path(__file__).parents[2] / "checkpoints" / "cartpole.safetensors"
#: A module that creates a file when it is imported, and registers an environment.
TRACE = """
from pathlib import Path
import gymnasium
Path({trace!r}).touch()
gymnasium.register("Env-v0", "gymnasium.envs.classic_control:CartPoleEnv", max_episode_steps=500)
"""
#: Options of runs that train and evaluate for as short a time as possible.
SHORT = (
    *("--set", "rollout.num_slots=2", "--set", "rollout.envs_per_slot=2"),
    *("--set", "rollout.steps=16", "--set", "evaluation.final_episodes=2"),
    *("--set", "evaluation.max_episode_steps=20"),
)
#: Names that the standard library or torch try to import and that this system does not have.
ABSENT = ("org", "nt", "_winapi", "msvcrt", "tqdm", "pynvml", "winreg")


@pytest.fixture
def trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that the module `evil` in the current folder creates."""
    path = tmp_path / "trace"
    (tmp_path / "evil.py").write_text(TRACE.format(trace=str(path)))
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return path


@pytest.fixture(autouse=True)
def nothing_named() -> Iterator[None]:
    """Restore the trusted modules after each test."""
    named = set(module_trust._command_modules)
    yield
    module_trust._command_modules.clear()
    module_trust._command_modules.update(named)


def rlflame(*words: object, module: bool = False) -> subprocess.CompletedProcess[str]:
    """Run the installed command or, with `module`, `python -m rlflame`."""
    start = (
        ["-m", "rlflame"]
        if module
        else ["-c", "import sys; sys.path.pop(0); from rlflame.__main__ import main; main()"]
    )
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    return subprocess.run(
        [sys.executable, *start, *map(str, words)],
        env=environment, capture_output=True, text=True, timeout=120,
    )  # fmt: skip


def forged(path: Path, module: str = "evil", **kwargs: object) -> Path:
    """A valid checkpoint with an environment in an untrusted module."""
    source = checkpoint.load(SHIPPED)
    id = f"{module}:Env-v0" if module else source.env.id
    data = json.loads(source.recipe.model_dump_json())
    data["learning"]["environment"] |= {"id": id, "kwargs": kwargs}
    recipe = type(source.recipe).model_validate(data)
    env = type(source.env)(
        id, kwargs, None, source.env.observation_size, "discrete", 2, 0, (), (), ()
    )
    checkpoint.save(path, Checkpoint(
        recipe=recipe, env=env, policy_spec=source.policy_spec, policy=source.policy,
        progress=source.progress, fingerprint=source.fingerprint,
    ))  # fmt: skip
    return path


COMMANDS = {
    "eval": ("eval", "evil.safetensors", "--episodes", "2", "--workers", "1"),
    "eval --vs": ("eval", "evil.safetensors", "--vs", "evil.safetensors", "--episodes", "2"),
    "render": ("render", "evil.safetensors", "-o", "evil.gif"),
    "export": ("export", "evil.safetensors", "--onnx", "--check"),
    "train --config": ("train", "--config", "evil.toml", "--steps", "64", "--workers", "1"),
    "train --config --seeds": ("train", "--config", "evil.toml", "--steps", "64", "--seeds", "0-1"),
    "train --dry-run": ("train", "--config", "evil.toml", "--dry-run"),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_file_does_not_import_a_module(command: str, trace: Path, tmp_path: Path) -> None:
    forged(tmp_path / "evil.safetensors")
    Path("evil.toml").write_text('[learning.environment]\nid = "evil:Env-v0"\n')
    refused = rlflame(*COMMANDS[command])
    assert refused.returncode == 2, refused.stderr
    assert "'evil'" in refused.stderr
    assert "--allow-module evil" in " ".join(refused.stderr.split())
    assert not trace.exists()


def test_inspect_and_load_policy_import_nothing(trace: Path, tmp_path: Path) -> None:
    file = forged(tmp_path / "evil.safetensors")
    assert rlflame("inspect", file).returncode == 0
    policy = api.load_policy(file)
    assert policy([0.0, 0.0, 0.0, 0.0]) in (0, 1)
    assert not trace.exists()


def test_the_user_may_name_the_module(trace: Path, tmp_path: Path) -> None:
    file = forged(tmp_path / "evil.safetensors")
    allowed = rlflame(
        "eval", file, "--episodes", "2", "--workers", "1", "--allow-module", "evil", "--json"
    )
    assert allowed.returncode == 0, allowed.stderr
    assert json.loads(allowed.stdout)["mean"] == 500.0
    assert trace.exists()


def test_a_run_is_resumed_with_its_module_named(trace: Path) -> None:
    words = ("--workers", "1", "--quiet", "--set", "horizon_steps=128", *SHORT)
    begun = rlflame("train", "--env", "evil:Env-v0", "--steps", "64", "--out", "run", *words)
    assert begun.returncode == 0, begun.stderr
    trace.unlink()
    refused = rlflame("resume", "run", "--steps", "128")
    assert refused.returncode == 2
    assert not trace.exists()
    resumed = rlflame("resume", "run", "--steps", "128", "--allow-module", "evil", "--plain")
    assert resumed.returncode == 0, resumed.stderr
    assert "rlflame eval run/best.safetensors --allow-module evil" in resumed.stdout
    trace.unlink()
    anew = rlflame("train", "--config", "run/config.toml", "--out", "other", *words)
    assert anew.returncode == 2
    assert not trace.exists()


def test_seeds_and_their_resume_take_the_modules_that_were_named(trace: Path) -> None:
    words = ("--quiet", "--workers", "1")
    begun = rlflame("train", "--env", "evil:Env-v0", "--steps", "64", "--seeds", "0-1", *SHORT,
                    "--set", "horizon_steps=128", "--out", "job", *words)  # fmt: skip
    assert begun.returncode == 0, begun.stderr
    trace.unlink()
    refused = rlflame("resume", "job", "--steps", "128")
    assert refused.returncode == 2
    assert not trace.exists()
    resumed = rlflame("resume", "job", "--steps", "128", "--allow-module", "evil", *words)
    assert resumed.returncode == 0, resumed.stderr


def test_trust_lasts_until_it_is_taken_back(trace: Path, tmp_path: Path) -> None:
    file = forged(tmp_path / "evil.safetensors")
    words = ("eval", file, "--episodes", "2", "--workers", "1", "--json")
    (tmp_path / "site").mkdir()
    shutil.move("evil.py", tmp_path / "site" / "evil.py")
    assert rlflame("trust", "add", "evil", "other.part").returncode == 0
    assert rlflame("trust", "list").stdout.split() == ["evil", "other.part"]
    store = tmp_path / "home" / ".config" / "rlflame" / "trusted_modules"
    assert stat.S_IMODE(store.stat().st_mode) == 0o600
    # A module with this name in the current folder is not the trusted module.
    assert rlflame(*words).returncode == 2
    assert not trace.exists()
    os.environ["PYTHONPATH"], before = str(tmp_path / "site"), os.environ["PYTHONPATH"]
    try:
        run = subprocess.run(
            [sys.executable, "-P", "-m", "rlflame", *map(str, words)],
            capture_output=True, text=True, timeout=120,
        )  # fmt: skip
    finally:
        os.environ["PYTHONPATH"] = before
    assert run.returncode == 0, run.stderr
    store.chmod(0o644)
    shared = rlflame(*words)
    assert shared.returncode == 2
    assert f"chmod 600 {store}" in " ".join(shared.stderr.split())
    store.chmod(0o600)
    assert rlflame("trust", "remove", "evil").returncode == 0
    assert rlflame("trust", "remove", "evil").returncode == 2
    assert rlflame("trust", "list").stdout.split() == ["other.part"]


def test_from_python_the_module_is_named_by_the_caller(trace: Path, tmp_path: Path) -> None:
    source = checkpoint.load(forged(tmp_path / "evil.safetensors"))
    with pytest.raises(ConfigError, match="evil"):
        api.evaluate(source, EvaluationPlan(1, 0))
    config = RunConfig.model_validate(
        {"stop_at_steps": 64, "learning": {"environment": {"id": "evil:Env-v0"}}}
    )
    with pytest.raises(ConfigError, match="evil"):
        api.train(config)
    assert not trace.exists()


def test_a_worker_imports_only_what_its_task_lists(trace: Path, tmp_path: Path) -> None:
    env = checkpoint.load(forged(tmp_path / "evil.safetensors")).env
    assert env.modules == ()
    with pytest.raises(ModuleAccessError):
        make_env(env)
    assert not trace.exists()


def test_an_argument_that_names_an_environment_counts_as_well(trace: Path, tmp_path: Path) -> None:
    assert find_named_modules("GymV26Environment-v0", {"env_id": "evil:Env-v0"}) == ("evil",)
    file = forged(tmp_path / "evil.safetensors", module="", env_id="evil:Env-v0")
    refused = rlflame("eval", file, "--episodes", "1")
    assert refused.returncode == 2
    assert "--allow-module evil" in " ".join(refused.stderr.split())
    assert not trace.exists()


def test_a_config_does_not_load_an_environment_file(trace: Path) -> None:
    Path("run.toml").write_text('[runtime]\nenv_file = "evil.py"\n')
    refused = rlflame("train", "--config", "run.toml", "--dry-run")
    assert refused.returncode == 2
    assert f"--env-file {Path('evil.py').resolve()}" in " ".join(refused.stderr.split())
    assert not trace.exists()


@pytest.mark.parametrize("module", [False, True], ids=["script", "python -m"])
@pytest.mark.parametrize(
    "words",
    [
        ("eval", SHIPPED, "--episodes", "2", "--workers", "1"),
        ("render", SHIPPED, "-o", "x.gif"),
        (
            "train",
            "--env",
            "cartpole",
            "--steps",
            "64",
            *SHORT,
            "--learners",
            "2",
            "--workers",
            "1",
        ),
        ("train", "--env", "cartpole", "--steps", "64", *SHORT, "--seeds", "0-1"),
    ],
    ids=["eval", "render", "learners", "seeds"],
)
def test_files_in_the_current_folder_are_not_imported(
    words: tuple[object, ...], module: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [*ABSENT, *(["signal", "dataclasses"] if module else [])]
    for name in names:
        (tmp_path / f"{name}.py").write_text(
            f"import os; os.close(os.open({str(tmp_path / 'trace') + '-'!r} + __name__, "
            "os.O_CREAT))\nraise ImportError(__name__)\n"
        )
    monkeypatch.chdir(tmp_path)
    done = rlflame(*words, module=module)
    assert not list(tmp_path.glob("trace-*")), done.stderr
    assert done.returncode == 0, done.stderr


def test_an_empty_entry_of_pythonpath_is_not_passed_on(tmp_path: Path) -> None:
    code = (
        "import os, sys\n"
        "from rlflame.rollout.search_path import make_child_path, remove_current_folder\n"
        "assert os.getcwd() not in make_child_path().split(os.pathsep)\n"
        "remove_current_folder()\n"
        "assert os.getcwd() not in sys.path and '' not in sys.path\n"
    )
    for entry in ("", ".", f"{os.pathsep}/nowhere"):
        path = os.pathsep.join([str(Path(module_trust.__file__).parents[2]), entry])
        subprocess.run(
            [sys.executable, "-c", code], cwd=tmp_path, check=True, timeout=60,
            env={**os.environ, "PYTHONPATH": path},
        )  # fmt: skip


@pytest.mark.parametrize("name", ["evil-packages", "evil.zip"])
def test_the_name_of_the_current_folder_does_not_make_it_one_of_packages(
    name: str, tmp_path: Path
) -> None:
    (tmp_path / name).mkdir()
    assert "current" not in _kinds_of_entries(tmp_path / name)


def test_the_current_folder_stays_where_the_user_or_python_put_it(tmp_path: Path) -> None:
    for path in (str(tmp_path), f"{tmp_path}{os.sep}"):
        assert "current" in _kinds_of_entries(tmp_path, path)
    library = Path(os.__file__).parent
    for folder in (library, library / "lib-dynload", Path(gymnasium.__file__).parents[1]):
        if folder.is_dir():
            assert "current" in _kinds_of_entries(folder)


def _kinds_of_entries(folder: Path, path: str = "") -> set[str]:
    """The kinds of folders on a module path: the current folder, and others."""
    code = (
        "import os, sys\n"
        "from rlflame.rollout.search_path import remove_current_folder\n"
        "remove_current_folder()\n"
        "import signal, subprocess\n"
        "print(*('current' if os.path.exists(entry) and os.path.samefile(entry, '.') else 'other'"
        " for entry in sys.path))\n"
    )
    here = os.path.dirname(os.path.dirname(module_trust.__file__))
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, check=True, timeout=60, text=True,
        capture_output=True, env={**os.environ, "PYTHONPATH": os.pathsep.join([here, path])},
    )  # fmt: skip
    return set(done.stdout.split())


def test_a_process_for_another_library_does_not_search_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """glfw runs `python -c` when it is imported, and so does the test of a renderer."""
    (tmp_path / "ctypes.py").write_text(f"open({str(tmp_path / 'trace')!r}, 'w')")
    (tmp_path / "numpy.py").write_text(f"open({str(tmp_path / 'trace')!r}, 'w')")
    start = "subprocess.run([sys.executable, '-c', 'import ctypes, numpy'], check=True)"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep)
    (tmp_path / "trials").mkdir()
    (tmp_path / "trials" / "trial.py").write_text(f"import subprocess, sys, numpy\n{start}")
    monkeypatch.syspath_prepend(str(tmp_path / "trials"))
    assert gl_backend.check_graphics("trial").status == "ok"
    assert not (tmp_path / "trace").exists()

    monkeypatch.delenv("PYTHONPATH")
    (tmp_path / "later").mkdir()
    (tmp_path / "later" / "drawing_library.py").write_text(
        f"import subprocess, sys\n{start}\nloaded = True"
    )
    monkeypatch.syspath_prepend(str(tmp_path / "later"))
    defer_imports("drawing_library")
    assert sys.modules["drawing_library"].loaded
    assert not (tmp_path / "trace").exists()
    assert "PYTHONSAFEPATH" not in os.environ


def test_a_user_without_a_home_folder_trusts_no_module(monkeypatch: pytest.MonkeyPatch) -> None:
    for home in ("~", "relative"):  # "~" is what expanduser returns for an unknown user
        monkeypatch.setattr(os.path, "expanduser", lambda path, home=home: path.replace("~", home))
        monkeypatch.setenv("XDG_CONFIG_HOME", "relative")
        assert module_trust.read_trusted_modules() == []
        with pytest.raises(ConfigError) as raised:
            module_trust.add_trusted(["module"])
        assert "HOME" in str(raised.value.hint)


def test_a_list_of_another_user_is_not_read(trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module_trust.add_trusted(["evil"])
    uid = os.geteuid() + 1
    monkeypatch.setattr(os, "geteuid", lambda: uid)
    with pytest.raises(ConfigError) as raised:
        module_trust.read_trusted_modules()
    assert str(uid) in raised.value.message
    assert "HOME" in str(raised.value.hint)


def test_a_folder_in_the_place_of_the_list_is_a_sentence(trace: Path) -> None:
    module_trust.add_trusted(["evil"])
    path = module_trust._get_trust_path()
    assert path is not None
    path.unlink()
    path.mkdir()
    with pytest.raises(ConfigError) as raised:
        module_trust.read_trusted_modules()
    assert str(path) in str(raised.value.hint)


def test_a_plugin_is_trusted_as_far_as_gymnasium_imports_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    point = metadata.EntryPoint("__root__", "robots.registration:register", "gymnasium.envs")
    monkeypatch.setattr(metadata, "entry_points", lambda group: [point])
    assert module_trust.check_modules("robots:Arm-v0", {}) == ("robots",)
    assert module_trust.check_modules("robots.registration:Arm-v0", {}) == ("robots.registration",)
    for module in ("robots.tools", "robots.registration.tools"):
        with pytest.raises(ConfigError):
            module_trust.check_modules(f"{module}:Arm-v0", {})
