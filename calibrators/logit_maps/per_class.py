"""`histogram`, `isotonic` and `venn-abers`: a function of each class's own probability."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from boxcal.calibrators import formulas, tensor_ops
from boxcal.calibrators.data import ValidationSet, effective_samples
from boxcal.calibrators.logit_maps.base import LogitMap, Solution

Array = np.ndarray[Any, Any]
Curve = tuple[Array, Array]
"""Ascending places in [0, 1], and the function's values there."""
BINS = 15


class PerClassFunction(LogitMap):
    """`T(g)_k = log f_k(softmax(g)_k)`, one class against the rest, normalised by the softmax that follows.

    Between two places the function is linear where `steps` is false; otherwise it keeps the value of the
    place before. Values are at least 1 / (N K), so that no class is ruled out by what N samples did not
    show. A fresh map, without places, changes nothing.
    """

    combines = False
    steps = True
    places: Tensor
    values: Tensor

    def __init__(self, num_classes: int, num_places: int = 0) -> None:
        super().__init__(num_classes)
        for name in ("places", "values"):
            self.register_buffer(name, torch.zeros(num_classes, num_places, dtype=torch.float64))

    def curve(self, probabilities: Array, hits: Array, weights: Array | None) -> Curve:
        """Fit one class: its probabilities (N,) against whether it was the label (N,), with weights (N,)."""
        raise NotImplementedError

    def forward(self, scores: Tensor) -> Tensor:
        """Look up every class of (N, K) logits in its own curve."""
        mapped: Tensor = (formulas.steps if self.steps else formulas.lines)(tensor_ops, self, scores)
        return mapped

    def starts(self) -> Sequence[Tensor]:
        """There is nothing to descend over."""
        return []

    def solve(self, data: ValidationSet, seed: int, tick: Callable[[float], None]) -> Solution:
        """Fit every class on its own."""
        del seed
        p, y = data.scores.softmax(dim=1).numpy(), data.labels.numpy()
        curves = []
        for k in range(self.num_classes):
            places, values = self.curve(p[:, k], (y == k).astype(np.float64), data.row_weights)
            curves.append((places, np.clip(values, 1.0 / p.size, 1.0)))
            tick((k + 1) / self.num_classes)
        longest = max(len(places) for places, _ in curves)
        padded = [[np.pad(row, (0, longest - len(row)), mode="edge") for row in curve] for curve in curves]
        both = torch.from_numpy(np.array(padded))
        self.places, self.values = both[:, 0].contiguous(), both[:, 1].contiguous()
        return Solution(float("nan"), 1, 1, self.num_classes)

    def invalid_reason(self) -> str | None:
        """Say so if places are out of order, or a value is not a probability above 0."""
        return formulas.invalid_curve(self, self.num_classes)

    @classmethod
    def restored(cls, tensors: Mapping[str, Tensor], num_classes: int) -> Self:
        """Make room for as many places as were stored."""
        places = tensors.get("places")
        return cls(num_classes, places.shape[1] if places is not None and places.ndim == 2 else 0)

    def describe(self) -> dict[str, Any]:
        """Return how many places a curve has at most."""
        return {"places_per_class": self.places.shape[1]}


class HistogramBinning(PerClassFunction):
    """The share of hits in each of 15 bins of equal mass (Zadrozny and Elkan 2001)."""

    name = "histogram"

    def curve(self, probabilities: Array, hits: Array, weights: Array | None) -> Curve:
        """Cut at quantiles; equal probabilities stay together."""
        shares = np.arange(1, BINS) / BINS
        if weights is None:
            edges = np.unique(np.quantile(probabilities, shares))
        else:
            edges = np.unique(np.quantile(probabilities, shares, weights=weights, method="inverted_cdf"))
            hits = hits * weights
        where = np.searchsorted(edges, probabilities, side="right")
        counts = np.bincount(where, weights=weights, minlength=len(edges) + 1)
        sums = np.bincount(where, weights=hits, minlength=len(edges) + 1)
        filled = counts > 0
        return np.concatenate([[0.0], edges])[filled], sums[filled] / counts[filled]


class IsotonicCalibration(PerClassFunction):
    """A non-decreasing piecewise linear function, by scikit-learn (Zadrozny and Elkan 2002)."""

    name = "isotonic"
    steps = False

    def curve(self, probabilities: Array, hits: Array, weights: Array | None) -> Curve:
        """Fit scikit-learn's isotonic regression."""
        from sklearn.isotonic import IsotonicRegression  # noqa: PLC0415 - only fits need it

        regression = IsotonicRegression(y_min=0.0, y_max=1.0, out_of_bounds="clip")
        fitted = regression.fit(probabilities, hits, sample_weight=weights)
        return fitted.X_thresholds_, fitted.y_thresholds_


class VennAbers(PerClassFunction):
    """Inductive Venn-Abers prediction (Vovk, Petej and Fedorova 2015): p1 / (1 - p0 + p1).

    p0 and p1 are the values, at a new sample, of the isotonic fits that it has joined with label 0 or 1. A
    sample whose probability equals one that was seen joins the group of that value.
    """

    name = "venn-abers"

    def curve(self, probabilities: Array, hits: Array, weights: Array | None) -> Curve:
        """Let a new sample of either label join every group of equal probabilities, and every gap."""
        from boxcal.calibrators.fitting.kernels import isotonic_with_one_more  # noqa: PLC0415 - needs numba

        groups, index, counts = np.unique(probabilities, return_inverse=True, return_counts=True)
        if weights is not None:  # together as many as the effective number of samples
            scaled = weights * (effective_samples(weights) / weights.sum())
            counts, hits = np.bincount(index, weights=scaled), hits * scaled
        sums = np.bincount(index, weights=hits)
        p0, p1 = (isotonic_with_one_more(counts.astype(np.float64), sums, label) for label in (0.0, 1.0))
        places = np.column_stack([groups, np.nextafter(groups, 2.0)]).ravel()
        places, values = np.concatenate([[0.0], places]), p1 / (1.0 - p0 + p1)
        first = np.concatenate([places[1:] > places[:-1], [True]])  # a group at 0 leaves no gap before it
        places, values = places[first], values[first]
        changes = np.concatenate([[True], values[1:] != values[:-1]])
        return places[changes], values[changes]
