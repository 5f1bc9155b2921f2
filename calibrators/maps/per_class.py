"""`isotonic` and `venn-abers`: a function of each class's own probability."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any, ClassVar

import numpy as np

from boxcal.calibrators import array_ops
from boxcal.calibrators.data import ValidationSet
from boxcal.calibrators.maps.base import LogitMap
from boxcal.calibrators.maps.parameters import Array, Gradients, Parameters, Shapes, Solution, Values, Vjp
from boxcal.calibrators.row_statistics import effective_samples

Curve = tuple[Array, Array]
"""Ascending places in [0, 1], and the function's values there."""
ROUNDING = 1e-12
"""Relative distance up to which a probability counts as one that was seen."""
RESOLUTION = 1e-15
"""Distance below which two probabilities are one, as for scikit-learn."""


class PerClassFunction(LogitMap):
    """`T(g)_k = log f_k(softmax(g)_k)`, one class against the rest, normalised by the softmax that follows.

    Between two places the function is linear where `steps` is false; otherwise it keeps the value of the
    place before. Values are at least 1 / (N K), so that no class is ruled out by what N samples did not
    show. A fresh map, without places, changes nothing.
    """

    shapes: ClassVar[Shapes] = {"places": ("K", "P"), "values": ("K", "P")}
    prepared = ("places", "values")
    steps = True
    has_onnx_form = False
    per_class = 15

    def fresh(self) -> dict[str, Any]:
        return {name: np.zeros((self.num_classes, 0)) for name in self.shapes}

    def curve(self, probabilities: Array, hits: Array, weights: Array | None) -> Curve:
        """Fit one class: its probabilities (N,) against whether it was the label (N,), with weights (N,)."""
        raise NotImplementedError

    def formula(self, ops: ModuleType, p: Parameters, scores: Values) -> Values:
        """Look up every class of (N, K) logits in its own curve."""
        places, values = p["places"], p["values"]
        if places.shape[1] == 0:
            return scores
        own, last = ops.softmax(scores).T, places.shape[1] - 1
        right = ops.clip(ops.search_rows(places, own), None, last)
        left = ops.clip(right - 1, 0, None)
        at_left = ops.gather(values, left)
        if self.steps:
            found = ops.where(own >= places[:, last:], values[:, last:], at_left)
            return ops.log(ops.where(own >= 0.0, found, own)).T  # NaN, of logits that are no numbers, stays
        begin, end = ops.gather(places, left), ops.gather(places, right)
        share = ops.clip(ops.nan_to_num((own - begin) / (end - begin), nan=0.0), 0.0, 1.0)
        found = at_left + share * (ops.gather(values, right) - at_left)
        return ops.log(ops.where(own >= 0.0, found, own)).T

    def vjp(self, p: Parameters, scores: Array, precomputed: Any = None) -> tuple[Array, Vjp]:
        """Between two places d log f = f' dp / f, and dp = p (dg - p.dg); steps have no slope."""
        with np.errstate(invalid="ignore", divide="ignore"):  # two places may be one
            mapped = self.formula(array_ops, p, scores)
        own, places, values = array_ops.softmax(scores), p["places"], p["values"]

        def back(by_mapped: Array, through: bool) -> tuple[Gradients, Array | None]:
            if not through or places.shape[1] == 0:
                return {}, by_mapped if through else None
            slope = np.zeros_like(own)
            if not self.steps and places.shape[1] > 1:
                right = np.clip(array_ops.search_rows(places, own.T), 1, places.shape[1] - 1)
                rise, run = (
                    array_ops.gather(one, right) - array_ops.gather(one, right - 1)
                    for one in (values, places)
                )
                inside = (places[:, :1] <= own.T) & (places[:, -1:] > own.T) & (run > 0.0)
                slope = np.where(inside, rise / np.where(run > 0.0, run, 1.0), 0.0).T
            by_own = by_mapped * slope / np.exp(mapped)
            return {}, own * (by_own - array_ops.row_sum(own * by_own))

        return mapped, back

    def solve(self, data: ValidationSet, tick: Callable[[float], None]) -> Solution:
        """Fit every class on its own."""
        p, y = array_ops.softmax(data.scores), data.labels
        curves = []
        for k in range(self.num_classes):
            places, values = self.curve(p[:, k], (y == k).astype(np.float64), data.weights)
            curves.append((places, np.clip(values, 1.0 / p.size, 1.0)))
            tick((k + 1) / self.num_classes)
        longest = max(len(places) for places, _ in curves)
        padded = [[np.pad(row, (0, longest - len(row)), mode="edge") for row in curve] for curve in curves]
        both = np.array(padded)
        self.parameters = {"places": both[:, 0].copy(), "values": both[:, 1].copy()}
        return Solution(float("nan"), 1, 1, self.num_classes)

    def invalid_reason(self) -> str | None:
        """Say so if places are out of order, or a value is not a probability above 0."""
        places, values = self.parameters["places"], self.parameters["values"]
        if (places[:, 1:] < places[:, :-1]).any():
            return "the places of a curve are not in ascending order"
        if not ((values > 0) & (values <= 1)).all():
            return "a curve has a value that is not a probability above 0"
        return None

    def describe(self) -> dict[str, Any]:
        """Return how many places a curve has at most."""
        return {"places_per_class": self.parameters["places"].shape[1]}


