"""What all tests share: where workers find the fakes, and one thread for the linear algebra."""

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

# Begun by nohup, nobody here would hear that a terminal goes away.
signal.signal(signal.SIGHUP, signal.SIG_DFL)

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # Begun in the background of a shell, where Ctrl-C is ignored, and children would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)

TESTS = str(Path(__file__).parent)

# Before numpy is imported anywhere: threads of a BLAS would fight over the cores of a test run.
for variable in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(variable, "1")

# Tests of one folder may use helpers of another.
for folder in sorted({str(path.parent) for path in Path(TESTS).rglob("test_*.py")} - {TESTS}):
    sys.path.append(folder)

# Worker processes and the commands under test look for `fakes:...` environments here.
if TESTS not in sys.path:
    sys.path.insert(0, TESTS)
os.environ["PYTHONPATH"] = os.pathsep.join(
    dict.fromkeys([TESTS, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))])
)

# A real cluster is for the tests that ask for one: `auto` must not find it in all the others.
for variable in ("FLAME_ENDPOINT", "FLAME_CACHE_ENDPOINT", "FLAME_CA_FILE"):
    if variable in os.environ:
        os.environ[f"RLFLAME_TEST_{variable}"] = os.environ.pop(variable)
os.environ["HOME"] = tempfile.mkdtemp(prefix="rlflame-home-")
atexit.register(shutil.rmtree, os.environ["HOME"], ignore_errors=True)

# The environments of the tests, which checkpoints name by their modules.
os.environ.pop("XDG_CONFIG_HOME", None)
trusted = Path(os.environ["HOME"], ".config", "rlflame", "trusted_modules")
trusted.parent.mkdir(parents=True, mode=0o700)
trusted.touch(mode=0o600)
trusted.write_text("easels\nfakes\n")

# Where nothing may be compiled beside its source, every worker would compile its libraries anew.
if os.environ.pop("PYTHONDONTWRITEBYTECODE", ""):
    compiled = tempfile.mkdtemp(prefix="rlflame-compiled-")
    atexit.register(shutil.rmtree, compiled, ignore_errors=True)
    os.environ["PYTHONPYCACHEPREFIX"] = compiled


@pytest.fixture(autouse=True, scope="module")
def no_flame_left_over() -> Iterator[None]:
    """Tests that point this process at a Flame do so for their own module only."""
    yield
    for variable in ("FLAME_ENDPOINT", "FLAME_CACHE_ENDPOINT", "FLAME_CA_FILE"):
        os.environ.pop(variable, None)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write tests/golden/screens anew")


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """Compares a screen with its file in tests/golden/screens; --update-golden writes the file."""

    def check(name: str, text: str) -> None:
        path = Path(TESTS, "golden", "screens", name)
        if request.config.getoption("--update-golden"):
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
        assert text == path.read_text(), f"{path} differs; pytest --update-golden writes it anew"

    return check
