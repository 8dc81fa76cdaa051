"""Set-up of all tests: fake environments, one BLAS thread, a temporary home."""

from __future__ import annotations

import atexit
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

# Under nohup, SIGHUP is ignored, and the tests of a closing terminal would fail.
signal.signal(signal.SIGHUP, signal.SIG_DFL)

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell ignores SIGINT for background jobs, and child processes inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)

TESTS = str(Path(__file__).parent)

# Before numpy is imported: BLAS threads of parallel tests would compete for the cores.
for variable in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(variable, "1")

# Tests may import helper modules from other folders.
for folder in sorted({str(path.parent) for path in Path(TESTS).rglob("test_*.py")} - {TESTS}):
    sys.path.append(folder)

# Worker processes and the tested commands import `fakes:...` environments from here.
if TESTS not in sys.path:
    sys.path.insert(0, TESTS)
os.environ["PYTHONPATH"] = os.pathsep.join(
    dict.fromkeys([TESTS, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))])
)

# Only tests that ask for a real cluster use it. `auto` must not find it in other tests.
for variable in ("FLAME_ENDPOINT", "FLAME_CACHE_ENDPOINT", "FLAME_CA_FILE"):
    if variable in os.environ:
        os.environ[f"RLFLAME_TEST_{variable}"] = os.environ.pop(variable)
os.environ["HOME"] = tempfile.mkdtemp(prefix="rlflame-home-")
atexit.register(shutil.rmtree, os.environ["HOME"], ignore_errors=True)

# Trust the modules of the test environments, which checkpoints name.
os.environ.pop("XDG_CONFIG_HOME", None)
trusted = Path(os.environ["HOME"], ".config", "rlflame", "trusted_modules")
trusted.parent.mkdir(parents=True, mode=0o700)
trusted.touch(mode=0o600)
trusted.write_text("easels\nfakes\nspace_envs\n")

# Without a folder for bytecode, every worker would compile its libraries again.
if os.environ.pop("PYTHONDONTWRITEBYTECODE", ""):
    compiled = tempfile.mkdtemp(prefix="rlflame-compiled-")
    atexit.register(shutil.rmtree, compiled, ignore_errors=True)
    os.environ["PYTHONPYCACHEPREFIX"] = compiled


@pytest.fixture(autouse=True, scope="module")
def no_flame_left_over() -> Iterator[None]:
    """Remove the variables of a Flame cluster after each module."""
    yield
    for variable in ("FLAME_ENDPOINT", "FLAME_CACHE_ENDPOINT", "FLAME_CA_FILE"):
        os.environ.pop(variable, None)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="rewrite tests/golden/screens")


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """Compare a screen with its golden file; --update-golden writes the file."""

    def check(name: str, text: str) -> None:
        path = Path(TESTS, "golden", "screens", name)
        if request.config.getoption("--update-golden"):
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
        assert text == path.read_text(), f"{path} differs; pytest --update-golden rewrites it"

    return check
