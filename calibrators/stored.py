"""What the bytes of a calibrator say, read without torch: the spec, the tensors as arrays, and the formulas.

The file is safetensors whose metadata holds a JSON spec; `artifact` writes it. Never pickle.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load

from boxcal.calibrators.errors import ArtifactError
from boxcal.calibrators.formulas import BOXES, FORMULAS, TOP, Formula, Parameters

Array = np.ndarray[Any, Any]
Tensors = dict[str, Array]

FORMAT = "boxcal-calibrator"
LOGIT_MAP, BOUND_MAP = "logit_map", "bound_map"
VERSION, AS_GIVEN = 2, 1
"""Maps of logits read them less the mean of their row; those of version 1 read them as they are given."""
LARGEST_HEADER = 1 << 20
MOST_CLASSES = 1_000_000

ADDITIONS = ("pb", "pb-mlp", "lb")
"""What follows the map of a fitted method, as in `ts+pb`."""
ADJUSTMENT = "em"
"""The map of an adjustment to other class frequencies, which no method fits."""
FITTED_BOXES = ("pb-lower", "pb-upper")
"""Further boxes, of plain logits."""
SUFFIXES = ("+em+ts", "+em", "+bias")
"""Follow the name of the method that is adjusted, as in `ts+em`, and say how the adjustment was found."""


class Stage(NamedTuple):
    """A formula with its name and its parameters."""

    name: str
    formula: Formula
    parameters: Parameters


class Stored(NamedTuple):
    """A calibrator as its bytes hold it.

    Attributes
    ----------
    spec
        The JSON document.
    tensors
        By the names that they have in the file.
    """

    method: str
    num_classes: int
    spec: dict[str, Any]
    tensors: Tensors

    @property
    def centred(self) -> bool:
        """Whether its map of logits reads them less the mean of their row."""
        return bool(self.spec["version"] != AS_GIVEN)


class Stages(NamedTuple):
    """The formulas that make up a calibrator, with their parameters, checked.

    Attributes
    ----------
    logit_maps
        Applied one after another.
    box
        Gives the bounds.
    width
        How many columns the first formula takes.
    """

    logit_maps: tuple[Stage, ...]
    box: Stage
    width: int


def read(data: bytes) -> Stored:
    """Read the spec and the tensors.

    Raises
    ------
    ArtifactError
        The bytes are no safetensors file, have no spec of ours, or tensors that are not finite float64.
    """
    spec = _read_spec(data)
    method, num_classes = _method_and_size(spec)
    try:
        tensors = load(data)
    except (SafetensorError, KeyError) as error:  # a KeyError is a dtype that NumPy does not have
        raise ArtifactError(f"not a calibrator: {error}") from error
    for key, tensor in tensors.items():
        if tensor.dtype != np.float64 or not np.isfinite(tensor).all():
            raise ArtifactError(f"the tensor {key!r} is not all finite float64 numbers")
    return Stored(method, num_classes, spec, tensors)


def stages(stored: Stored) -> Stages | None:
    """Find the formulas of a calibrator and give them their parameters; None if one has no formula.

    Raises
    ------
    ArtifactError
        A tensor is missing, has another shape, belongs to no map, or holds what no fit could have produced.
    """
    names = _parts(stored.method)
    if names is None:
        return None
    sizes: dict[str, int] = {"K": stored.num_classes, "T": min(TOP, stored.num_classes)}
    taken: set[str] = set()
    maps = tuple(
        _stage(name, FORMULAS[name], place, stored, sizes, taken)
        for place, name in zip(_places(len(names.logit_maps)), names.logit_maps, strict=True)
    )
    box = _stage(names.box, BOXES[names.box], BOUND_MAP, stored, sizes, taken)
    if foreign := sorted(set(stored.tensors) - taken):
        raise ArtifactError(f"the method {stored.method!r} has no tensor {foreign[0]!r}")
    for _, formula, parameters in (*maps, box):
        if invalid_reason := formula.invalid_reason(parameters, stored.num_classes):
            raise ArtifactError(invalid_reason)
    return Stages(maps, box, sizes.get("D", stored.num_classes))


def reads_of_methods() -> dict[str, str]:
    """Map each method of `fit` to what it reads: `logits`, `features` or `inputs`. `auto` is the first."""
    maps = {name: formula for name, formula in FORMULAS.items() if name != ADJUSTMENT}
    found = {"auto": "logits"} | {name: formula.reads for name, formula in maps.items()}
    found |= dict.fromkeys(("pb", *FITTED_BOXES, "pb-mlp"), "logits")
    for name, formula in maps.items():
        if formula.combines and name != "uncalibrated":
            found |= {f"{name}+{added}": formula.reads for added in ADDITIONS if added != name}
    return found


class _Parts(NamedTuple):
    logit_maps: tuple[str, ...]
    box: str


def adjusted_method(name: str) -> str:
    """Return the name of the method without the adjustment."""
    for suffix in SUFFIXES:
        if name.endswith(suffix):
            return name.removesuffix(suffix)
    return name


def _parts(method: str) -> _Parts | None:
    """Split the name of a method into those of its maps; `fit` decides which combinations there are."""
    fitted = adjusted_method(method)
    first, *rest = [fitted] if fitted in FORMULAS else fitted.split("+")
    box = "pb"
    if first in (*BOXES, *FITTED_BOXES) and not rest:
        first, rest = "uncalibrated", [first]
    if rest and rest[-1].startswith("pb"):
        box = "pb-mlp" if rest.pop() == "pb-mlp" else "pb"
    if first not in FORMULAS or rest not in ([], ["lb"]):
        return None
    return _Parts((first, *rest, *([ADJUSTMENT] if fitted != method else [])), box)


def _places(count: int) -> list[str]:
    """Name where the tensors of each map of a chain are: the last one is second to all before it."""
    inner = LOGIT_MAP
    places: list[str] = []
    for _ in range(count - 1):
        places.insert(0, f"{inner}.second")
        inner += ".first"
    return [inner, *places]


def _stage(  # noqa: PLR0917 - one caller
    name: str, formula: Formula, place: str, stored: Stored, sizes: dict[str, int], taken: set[str]
) -> Stage:
    """Take a formula's tensors, and check their shapes."""
    own: Tensors = {}
    for key, shape in formula.shapes.items():
        full = f"{place}.{key}"
        tensor = stored.tensors.get(full)
        if tensor is None and key in formula.later:
            own[key] = np.array(formula.later[key])
            continue
        found = "missing" if tensor is None else tensor.shape
        if tensor is None or (shape is not None and not _fits(tensor.shape, shape, sizes)):
            expected = tuple(size if isinstance(size, int) else sizes.get(size, size) for size in shape or ())
            raise ArtifactError(f"the tensor {full!r} should have shape {expected}; it is {found}")
        own[key] = tensor
        taken.add(full)
    return Stage(name, formula, _nested(own))


