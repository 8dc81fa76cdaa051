"""The process that measures the rows of a table."""

from __future__ import annotations

import math
import os
import subprocess
import time
from functools import partial

import pytest
from row_process import RowProcess


@pytest.fixture
def process():
    made = RowProcess(partial(os.putenv, "ROW", "prepared"))
    yield made
    made.close()


def test_calls_share_a_prepared_process(process):
    pids = {process.call(os.getpid, 60.0) for _ in range(3)}
    assert len(pids) == 1
    assert os.getpid() not in pids
    shown = process.call(partial(subprocess.check_output, ["sh", "-c", "echo $ROW"]), 60.0)
    assert shown == b"prepared\n"


@pytest.mark.parametrize(
    ("work", "limit_s", "error", "text"),
    [
        (partial(divmod, 1, 0), 60.0, RuntimeError, "ZeroDivisionError"),
        (partial(os._exit, 3), 60.0, RuntimeError, "exit code 3"),
        (partial(time.sleep, 600.0), 0.1, subprocess.TimeoutExpired, "sleep"),
    ],
)
def test_a_call_that_fails_is_followed_by_one_in_a_new_process(work, limit_s, error, text, process):
    before = process.call(os.getpid, 60.0)
    with pytest.raises(error, match=text):
        process.call(work, limit_s)
    assert process.call(partial(math.sqrt, 4.0), 60.0) == 2.0
    assert process.call(os.getpid, 60.0) != before
