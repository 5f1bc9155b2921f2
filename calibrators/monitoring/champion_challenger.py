"""Champion against challenger: which of two calibrators has the lower NLL, decided at any time.

`D = log q(y) - log p(y)` is bounded from below by -B before the label is known, B = max_k log p(k) / q(k). So
`1 + lambda D` is a fair bet for every lambda below 1 / B, and the mean over a grid of lambda is one too
(betting on a bounded mean: Waudby-Smith and Ramdas 2024).

B, and so the stake, depends on the input. The bets are fair where neither side is better given the input,
`E[D | x] <= 0` for each x. They are not where a side is better on many inputs and loses more on few, on which
the stakes are low. So a winner must also be ahead on average, by `ERRORS_AHEAD` standard errors.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from enum import StrEnum
from typing import ClassVar

import numpy as np

from boxcal.calibrators.monitoring.state import Array, StatefulFold, check_rows
from boxcal.calibrators.operator.compiling import compiled

FLOOR = 1e-4
"""Share of the uniform distribution in both, so that one label cannot cost infinitely much."""

STAKES = tuple(0.01 * 2.0**power for power in np.linspace(0.0, math.log2(320.0), 10))
LARGEST_STAKE = 0.9
ALPHA = 0.05
ERRORS_AHEAD = 1.96
"""Standard errors by which the mean gain of a winner must lie above 0."""


class Winner(StrEnum):
    """Which calibrator a duel has found better, if it has."""

    CHALLENGER = "challenger"
    CHAMPION = "champion"
    UNDECIDED = "undecided"


class Duel(StatefulFold):
    """Decides between two calibrators on the same labels.

    A side wins once its evidence reaches 2 / alpha while its mean gain lies `ERRORS_AHEAD` standard errors
    above 0. The evidence of a side that is better on no input ever gets there with a probability of at most
    alpha / 2. The second condition makes wins of a side that is worse on average rarer, without a guarantee.

    Parameters
    ----------
    num_classes
        K.
    alpha
        Probability of a decision where neither is better on any input.
    """

    STATE: ClassVar[tuple[str, ...]] = ("wealth", "sums", "decided")

    def __init__(self, num_classes: int, *, alpha: float = ALPHA) -> None:
        self.num_classes = num_classes
        self.alpha = alpha
        self.wealth = np.zeros((2, len(STAKES)))
        self.sums = np.zeros(3)  # count, sum of D, sum of D^2
        self.decided = np.zeros(1, np.int64)

    def update(self, champion: Array, challenger: Array, labels: Array) -> Array:
        """Bet on (N,) labels given both sides' rows (N, K).

        Returns
        -------
        ndarray
            (N, 2) log evidence that the challenger and that the champion is better, after each label.
        """
        p, truth = check_rows(champion, labels, self.num_classes)
        q, _ = check_rows(challenger, labels, self.num_classes)
        evidence = np.empty((len(truth), 2))
        threshold = math.log(2.0 / self.alpha)
        _fold(p, q, truth, np.array(STAKES), threshold, self.wealth, self.sums, self.decided, evidence)
        return evidence

    def load_state_dict(self, state: Mapping[str, Array]) -> None:
        """Restore a state; a duel that kept no sum of squares begins anew."""
        if "sums" in state and np.shape(state["sums"]) == (2,):
            state = Duel(self.num_classes).state_dict()
        super().load_state_dict(state)

    @property
    def count(self) -> int:
        return int(self.sums[0])

    @property
    def gain(self) -> float:
        """Mean NLL of the champion less that of the challenger, in nats, both floored."""
        return float(self.sums[1] / self.sums[0]) if self.sums[0] else 0.0

    @property
    def winner(self) -> Winner:
        """Who won first; a decision stays."""
        return (Winner.UNDECIDED, Winner.CHALLENGER, Winner.CHAMPION)[int(self.decided[0])]


@compiled
def _fold(  # noqa: PLR0917 - compiled loops take arrays by position
    champion: Array,
    challenger: Array,
    labels: Array,
    stakes: Array,
    threshold: float,
    wealth: Array,
    sums: Array,
    decided: Array,
    evidence: Array,
) -> None:
    size = champion.shape[1]
    # For each label y, with D = log q(y) / p(y) >= -B and B = max_k log p_k / q_k known before it:
    #   wealth_j <- wealth_j (1 + min(stake_j, 0.9 / B) D),  E = mean_j wealth_j
    # The champion bets on -D in the same way.
    for n in range(labels.shape[0]):
        highest, lowest, at_label = -math.inf, math.inf, 0.0
        for k in range(size):
            p = (1.0 - FLOOR) * champion[n, k] + FLOOR / size
            q = (1.0 - FLOOR) * challenger[n, k] + FLOOR / size
            difference = math.log(q / p)
            highest, lowest = max(highest, difference), min(lowest, difference)
            if k == labels[n]:
                at_label = difference
        sums[0] += 1.0
        sums[1] += at_label
        sums[2] += at_label * at_label
        error = math.sqrt(max(sums[2] - sums[1] * sums[1] / sums[0], 0.0))  # of the sum of D
        for side in range(2):
            gain, bound = (at_label, -lowest) if side == 0 else (-at_label, highest)
            limit = LARGEST_STAKE / bound if bound > 0.0 else math.inf
            largest = -math.inf
            for j in range(stakes.shape[0]):
                wealth[side, j] += math.log1p(min(stakes[j], limit) * gain)
                largest = max(largest, wealth[side, j])
            total = 0.0
            for j in range(stakes.shape[0]):
                total += math.exp(wealth[side, j] - largest)
            evidence[n, side] = largest + math.log(total / stakes.shape[0])
            lead = sums[1] if side == 0 else -sums[1]
            if decided[0] == 0 and evidence[n, side] >= threshold and lead >= ERRORS_AHEAD * error:
                decided[0] = 1 + side
