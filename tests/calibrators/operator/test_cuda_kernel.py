"""The Triton kernel: in Triton's interpreter on every machine, compiled where there is a GPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[3]


def test_in_tritons_interpreter() -> None:
    found = subprocess.run(
        [sys.executable, "-m", "tests.calibrators.operator.triton_rows", "cpu", "60"],
        cwd=ROOT,
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stderr[-3000:]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_the_gpu() -> None:
    from tests.calibrators.operator.triton_rows import check

    check("cuda", 20_000)
