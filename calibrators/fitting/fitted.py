"""A fitted method: its two maps with the parameters that the search in `fitter.py` found."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from boxcal.calibrators.bound_maps.base import BoundMap
from boxcal.calibrators.bound_maps.constant import ConstantBounds
from boxcal.calibrators.data import ValidationSet
from boxcal.calibrators.fitting.descent import Array, Minimum
from boxcal.calibrators.fitting.joint import dense_loss, losses_of, mean_of
from boxcal.calibrators.logit_maps.base import LogitMap
from boxcal.calibrators.logit_maps.chain import Chain
from boxcal.calibrators.logit_maps.identity import Identity
from boxcal.calibrators.logit_maps.temperature import TemperatureScaling

Maps = tuple[LogitMap, BoundMap]


@dataclass(frozen=True)
class Fitted:
    """A method's two maps with the parameters found, and the search that found them.

    The minimum's value is the objective: the mean NLL plus the map's penalty.
    """

    logit_map: LogitMap
    bound_map: BoundMap
    minimum: Minimum
    contains: tuple[str, ...] = ()
    """The methods whose optima this one is never above."""

    @staticmethod
    def at(maps: Maps, point: Tensor, minimum: Minimum) -> Fitted:
        """Give copies of both maps with the parameters at a point."""
        first, last = deepcopy(maps[0]), deepcopy(maps[1])
        first.set_coordinates(point[: first.size])
        if len(point) > first.size:
            last.set_coordinates(point[first.size :])
        return Fitted(first, last, replace(minimum, coordinates=point.numpy(), members=(), folds=()))

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
    def members(self) -> list[Tensor]:
        """Coordinates of every network whose mean the fit is; of the one optimum of other fits."""
        return [torch.from_numpy(point) for point in self.minimum.members or [self.minimum.coordinates]]

    @property
    def folds(self) -> list[Tensor]:
        """Coordinates found for each fold, without its unseen rows; the members if there are none."""
        return [torch.from_numpy(point) for point in self.minimum.folds] or self.members

    @property
    def has_networks(self) -> bool:
        """Whether it is the mean of networks that cross-validation found better than constants."""
        return bool(self.minimum.members and self.minimum.epochs)

    @property
    def log_temperature(self) -> float:
        """Log of the temperature of `ts`, or of `ts` with bounds."""
        scaling = self.logit_map.first if isinstance(self.logit_map, Chain) else self.logit_map
        return float(scaling.coordinates()[0])

    @torch.no_grad()
    def mapped(self, data: ValidationSet) -> Tensor:
        """Give the mapped logits (N, K)."""
        mapped: Tensor = self.logit_map(self.logit_map.source(data))
        return mapped

    @torch.no_grad()
    def nll(self, data: ValidationSet) -> float:
        """Mean NLL of a set."""
        box = self.bound_map
        if isinstance(box, ConstantBounds) and isinstance(self.logit_map, Identity | TemperatureScaling):
            limits = box.lower.item(), box.upper.item()
            return mean_of(
                losses_of(data.logits, data.labels.numpy(), limits, self.logit_map), data.row_weights
            )
        mapped = self.mapped(data)
        limits_of_rows = [
            bound.expand(len(mapped), 1)[:, 0].contiguous().numpy() for bound in box.box(mapped)
        ]
        losses = dense_loss(mapped.contiguous().numpy(), data.labels.numpy(), *limits_of_rows)[0]
        return mean_of(losses, data.row_weights)

    @torch.no_grad()
    def objective(self, data: ValidationSet) -> float:
        """Mean NLL plus the penalty."""
        penalty = self.logit_map.penalty(dict(self.logit_map.named_parameters()))
        return self.nll(data) + (0.0 if penalty is None else float(penalty))

    @torch.no_grad()
    def saturation(self, data: ValidationSet) -> float | None:
        """Share of flat units on a set, of the network that has most of them; None without a network."""
        shares = []
        if self.logit_map.is_network:
            shares.append(self.logit_map.saturation(data.scores))
        if self.bound_map.is_network:
            shares.append(self.bound_map.saturation(self.mapped(data)))
        return max((share for share in shares if share is not None), default=None)
