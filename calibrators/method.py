"""The names of the methods, `ts+pb` and the like, and what each is built of."""

from __future__ import annotations

from dataclasses import dataclass

from calibrators.errors import UnknownMethodError
from calibrators.logit_maps.base import LogitMap
from calibrators.logit_maps.dual_bounding import DualProbabilityBounding
from calibrators.logit_maps.identity import Identity
from calibrators.logit_maps.temperature import TemperatureScaling

LOGIT_MAPS: dict[str, type[LogitMap]] = {
    Identity.name: Identity,
    TemperatureScaling.name: TemperatureScaling,
    DualProbabilityBounding.name: DualProbabilityBounding,
}
BOUNDS = ("pb", "pb-lower", "pb-upper")


@dataclass(frozen=True)
class Method:
    """What a method's name stands for: a logit map, and how its box is learned ('' for no box)."""

    name: str
    logit_map: type[LogitMap]
    bounds: str


def methods() -> list[str]:
    """List every method that `fit` takes, besides `auto`."""
    plain = list(LOGIT_MAPS)
    return [*plain, *BOUNDS, *(f"{name}+pb" for name in plain if name != Identity.name)]


def parse(name: str) -> Method:
    """Read a method's name.

    Raises
    ------
    UnknownMethodError
        Listing the methods that exist.
    """
    if name not in methods():
        raise UnknownMethodError(f"no method {name!r}; there are auto, {', '.join(methods())}")
    if name in BOUNDS:
        return Method(name, Identity, name)
    base, _, bounds = name.partition("+")
    return Method(name, LOGIT_MAPS[base], bounds)
