"""Numbers on which every engine of the operator agrees; nothing is imported for them."""

import math
import sys

FREE, AT_LOWER, AT_UPPER = 0, 1, 2
"""Which bound holds a class."""

UNDERFLOW = 800.0
"""exp(-800) is zero in float64: how far below every finite logit a logit of -inf is placed."""


def sum_tolerance(num_classes: int, eps: float = sys.float_info.epsilon) -> float:
    """How far a sum of K bounds may miss 1 by nothing but rounding, in a dtype of this machine epsilon.

    Each bound is rounded once and whoever made it rounded a few times more; these errors grow like the square
    root of their number.
    """
    return eps * (8.0 + math.sqrt(num_classes))
