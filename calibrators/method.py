"""The names of the methods, `ts+pb` and the like, and what each is built of."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache
from importlib import import_module
from pkgutil import iter_modules
from typing import NamedTuple

from boxcal.calibrators import maps
from boxcal.calibrators.errors import UnknownMethodError, hint
from boxcal.calibrators.maps.base import BoxMap, LogitMap
from boxcal.calibrators.maps.class_prior import ClassPriorAdjustment
from boxcal.calibrators.maps.constant_box import ConstantBounds
from boxcal.calibrators.maps.identity import IdentityMap
from boxcal.calibrators.maps.logit_bounding import LogitBounding
from boxcal.calibrators.maps.mixture import Mixture
from boxcal.calibrators.maps.network_box import InstanceDependentBounds
from boxcal.calibrators.maps.parameterised_temperature import ParameterisedTemperature
from boxcal.calibrators.maps.stack import CLOSING, Stack, component_names

BOUND_MAPS: dict[str, type[BoxMap]] = {
    "pb": ConstantBounds,
    "pb-lower": ConstantBounds,
    "pb-upper": ConstantBounds,
    "pb-mlp": InstanceDependentBounds,
}
ADDITIONS = ("pb", "pb-mlp", "lb")
"""What every logit map that `combines` is listed with."""
MIXED = f"{Mixture.name}+"
"""Before the name of a method that reads a `Mixture`."""
TEMPERED = f"+{ParameterisedTemperature.name}"
"""After the name of a stack whose log probabilities a network divides."""
WITH_MIXTURE = ("ts", "vector", "sms", "dirichlet", "polynomial", "quadratic")
SUFFIXES = ("+em+ts", "+em", "+bias")
"""Follow the name of the method that is adjusted, as in `ts+em`, and say how the adjustment was found."""


OTHER_NAMES = {"temperature": "ts", "platt": "vector", "sigmoid": "vector", "structuredmatrix": "sms"}
"""What other libraries call a method, in small letters and without `scaling`."""


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
    mixed : bool
        Whether a `Mixture` precedes the logit map.
    adjusted : bool
        Whether a class prior adjustment, which no fit makes, follows everything before the box.
    components : tuple of str
        The methods that a stack mixes; empty for any other method.
    tempered : bool
        Whether `pts` follows the stack.
    """

    name: str
    logit_map: type[LogitMap]
    clipped: bool = False
    bounds: str = ""
    adjusted: bool = False
    mixed: bool = False
    components: tuple[str, ...] = ()
    tempered: bool = False

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
        count = self.logit_map.count(num_classes) + (LogitBounding.count(num_classes) if self.clipped else 0)
        if self.bounds in ("pb-lower", "pb-upper"):
            return count + 1
        return count + (BOUND_MAPS[self.bounds].count(num_classes) if self.bounds else 0)


@cache
def logit_maps() -> dict[str, type[LogitMap]]:
    """Give the class of every logit map by its name: what the modules of `boxcal.calibrators.maps` define."""
    found = {}
    for module in iter_modules(maps.__path__):
        for one in vars(import_module(f"{maps.__name__}.{module.name}")).values():
            if isinstance(one, type) and issubclass(one, LogitMap) and hasattr(one, "name"):
                found[one.name] = one
    return found


def methods() -> list[str]:
    """List every method that `fit` takes, besides `auto`."""
    return list(catalogue())


def reads_of_methods() -> dict[str, str]:
    """Map each method of `fit` to what it reads: `logits`, `features` or `inputs`. `auto` is the first."""
    return {"auto": "logits", **{name: one.logit_map.reads for name, one in catalogue().items()}}


@cache
def catalogue() -> dict[str, Method]:
    """Name every method: each logit map, each box on plain logits, and combinations, the plainest first."""
    listed = sorted(
        (one for one in logit_maps().values() if one.is_listed),
        key=lambda one: (one.is_network, one.count(20), one.name),
    )
    named = {one.name: Method(one.name, one) for one in listed}
    named |= {bounds: Method(bounds, IdentityMap, bounds=bounds) for bounds in BOUND_MAPS}
    for one in listed:
        if one.combines:
            for addition in ADDITIONS:
                name, clipped = f"{one.name}+{addition}", addition == LogitBounding.name
                named[name] = Method(name, one, clipped, "" if clipped else addition)
    named |= {MIXED + name: named[name]._replace(name=MIXED + name, mixed=True) for name in WITH_MIXTURE}
    return named


def parse(name: str) -> Method:
    """Read a method's name.

    Raises
    ------
    UnknownMethodError
        Naming the nearest method, then all that exist.
    """
    known = catalogue()
    if name not in known:
        raise UnknownMethodError(no_method(str(name), ["auto", *known]))
    return known[name]


def no_method(name: str, known: Iterable[str]) -> str:
    """Say that there is no method of a name, with the nearest one before the list of all."""
    plain = re.sub(r"[^\w+]|_|scaling|calibration", "", name[:100].lower())
    there_are = f"there are {', '.join(known)}"
    return f"no method {name!r:.200}{hint(OTHER_NAMES.get(plain, plain), known, there_are)}"


def parse_stored(name: str) -> Method:
    """Read the method's name of an artifact: any logit map with any addition, and the name of an adjustment.

    Raises
    ------
    UnknownMethodError
        As `parse`.
    """
    fitted = adjusted_method(name)
    if components := component_names(fitted):
        for component in components:
            part = parse(component)
            if part.bounds or part.clipped or part.logit_map.reads != "logits":
                raise UnknownMethodError(f"no stack has the component {component!r:.200}")
        after = fitted.rpartition(CLOSING)[2]
        if after not in ("", TEMPERED):
            raise UnknownMethodError(f"no stack is followed by {after!r:.200}")
        return Method(
            name, Stack, adjusted=fitted != name, components=tuple(components), tempered=bool(after)
        )
    first, _, addition = fitted.partition("+")
    one = logit_maps().get(first)
    if one in (None, ClassPriorAdjustment, Mixture) or addition not in ("", *ADDITIONS):
        return parse(fitted)._replace(name=name, adjusted=fitted != name)
    clipped = addition == LogitBounding.name
    return Method(name, one, clipped, "" if clipped else addition, fitted != name)


def adjusted_method(name: str) -> str:
    """Return the name of the method without the adjustment."""
    for suffix in SUFFIXES:
        if name.endswith(suffix):
            return name.removesuffix(suffix)
    return name
