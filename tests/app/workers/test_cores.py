"""Which cores each serving process runs on."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from boxcal.app.fitting.server.worker_process import Worker
from boxcal.app.workers.table import share_of_cores

PROGRAM = """
import os
from boxcal.app.workers.table import take_share_of_cores
before = take_share_of_cores(0, len(os.sched_getaffinity(0)))
assert before is not None
print(len(before), len(os.sched_getaffinity(0)))
"""


def test_cores_that_divide_equally_are_shared_and_others_are_not() -> None:
    assert [share_of_cores({4, 5, 6, 7}, index, 2) for index in (0, 1)] == [{4, 5}, {6, 7}]
    assert share_of_cores({0, 1, 2}, 1, 2) == {0, 1, 2}
    assert share_of_cores({0, 1}, 3, 4) == {0, 1}


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="the system has no such limit")
def test_a_process_restricts_itself_and_tells_what_it_had() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], check=True, capture_output=True, text=True)
    assert done.stdout.split() == [str(len(os.sched_getaffinity(0))), "1"]


@pytest.mark.anyio
@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="the system has no such limit")
async def test_a_fit_runs_on_the_cores_of_the_service() -> None:
    (core, *_) = os.sched_getaffinity(0)
    worker = Worker(60.0, {core})
    await worker._started()
    try:
        assert worker._process is not None
        assert os.sched_getaffinity(worker._process.pid) == {core}
    finally:
        await worker.close()
