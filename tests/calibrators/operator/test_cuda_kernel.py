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
        [sys.executable, "-m", "tests.calibrators.operator.triton_rows", "cpu", "24"],
        cwd=ROOT,
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stderr[-3000:]


READ_ONCE = """
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from boxcal.calibrators.operator.cuda_kernel import _forward

names = "logits lower upper inverse probabilities side".split()
kinds = dict(zip(names, ["*fp32", "*fp32", "*fp32", "*fp64", "*fp32", "*i8"]))
kinds |= {"classes": "i32", "tolerance": "fp32"}
kinds |= {name: "i32" for name in "low_row low_column high_row high_column inverse_row".split()}
for whole in (True, False):
    fixed = {"WIDTH": 1024, "WHOLE": whole}
    source = ASTSource(_forward, kinds | dict.fromkeys(fixed, "constexpr"), fixed)
    code = compile(source, target=GPUTarget("cuda", 90, 32)).asm["ttir"]
    print(code.count("tt.load"), code.count("tt.store"))
"""


@pytest.mark.long
def test_a_row_that_fits_is_read_once_and_written_once() -> None:
    """Compiled for an H100, which needs none: logits, two bounds and a temperature in, two rows out."""
    found = subprocess.run(
        [sys.executable, "-c", READ_ONCE], cwd=ROOT, capture_output=True, text=True, check=False
    )
    whole, pieces = found.stdout.splitlines() or [found.stderr, ""]
    assert whole == "4 2"
    assert int(pieces.split()[0]) > 4


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_the_gpu() -> None:
    from tests.calibrators.operator.triton_rows import check

    check("cuda", 20_000)
