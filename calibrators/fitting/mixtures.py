"""The objectives of `ets+pb`, `ets+pb-mlp` and `ets+lb` in closed form.

Rows are sorted once: a mixture of softmaxes of the same logits keeps their order.
"""

from __future__ import annotations

import math
from typing import Any, Self

import numpy as np
from torch import Tensor

from boxcal.calibrators.fitting import loops
from boxcal.calibrators.fitting.joint import JointObjective, mean_of
from boxcal.calibrators.fitting.row_parts import Boxes
from boxcal.calibrators.formulas import TOP
from boxcal.calibrators.logit_maps.ensemble_temperature import SMALLEST
from boxcal.calibrators.operator.uniform import open_cuts
from boxcal.calibrators.threads import SMALL, blocks, over_rows

Array = np.ndarray[Any, Any]
MASSES = 4
"""Coordinates of `ets`: the log of the temperature and three masses."""


class _Mixture(JointObjective):
    """`w1 softmax(g / temperature) + w2 softmax(g) + w3 / K` of sorted rows, and its derivatives."""

    def _prepare(self) -> None:
        self.sorted = self._sort()
        self.raw, _, self.own_raw = self._softened(1.0)
        self.cuts = open_cuts(self.sorted.scores)

    def rows(self, index: Tensor) -> Self:
        """Look only at some rows, which stay sorted."""
        part, at = self.shallow(index), index.numpy()
        part.sorted, part.cuts = self.sorted.rows(at), self.cuts[at]
        part.raw, part.own_raw = self.raw[at], self.own_raw[at]
        return part

    def __call__(self, coordinates: Array) -> tuple[float, Array]:
        """Return the mean loss and its gradient."""
        inverse, masses = math.exp(-coordinates[0]), coordinates[1:MASSES]
        if masses.sum() <= 0.0:
            return math.inf, np.zeros_like(coordinates)
        shares = masses / masses.sum()
        losses, by_inverse, by_shares, by_others = self._evaluated(inverse, shares, coordinates[MASSES:])
        by_masses = (by_shares - by_shares @ shares) / masses.sum()
        gradient = np.concatenate([[-inverse * by_inverse], by_masses, by_others]) / len(losses)
        return mean_of(losses, self.weights), gradient

    def _evaluated(self, inverse: float, shares: Array, others: Array) -> tuple[Array, float, Array, Array]:
        """Give every row's loss, and the sums of its derivatives, weighted, in all that is given."""
        raise NotImplementedError

    def _softened(self, inverse: float) -> tuple[Array, Array, Array]:
        """softmax(inverse * scores) (N, K), the mean score under it (N,), and its value at the label (N,)."""
        scores, own = self.sorted.scores, self.sorted.label_scores
        softened, mean, own_softened = np.empty_like(scores), np.empty(len(own)), np.empty(len(own))

        def work(rows: slice) -> None:
            for part in blocks(rows, scores.shape[1]):
                weights = np.maximum(scores[part] * inverse, loops.LEAST, out=softened[part])
                np.exp(weights, out=weights)
                total = weights.sum(axis=1)
                weights /= total[:, None]
                mean[part] = np.einsum("nk,nk->n", weights, scores[part])
                own_softened[part] = np.exp(np.maximum(own[part] * inverse, loops.LEAST)) / total

        over_rows(work, len(own), worth=scores.size > SMALL)
        return softened, mean, own_softened


class MixtureInBox(_Mixture):
    """`ets+pb` and `ets+pb-mlp`: rows that no bound holds, which are most, are done together."""

    def _read(self) -> None:
        self.boxes = Boxes(self.bound_map, self.sorted.num_classes)

    def _evaluated(self, inverse: float, shares: Array, others: Array) -> tuple[Array, float, Array, Array]:
        softened, mean, own_softened = self._softened(inverse)
        parts = np.stack([own_softened, self.own_raw, np.full_like(mean, 1.0 / softened.shape[1])], axis=1)
        own = np.maximum(parts @ shares, SMALLEST)
        moved = own_softened * (self.sorted.label_scores - mean)
        answer = np.column_stack(
            [-np.log(own), -shares[0] * moved / own, -parts / own[:, None], 0 * mean, 0 * mean]
        )
        top = softened[:, : -TOP - 1 : -1].T, self.raw[:, : -TOP - 1 : -1].T
        mixed = np.maximum(shares[0] * top[0] + shares[1] * top[1] + shares[2] * parts[0, 2], SMALLEST)
        columns = np.log(mixed)
        lower, upper, to_box = self.boxes(others, columns)
        lowest = shares[0] * softened[:, 0] + shares[1] * self.raw[:, 0] + shares[2] * parts[0, 2]
        index = np.flatnonzero((lowest < lower) | (mixed[0] > upper))
        if len(index):
            rows = self.sorted.scores, softened, self.raw, self.sorted.label_scores, parts, mean, lower, upper
            answer[index] = self._held(index, shares, [array[index] for array in rows])
        if self.weights is not None:
            answer[:, 1:] *= self.weights[:, None]
        by_others, by_columns = to_box(answer[:, 5], answer[:, 6])
        by_inverse, *by_shares = answer[:, 1:5].sum(axis=0)
        if by_columns is not None:
            by_mixed = by_columns / mixed
            by_shares += np.array([(by_mixed * one).sum() for one in (*top, parts[0, 2])])
            scores = self.sorted.scores[:, : -TOP - 1 : -1].T
            by_inverse += shares[0] * (by_mixed * top[0] * (scores - mean)).sum()
        return answer[:, 0], by_inverse, np.asarray(by_shares), by_others

    def _held(self, index: Array, shares: Array, arrays: list[Any]) -> Array:
        """Answers (n, 7) of rows that a bound holds, given these rows of what `mixed_in_box` takes."""
        cuts, answer = self.cuts[index], np.empty((len(index), 7))

        def work(rows: slice) -> None:
            given: list[Any] = [array[rows] for array in arrays]
            given += [shares, cuts[rows], answer[rows]]
            loops.mixed_in_box(*given)

        over_rows(work, len(index), worth=len(index) * self.sorted.num_classes > SMALL)
        self.cuts[index] = cuts
        return answer


class ClippedMixture(_Mixture):
    """`ets+lb`: logit bounding of the log of the mixture."""

    def _evaluated(self, inverse: float, shares: Array, others: Array) -> tuple[Array, float, Array, Array]:
        softened, mean, own_softened = self._softened(inverse)
        low, share = others
        limits = low, low + (1.0 - low) * share
        answer = np.empty((len(mean), 7))
        arrays = (
            self.sorted.scores, softened, self.raw, self.sorted.label_scores, own_softened, self.own_raw, mean
        )  # fmt: skip

        def work(rows: slice) -> None:
            given: list[Any] = [array[rows] for array in arrays]
            given += [shares, *limits, answer[rows]]
            loops.clipped_mixture(*given)

        over_rows(work, len(mean), worth=softened.size > SMALL)
        if self.weights is not None:
            answer[:, 1:] *= self.weights[:, None]
        by_inverse, *by_shares, by_low, by_high = answer[:, 1:].sum(axis=0)
        by_limits = np.array([by_low + by_high * (1.0 - share), by_high * (1.0 - low)])
        return answer[:, 0], by_inverse, np.asarray(by_shares), by_limits
