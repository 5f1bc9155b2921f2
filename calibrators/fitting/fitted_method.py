"""A fitted method: its two maps with the parameters that the search in `fitter.py` found."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from boxcal.calibrators.data import ValidationSet
from boxcal.calibrators.fitting.descent import Array, Minimum
from boxcal.calibrators.fitting.rows import losses_of, mean_of
from boxcal.calibrators.maps.base import BoxMap, LogitMap
from boxcal.calibrators.maps.chain import Chain
from boxcal.calibrators.maps.identity import IdentityMap
from boxcal.calibrators.maps.network import NetworkMap
from boxcal.calibrators.maps.temperature import TemperatureScaling

Maps = tuple[LogitMap, BoxMap]


@dataclass(frozen=True)
class Fitted:
    """A method's two maps with the parameters found, and the search that found them.

    The minimum's value is the objective: the mean NLL plus the map's penalty.
    """

    logit_map: LogitMap
    bound_map: BoxMap
    minimum: Minimum
    contains: tuple[str, ...] = ()
    """The methods whose optima this one is never above."""

    @staticmethod
    def at(maps: Maps, point: Array, minimum: Minimum) -> Fitted:
        """Give both maps with the parameters at a point."""
        logit_map, bound_map = maps
        first = logit_map.moved(point[: logit_map.size])
        last = bound_map.moved(point[logit_map.size :]) if len(point) > logit_map.size else bound_map
        return Fitted(first, last, replace(minimum, coordinates=point, members=(), folds=()))

    def behind(self, logit_map: LogitMap, whole: LogitMap | None = None) -> Fitted:
        """Put a map that changes nothing, and its coordinates, before the maps of this fit.

        `whole` is the logit map of the result where this fit has one of its own.
        """
        own = logit_map.coordinates()

        def longer(points: tuple[Array, ...]) -> tuple[Array, ...]:
            return tuple(np.concatenate([own, point]) for point in points)

        found = self.minimum
        (point,), members, folds = longer((found.coordinates,)), longer(found.members), longer(found.folds)
        minimum = replace(found, coordinates=point, members=members, folds=folds)
        return replace(self, logit_map=whole or logit_map, minimum=minimum)

    def valued(self, data: ValidationSet) -> Fitted:
        """Set the minimum's value to the objective at the parameters that the maps hold."""
        return replace(self, minimum=replace(self.minimum, value=self.objective(data)))

    @property
    def members(self) -> list[Array]:
        """Coordinates of every network whose mean the fit is; of the one optimum of other fits."""
        return list(self.minimum.members or [self.minimum.coordinates])

    @property
    def folds(self) -> list[Array]:
        """Coordinates found for each fold, without its unseen rows; the members if there are none."""
        return list(self.minimum.folds) or self.members

    @property
    def has_networks(self) -> bool:
        """Whether it is the mean of networks that cross-validation found better than constants."""
        return bool(self.minimum.members and self.minimum.epochs)

    @property
    def log_temperature(self) -> float:
        """Log of the temperature of `ts`, or of `ts` with bounds."""
        return float(self._first.coordinates()[0])

    @property
    def _first(self) -> LogitMap:
        """The logit map, or the first of two."""
        return self.logit_map.first if isinstance(self.logit_map, Chain) else self.logit_map

    def mapped(self, data: ValidationSet) -> Array:
        """Give the mapped logits (N, K)."""
        mapped: Array = self.logit_map(self.logit_map.source(data))
        return mapped

    def nll(self, data: ValidationSet) -> float:
        """Mean NLL of a set."""
        # A temperature does not depend on a number added to a row, so nothing large is copied.
        is_plain = isinstance(self.logit_map, IdentityMap | TemperatureScaling)
        source = data.logits if is_plain else self.logit_map.source(data)
        return mean_of(losses_of(source, data.labels, self.logit_map, self.bound_map), data.weights)

    def objective(self, data: ValidationSet) -> float:
        """Mean NLL plus the penalty."""
        penalty = self.logit_map.penalty(self.logit_map.parameters)
        return self.nll(data) + (0.0 if penalty is None else penalty[0])

    def saturation(self, data: ValidationSet) -> float | None:
        """Share of flat units on a set, of the network that has most of them; None without a network."""
        first, shares = self._first, []
        if isinstance(first, NetworkMap):
            shares.append(first.saturation(data.scores))
        if isinstance(self.bound_map, NetworkMap):
            shares.append(self.bound_map.saturation(self.mapped(data)))
        return max(shares, default=None)
