"""Hold the Triton kernel against the judge of 60 digits: by its interpreter on any machine, or on a GPU.

`python -m tests.calibrators.operator.triton_rows cpu` with TRITON_INTERPRET=1; the tests run it so.
"""

import sys

import numpy as np
import torch
from torch import Tensor

from boxcal.calibrators.operator import cuda_kernel
from tests.calibrators.operator.adversary import adversarial_rows
from tests.calibrators.operator.test_exactness import judge


def check(device: str, rows: int) -> None:
    """Judge adversarial rows, whole and in pieces, and rows that must come out as NaN."""

    def engine(logits: Tensor, lower: Tensor, upper: Tensor) -> Tensor:
        ones = torch.ones(1, 1, dtype=logits.dtype, device=device)
        return cuda_kernel.forward(logits.to(device), lower.to(device), upper.to(device), ones, 1e-15)[
            0
        ].cpu()

    for dtype in (np.float32, np.float64):
        for batch in adversarial_rows(rows, 23, dtype):
            judge(batch, engine, relative=False)
    whole, piece = cuda_kernel.ON_CHIP, cuda_kernel.PIECE
    cuda_kernel.ON_CHIP = cuda_kernel.PIECE = 4
    for batch in adversarial_rows(rows // 4, 29, np.float64):
        judge(batch, engine, relative=False)
    cuda_kernel.ON_CHIP, cuda_kernel.PIECE = whole, piece

    for pieces in (False, True):
        cuda_kernel.ON_CHIP = cuda_kernel.PIECE = 4 if pieces else whole
        for size in (1e16, 1e300, 1.7e308):
            huge = torch.tensor([[size, 0.5, 0.25, -size, -size / 2, -0.125]], dtype=torch.float64)
            answer = engine(huge, torch.zeros_like(huge), torch.full_like(huge, 0.4))[0]
            near = huge[0, [1, 2, 5]].softmax(-1) * 0.6
            assert torch.allclose(answer[[0, 1, 2, 5]], torch.cat([near.new_tensor([0.4]), near]), atol=1e-15)
            answer = engine(huge * huge.new_tensor([1, 0.9, 0.8, 1, 1, 0.7]), huge * 0 + 0.01, huge * 0 + 0.4)
            assert torch.allclose(answer.sum(-1), answer.new_ones(1), atol=1e-14)
    cuda_kernel.ON_CHIP, cuda_kernel.PIECE = whole, piece

    zeros, ones = torch.zeros(3, 2), torch.ones(3, 2)
    logits = torch.tensor([[0.0, torch.nan], [0.0, 1.0], [-torch.inf, -torch.inf]])
    upper = ones.clone()
    upper[1] = 0.1
    assert engine(logits, zeros, upper).isnan().all()


if __name__ == "__main__":
    check(sys.argv[1], int(sys.argv[2]))