class IsotonicCalibration(PerClassFunction):
    """A non-decreasing piecewise linear function (Zadrozny and Elkan 2002)."""

    name = "isotonic"
    steps = False

    def curve(self, probabilities: Array, hits: Array, weights: Array | None) -> Curve:
        """Fit the means of equal probabilities, rounding aside; of each level the two ends are kept."""
        from scipy.optimize import isotonic_regression  # noqa: PLC0415 - only fits need it

        places, index = np.unique(probabilities, return_inverse=True)
        new = np.diff(places, prepend=-1.0) >= RESOLUTION
        places, index = places[new], (new.cumsum() - 1)[index]
        mass = np.bincount(index, weights=weights)
        shares = np.bincount(index, weights=hits if weights is None else hits * weights) / mass
        values = isotonic_regression(shares, weights=mass).x
        rises = np.concatenate([[True], values[1:] != values[:-1], [True]])
        ends = rises[:-1] | rises[1:]
        return places[ends], values[ends]


class VennAbers(PerClassFunction):
    """Inductive Venn-Abers prediction (Vovk, Petej and Fedorova 2015): p1 / (1 - p0 + p1).

    p0 and p1 are the values, at a new sample, of the isotonic fits that it has joined with label 0 or 1. A
    sample whose probability equals one that was seen joins the group of that value.
    """

    name = "venn-abers"

    def curve(self, probabilities: Array, hits: Array, weights: Array | None) -> Curve:
        """Let a new sample of either label join every group of equal probabilities, and every gap."""
        from boxcal.calibrators.maps.isotonic_loop import isotonic_with_one_more  # noqa: PLC0415 - needs numba

        groups, index, counts = np.unique(probabilities, return_inverse=True, return_counts=True)
        if weights is not None:  # together as many as the effective number of samples
            scaled = weights * (effective_samples(weights) / weights.sum())
            counts, hits = np.bincount(index, weights=scaled), hits * scaled
        sums = np.bincount(index, weights=hits)
        p0, p1 = (isotonic_with_one_more(counts.astype(np.float64), sums, label) for label in (0.0, 1.0))
        # What a library rounds otherwise still joins its group.
        places = np.column_stack([groups * (1.0 - ROUNDING), groups * (1.0 + ROUNDING)]).ravel()
        places = np.maximum.accumulate(places)
        places, values = np.concatenate([[0.0], places]), p1 / (1.0 - p0 + p1)
        first = np.concatenate([places[1:] > places[:-1], [True]])  # a group at 0 leaves no gap before it
        places, values = places[first], values[first]
        changes = np.concatenate([[True], values[1:] != values[:-1]])
        return places[changes], values[changes]


class HistogramBinning(PerClassFunction):
    """Steps at quantiles (Zadrozny and Elkan 2001): stored calibrators of earlier versions only."""

    name = "histogram"
    is_listed = False
