"""The names of the methods, `ts+pb` and the like, and what each is built of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor

from boxcal.calibrators.bound_maps.base import BoundMap
from boxcal.calibrators.bound_maps.constant import ConstantBounds
from boxcal.calibrators.bound_maps.instance_dependent import InstanceDependentBounds
from boxcal.calibrators.errors import UnknownMethodError
from boxcal.calibrators.logit_maps.base import LogitMap
from boxcal.calibrators.logit_maps.beta import BetaCalibration
from boxcal.calibrators.logit_maps.chain import Chain
from boxcal.calibrators.logit_maps.class_prior import ClassPriorAdjustment
from boxcal.calibrators.logit_maps.dual_bounding import DualProbabilityBounding
from boxcal.calibrators.logit_maps.ensemble_temperature import EnsembleTemperatureScaling
from boxcal.calibrators.logit_maps.identity import Identity
from boxcal.calibrators.logit_maps.last_layer import FeatureClipping, TiltAndAverage
from boxcal.calibrators.logit_maps.linear import (
    DirichletCalibration,
    MatrixScaling,
    StructuredMatrixScaling,
    VectorScaling,
)
from boxcal.calibrators.logit_maps.logit_bounding import LogitBounding
from boxcal.calibrators.logit_maps.neural_clamping import NeuralClamping
from boxcal.calibrators.logit_maps.parameterised_temperature import ParameterisedTemperature
from boxcal.calibrators.logit_maps.per_class import (
    HistogramBinning,
    IsotonicCalibration,
    PerClassFunction,
    VennAbers,
)
from boxcal.calibrators.logit_maps.temperature import TemperatureScaling
from boxcal.calibrators.stored import adjusted_method

LOGIT_MAPS: tuple[type[LogitMap], ...] = (  # from the plainest to the most elaborate
    Identity,
    TemperatureScaling,
    LogitBounding,
    EnsembleTemperatureScaling,
    FeatureClipping,
    TiltAndAverage,
    ParameterisedTemperature,
    VectorScaling,
    DualProbabilityBounding,
    BetaCalibration,
    HistogramBinning,
    IsotonicCalibration,
    VennAbers,
    StructuredMatrixScaling,
    DirichletCalibration,
    MatrixScaling,
    NeuralClamping,
)

BOUND_MAPS: dict[str, type[BoundMap]] = {
    "pb": ConstantBounds,
    "pb-lower": ConstantBounds,
    "pb-upper": ConstantBounds,
    "pb-mlp": InstanceDependentBounds,
}
STEPS_PER_CLASS = 15
"""Counted as parameters of a function of each class's probability: the bins of `histogram`."""
ADDITIONS = ("pb", "pb-mlp", "lb")
"""What every logit map that `combines` can be joined with."""


class Method(NamedTuple):
    """What a method's name stands for.

    Attributes
    ----------
    name : str
    logit_map : type
    clipped : bool
        Whether logit bounding follows the logit map.
    bounds : str
        How the box is learned, a key of `BOUND_MAPS`; empty for no box.
    adjusted : bool
        Whether a class prior adjustment, which no fit makes, follows everything before the box.
    """

    name: str
    logit_map: type[LogitMap]
    clipped: bool = False
    bounds: str = ""
    adjusted: bool = False

    @property
    def is_per_class(self) -> bool:
        """Whether it has parameters of each class's own."""
        return self.num_parameters(40) > self.num_parameters(20)

    @property
    def is_network(self) -> bool:
        """Whether one of its parts is a network."""
        return self.logit_map.is_network or (bool(self.bounds) and BOUND_MAPS[self.bounds].is_network)

    def num_parameters(self, num_classes: int) -> int:
        """Count the parameters that a fit chooses for K classes."""
        if issubclass(self.logit_map, PerClassFunction):
            return STEPS_PER_CLASS * num_classes
        count = self.logit_map(num_classes).size + (LogitBounding(num_classes).size if self.clipped else 0)
        if self.bounds in ("pb-lower", "pb-upper"):
            return count + 1
        return count + (BOUND_MAPS[self.bounds](num_classes).size if self.bounds else 0)

    def stored_maps(
        self, tensors: Mapping[str, Tensor], of_box: Mapping[str, Tensor], num_classes: int
    ) -> tuple[LogitMap, BoundMap]:
        """Build both maps of the sizes that their stored tensors have."""
        bound_map = BOUND_MAPS.get(self.bounds, ConstantBounds).restored(of_box, num_classes)
        if not self.clipped and not self.adjusted:
            return self.logit_map.restored(tensors, num_classes), bound_map
        first = {name.removeprefix("first."): v for name, v in tensors.items() if name.startswith("first.")}
        if self.adjusted:
            inner, _ = self._replace(adjusted=False).stored_maps(first, of_box, num_classes)
            return Chain(inner, ClassPriorAdjustment(num_classes)), bound_map
        chain = Chain(self.logit_map.restored(first, num_classes), LogitBounding(num_classes))
        return chain, bound_map


def methods() -> list[str]:
    """List every method that `fit` takes, besides `auto`."""
    return list(catalogue())


def catalogue() -> dict[str, Method]:
    """Name every method: each logit map, each box on plain logits, and the combinations."""
    named = {one.name: Method(one.name, one) for one in LOGIT_MAPS}
    named |= {bounds: Method(bounds, Identity, bounds=bounds) for bounds in BOUND_MAPS}
    for one in LOGIT_MAPS:
        if one.combines and one is not Identity:
            for addition in ADDITIONS:
                name, clipped = f"{one.name}+{addition}", addition == LogitBounding.name
                if not (clipped and one is LogitBounding):
                    named[name] = Method(name, one, clipped, "" if clipped else addition)
    return named


def parse(name: str) -> Method:
    """Read a method's name.

    Raises
    ------
    UnknownMethodError
        Listing the methods that exist.
    """
    known = catalogue()
    if name not in known:
        raise UnknownMethodError(f"no method {name!r}; there are auto, {', '.join(known)}")
    return known[name]


def parse_stored(name: str) -> Method:
    """Read the method's name of an artifact: one that `parse` reads, or that with the name of an adjustment.

    Raises
    ------
    UnknownMethodError
        As `parse`.
    """
    fitted = adjusted_method(name)
    return parse(fitted)._replace(name=name, adjusted=fitted != name)
