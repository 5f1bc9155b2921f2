"""Maps with parameters that a fit could have produced, for tests that need no fit."""

from typing import Any, TypeVar

import numpy as np

from boxcal.calibrators import Calibrator
from boxcal.calibrators.maps.base import LogitMap
from boxcal.calibrators.maps.chain import Chain
from boxcal.calibrators.maps.class_prior import ClassPriorAdjustment
from boxcal.calibrators.maps.constant_box import ConstantBounds
from boxcal.calibrators.maps.linear import LinearMap
from boxcal.calibrators.maps.logit_bounding import LogitBounding
from boxcal.calibrators.maps.mixture import Mixture
from boxcal.calibrators.maps.network import LOG_SURPRISAL
from boxcal.calibrators.maps.parameters import Map, with_products
from boxcal.calibrators.method import BOUND_MAPS, parse_stored

One = TypeVar("One", bound=Map)
CLASSES, FEATURES, PLACES = 12, 6, 9
NUMBERS: dict[str, Any] = {
    "temperature": 1.7,
    "adjustment_temperature": 0.6,
    "mixture_temperature": 1.4,
    "mixture_share": 0.05,
    "mixture_weights": [0.5, 0.3, 0.2],
    "logit_lower": -0.3,
    "logit_upper": -0.1,
    "from_largest": 1.0,
    "lower": 0.02,
    "upper": 0.45,
    "angle": 0.4,
    "radius": 0.8,
    "shift_threshold": 0.5,
}


def filled(one: type[One], kind: float = LOG_SURPRISAL, *, classes: int = CLASSES) -> One:
    rng = np.random.default_rng(1)
    sizes = {
        "K": classes,
        "T": min(10, classes),
        "D": FEATURES,
        "P": PLACES,
        "H": 5,
        "R": with_products(classes),
    }
    values: dict[str, Any] = {}
    for name, shape in one.shapes.items():
        own = [size if isinstance(size, int) else sizes[size] for size in shape or (3,)]
        noise = rng.random(own if shape != () else ())
        values[name] = NUMBERS.get(name, noise - 0.3)
        if name == "network.spread":
            values[name] = noise + 0.5
        if name in ("log_weights", "complement_weights", "shift_weights", "spread"):
            values[name] = noise + 0.3
        if name in ("places", "values"):
            values[name] = 0.05 + 0.9 * np.sort(noise, axis=1)
    if "network.normalised" in values:
        values["network.normalised"] = kind
    found = one(classes, values)
    if isinstance(found, LinearMap):
        found.strength = 1.0
    return found


def filled_calibrator(name: str, classes: int) -> Calibrator:
    method = parse_stored(name)
    logit_map: LogitMap = filled(method.logit_map, classes=classes)
    if method.mixed:
        logit_map = Chain(filled(Mixture, classes=classes), logit_map)
    for last, wanted in ((LogitBounding, method.clipped), (ClassPriorAdjustment, method.adjusted)):
        if wanted:
            logit_map = Chain(logit_map, filled(last, classes=classes))
    box = filled(BOUND_MAPS[method.bounds], classes=classes) if method.bounds else ConstantBounds(classes)
    return Calibrator(name, logit_map, box, classes)
