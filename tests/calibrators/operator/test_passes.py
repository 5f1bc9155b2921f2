"""How often the search looks at a row, on rows where Newton's own steps creep from bound to bound."""

import numpy as np
import pytest
import torch

from benchmarks.operator import passes, problems
from boxcal.calibrators.operator import box_constrained_softmax


@pytest.mark.parametrize(("box", "most"), [("vector", 4.0), ("tight", 6.5), ("half", 1.5), ("nowhere", 0.0)])
def test_passes_over_rows_of_a_thousand_classes(box: str, most: float) -> None:
    """Without the logistic steps, 3.5 and 12 passes for the first two."""
    logits, lower, upper = problems(64, 1000)[box]
    assert passes(logits, lower, upper) <= most


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_long_row_of_two_logits(dtype: torch.dtype) -> None:
    """500 classes would have .0015 each and are held at .0012; the other 500 share .4."""
    logits = torch.tensor([0.0, np.log(3)], dtype=dtype).repeat_interleave(500)[None]
    upper = torch.full_like(logits, 0.0012)
    for bound in (upper, 0.0012):
        answer = box_constrained_softmax(logits, 0.0, bound)
        wanted = torch.tensor([0.0008, 0.0012], dtype=dtype).repeat_interleave(500)[None]
        assert torch.allclose(answer, wanted, rtol=16 * torch.finfo(dtype).eps, atol=0)
