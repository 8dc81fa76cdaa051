"""BLAS threads in child processes."""

from __future__ import annotations

import os
import subprocess
import sys

from rlflame.rollout import blas, machine


def test_a_child_is_given_this_process_s_kernels_on_one_thread() -> None:
    script = "from rlflame.rollout import blas, machine; print(machine.read_fingerprint())"
    script += "; count = blas._find_symbol('get_num_threads'); print(count and count())"
    result = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, **blas.make_child_environment()},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    told, count = result.stdout.splitlines()
    assert told == str(machine.read_fingerprint())
    assert count in ("1", "None")
