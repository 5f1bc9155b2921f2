"""What every bound map is: the second stage of a calibrator, `(a, b)` in `p = BCSoftmax(T(g); a, b)`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

from torch import Tensor

from boxcal.calibrators.operator import Bounds
from boxcal.calibrators.parametrised import Parametrised


class BoundMap(Parametrised):
    """A map from mapped logits (N, K) to one lower and one upper bound for all classes of a row."""

    def box(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Give lower and upper, each () or (N, 1), differentiably."""
        raise NotImplementedError

    def forward(self, logits: Tensor) -> Bounds:
        """Give the box of every row."""
        return Bounds(*self.box(logits))

    def starts_at(self, box: Tensor) -> Sequence[Sequence[Tensor]]:
        """Places from which a network descends, each as coordinates of several networks.

        `box` holds coordinates of constant bounds: (log of lower K, log of slack).
        """
        raise NotImplementedError

    def saturation(self, logits: Tensor) -> float | None:
        """Share of a network's units that are flat on mapped logits; None where there is no network."""
        del logits
        return None

    def coordinates_of(self, other: Parametrised) -> Tensor:
        """Coordinates at which every row has the box that another, plainer map gives it."""
        raise NotImplementedError

    def prepare(self, logits: Tensor) -> None:
        """Take from the mapped logits what is not fitted."""
        del logits

    def variants(self, logits: Tensor) -> Sequence[Self]:
        """Give maps that differ in what their network reads; cross-validation chooses one."""
        del logits
        return [self]

    def reading_as(self, other: BoundMap) -> Self:
        """Give a map whose network reads what that of another one reads."""
        del other
        return self
