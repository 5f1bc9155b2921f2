"""What `isotonic`, `histogram` and `venn-abers` share: a function of each class's own probability."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from boxcal.calibrators.data import ValidationSet
from boxcal.calibrators.logit_maps.base import LogitMap, Solution

Array = np.ndarray[Any, Any]
Curve = tuple[Array, Array]
"""Ascending places in [0, 1], and the function's values there."""


class PerClassFunction(LogitMap):
    """`T(g)_k = log f_k(softmax(g)_k)`, one class against the rest, normalised by the softmax that follows.

    Between two places the function is linear where `steps` is false; otherwise it keeps the value of the
    place before. Values are at least 1 / (N K), so that no class is ruled out by what N samples did not
    show. A fresh map, without places, changes nothing.
    """

    combines = False
    steps = False
    places: Tensor
    values: Tensor

    def __init__(self, num_classes: int, num_places: int = 0) -> None:
        super().__init__(num_classes)
        for name in ("places", "values"):
            self.register_buffer(name, torch.zeros(num_classes, num_places, dtype=torch.float64))

    def curve(self, probabilities: Array, hits: Array) -> Curve:
        """Fit one class: its probabilities (N,) against whether it was the label (N,)."""
        raise NotImplementedError

    def forward(self, scores: Tensor) -> Tensor:
        """Look up every class of (N, K) logits in its own curve."""
        if self.places.shape[1] == 0:
            return scores
        p = scores.softmax(dim=1).T.contiguous()
        last = self.places.shape[1] - 1
        right = torch.searchsorted(self.places, p, right=True).clamp(max=last)
        left = (right - 1).clamp(min=0)
        at_left = self.values.gather(1, left)
        if self.steps:
            return torch.where(p >= self.places[:, last:], self.values[:, last:], at_left).log().T
        begin, end = self.places.gather(1, left), self.places.gather(1, right)
        share = ((p - begin) / (end - begin)).nan_to_num(0.0).clamp(0.0, 1.0)
        return (at_left + share * (self.values.gather(1, right) - at_left)).log().T

    def starts(self) -> Sequence[Tensor]:
        """There is nothing to descend over."""
        return []

    def solve(self, data: ValidationSet, seed: int, tick: Callable[[float], None]) -> Solution:
        """Fit every class on its own."""
        del seed
        p = data.scores.softmax(dim=1).numpy()
        y = data.labels.numpy()
        curves = []
        for k in range(self.num_classes):
            curves.append(self.curve(p[:, k], (y == k).astype(np.float64)))
            tick((k + 1) / self.num_classes)
        longest = max(len(places) for places, _ in curves)
        floor = 1.0 / p.size
        rows = [
            np.stack([_padded(c[0], longest), _padded(np.clip(c[1], floor, 1.0), longest)]) for c in curves
        ]
        both = torch.from_numpy(np.stack(rows))
        self.places, self.values = both[:, 0].contiguous(), both[:, 1].contiguous()
        return Solution(float("nan"), 1, 1, self.num_classes)

    def invalid_reason(self) -> str | None:
        """Say so if places are out of order, or a value is no probability above 0."""
        if self.places.numel() and bool((self.places.diff(dim=1) < 0).any()):
            return "the places of a curve are not in ascending order"
        if self.values.numel() and not bool(((self.values > 0) & (self.values <= 1)).all()):
            return "a curve has a value that is no probability above 0"
        return None

    @classmethod
    def restored(cls, tensors: Mapping[str, Tensor], num_classes: int) -> Self:
        """Make room for as many places as were stored."""
        places = tensors.get("places")
        return cls(num_classes, places.shape[1] if places is not None and places.ndim == 2 else 0)

    def describe(self) -> dict[str, Any]:
        """Return how many places a curve has at most."""
        return {"places_per_class": self.places.shape[1]}


def one_per_run(places: Array, values: Array) -> Curve:
    """Keep only the first place of every run of equal values."""
    keep = np.ones(len(values), dtype=bool)
    keep[1:] = values[1:] != values[:-1]
    return places[keep], values[keep]


def _padded(values: Array, length: int) -> Array:
    return np.pad(values, (0, length - len(values)), mode="edge")
