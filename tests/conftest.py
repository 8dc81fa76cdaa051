"""What all tests share: where workers find the fakes, and one thread for the linear algebra."""

from __future__ import annotations

import atexit
import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # Begun in the background of a shell, where Ctrl-C is ignored, and children would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)

TESTS = str(Path(__file__).parent)

# Before numpy is imported anywhere: threads of a BLAS would fight over the cores of a test run.
for variable in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(variable, "1")

# Worker processes and the commands under test look for `fakes:...` environments here.
if TESTS not in sys.path:
    sys.path.insert(0, TESTS)
os.environ["PYTHONPATH"] = os.pathsep.join(
    dict.fromkeys([TESTS, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))])
)

# Where nothing may be compiled beside its source, every worker would compile its libraries anew.
if os.environ.pop("PYTHONDONTWRITEBYTECODE", ""):
    compiled = tempfile.mkdtemp(prefix="rlflame-compiled-")
    atexit.register(shutil.rmtree, compiled, ignore_errors=True)
    os.environ["PYTHONPYCACHEPREFIX"] = compiled
