"""Compile the CPU engine on installation: `python -m boxcal.calibrators.operator.warm`.

The compiled loops are kept on disk (NUMBA_CACHE_DIR, else beside the source), for this kind of processor.
"""

import numpy as np

from boxcal.calibrators.operator.half_precision import round_to_half
from boxcal.calibrators.operator.ranking import most_probable
from boxcal.calibrators.plain_rows import PlainRows, solve_rows


def warm_arrays() -> None:
    """Call what a service calls on arrays: the operator with one box or bounds by class; a ranking."""
    rows = np.zeros((2, 3))
    for upper in (np.full(1, 0.5), np.full(3, 0.5)):
        solve_rows(rows, np.zeros_like(upper), upper)
    PlainRows(1.0, 0.0, 1.0, 3).summarised(rows)
    most_probable(np.full(3, 1 / 3), np.full(3, 1 / 3), np.empty(2, np.int64))


def warm() -> None:
    """Call every compiled form once, so that nobody waits for a compiler later."""
    import torch  # noqa: PLC0415 - a service may do without

    from boxcal.calibrators.operator.box_softmax import box_constrained_softmax  # noqa: PLC0415
    from boxcal.calibrators.operator.uniform import SortedRows  # noqa: PLC0415

    warm_arrays()
    for dtype in (torch.float32, torch.float64):
        for upper in (0.5, torch.full((3,), 0.5, dtype=dtype)):
            logits = torch.zeros(2, 3, dtype=dtype, requires_grad=True)
            torch.autograd.grad(box_constrained_softmax(logits, 0.1, upper).sum(), logits)
    round_to_half(np.full((1, 3), 1 / 3), np.empty((1, 3), np.int16))
    SortedRows(torch.zeros(2, 3), torch.zeros(2, dtype=torch.int64)).nll(0.1, 0.5)


if __name__ == "__main__":
    warm()