def _fits(actual: tuple[int, ...], shape: tuple[int | str, ...], sizes: dict[str, int]) -> bool:
    """Compare a shape; a letter of unknown size takes the first that it meets."""
    return len(actual) == len(shape) and all(
        size == (wanted if isinstance(wanted, int) else sizes.setdefault(wanted, size))
        for size, wanted in zip(actual, shape, strict=True)
    )


def _nested(tensors: Mapping[str, Array]) -> SimpleNamespace:
    """Turn names with dots into attributes of attributes."""
    inner: dict[str, dict[str, Array]] = {}
    own: dict[str, Any] = {}
    for name, value in tensors.items():
        first, dot, rest = name.partition(".")
        if dot:
            inner.setdefault(first, {})[rest] = value
        else:
            own[first] = value
    return SimpleNamespace(**own, **{name: _nested(values) for name, values in inner.items()})


def _method_and_size(spec: dict[str, Any]) -> tuple[str, int]:
    """Check the format, the version, the method and the number of classes."""
    if spec.get("format") != FORMAT:
        raise ArtifactError(f"not a calibrator: the spec's format is {spec.get('format')!r}, not {FORMAT!r}")
    if spec.get("version") not in (AS_GIVEN, VERSION):
        raise ArtifactError(f"calibrator format version {spec.get('version')!r} is not 1 to {VERSION}")
    num_classes, name = spec.get("num_classes"), spec.get("method")
    if (
        not isinstance(num_classes, int)
        or isinstance(num_classes, bool)
        or not 2 <= num_classes <= MOST_CLASSES
    ):
        raise ArtifactError(f"the spec's num_classes is {num_classes!r}")
    if not isinstance(name, str):
        raise ArtifactError(f"the spec's method is {name!r}")
    return name, num_classes


def _read_spec(data: bytes) -> dict[str, Any]:
    """Read the JSON spec out of the safetensors header, which starts with its own length."""
    if len(data) < 8:
        raise ArtifactError(f"not a calibrator: only {len(data)} bytes")
    (length,) = struct.unpack("<Q", data[:8])
    if not 2 <= length <= min(LARGEST_HEADER, len(data) - 8):
        raise ArtifactError("not a calibrator: no safetensors header")
    try:
        spec = json.loads(json.loads(data[8 : 8 + length])["__metadata__"]["spec"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ArtifactError("not a calibrator: no spec in the safetensors header") from error
    if not isinstance(spec, dict):
        raise ArtifactError("not a calibrator: the spec is no JSON object")
    return spec
