"""Compile the CPU engine on installation: `python -m boxcal.calibrators.operator.warm`.

The compiled loops are kept on disk (NUMBA_CACHE_DIR, else beside the source), for this kind of processor.
"""

import numpy as np
import torch

from boxcal.calibrators.operator.box_softmax import box_constrained_softmax
from boxcal.calibrators.operator.half_precision import round_to_half
from boxcal.calibrators.operator.ranking import most_probable
from boxcal.calibrators.operator.uniform import SortedRows


def warm(*dtypes: torch.dtype) -> None:
    """Call every compiled form once in these dtypes, so that nobody waits for a compiler later."""
    for dtype in dtypes:
        for upper in (0.5, torch.full((3,), 0.5, dtype=dtype)):
            logits = torch.zeros(2, 3, dtype=dtype, requires_grad=True)
            torch.autograd.grad(box_constrained_softmax(logits, 0.1, upper).sum(), logits)
    probabilities = np.full(3, 1 / 3)
    most_probable(probabilities, probabilities, np.empty(2, np.int64))
    round_to_half(probabilities[None], np.empty((1, 3), np.int16))
    SortedRows(torch.zeros(2, 3), torch.zeros(2, dtype=torch.int64)).nll(0.1, 0.5)


if __name__ == "__main__":
    warm(torch.float32, torch.float64)
