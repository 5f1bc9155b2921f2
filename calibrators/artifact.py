"""A calibrator as bytes and back: safetensors whose metadata holds a JSON spec; never pickle.

The tensors are the float64 parameters of the logit map and the bound map; the spec names the method, the
number of classes, the SHA-256 of all this and, for people, the parameters. Nothing here needs torch.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from boxcal.calibrators.errors import ArtifactError, CalibrationError
from boxcal.calibrators.maps.base import BoxMap, LogitMap
from boxcal.calibrators.maps.chain import FIRST, SECOND, Chain
from boxcal.calibrators.maps.class_prior import ClassPriorAdjustment
from boxcal.calibrators.maps.constant_box import ConstantBounds
from boxcal.calibrators.maps.logit_bounding import LogitBounding
from boxcal.calibrators.maps.mixture import Mixture
from boxcal.calibrators.maps.parameterised_temperature import ParameterisedTemperature
from boxcal.calibrators.maps.parameters import Array
from boxcal.calibrators.maps.stack import FLOOR, WEIGHTS, Component, Stack
from boxcal.calibrators.method import BOUND_MAPS, Method, parse, parse_stored
from boxcal.calibrators.row_statistics import SKETCHED, Sketch

FORMAT = "boxcal-calibrator"
LOGIT_MAP, BOUND_MAP = "logit_map", "bound_map"
VERSION = 2
LARGEST_HEADER = 1 << 26
MOST_CLASSES = 1_000_000


class Content(NamedTuple):
    """What an artifact holds: the arguments with which a calibrator is built."""

    method: str
    logit_map: LogitMap
    bound_map: BoxMap
    num_classes: int
    # The names of the classes in the order of the columns; None where they are not known
    classes: tuple[str, ...] | None = None
    sketch: Sketch | None = None  # Of the rows that it was fitted to; None where they are not known


def write(
    logit_map: LogitMap,
    bound_map: BoxMap,
    spec: dict[str, Any],
    *,
    classes: Sequence[str] | None = None,
    sketch: Sketch | None = None,
) -> bytes:
    """Serialise a calibrator's two maps and its spec; equal calibrators give equal bytes."""
    tensors = {
        f"{part}.{name}": np.ascontiguousarray(value).reshape(value.shape)
        for part, one in ((LOGIT_MAP, logit_map), (BOUND_MAP, bound_map))
        for name, value in one.parameters.items()
    }
    document = {"format": FORMAT, "version": VERSION, **spec}
    if classes is not None:
        document["classes"] = list(classes)
    if sketch is not None:
        document["fitted_to"] = sketch.to_dict()
    document["sha256"] = _digest(document, tensors)
    return save(tensors, metadata={"spec": json.dumps(document, sort_keys=True)})


def _digest(spec: dict[str, Any], tensors: Mapping[str, Array]) -> str:
    """Compute the SHA-256 of a spec and of its tensors."""
    digest = hashlib.sha256(json.dumps(spec, sort_keys=True).encode())
    for name in sorted(tensors):
        digest.update(f"{name} {tensors[name].shape}".encode())
        digest.update(np.ascontiguousarray(tensors[name]).data)
    return digest.hexdigest()


def read(data: bytes) -> Content:
    """Rebuild the maps that the bytes hold."""
    data = bytes(data)  # a view of them reads as a list
    spec = _read_spec(data)
    written = spec.pop("sha256", None)  # 0.3.0 wrote none
    name, num_classes = _method_and_size(spec)
    try:
        tensors = load(data)
    except (SafetensorError, KeyError) as error:  # a KeyError is a dtype that NumPy does not have
        raise ArtifactError(f"not a calibrator: {error}") from error
    for key, tensor in tensors.items():
        if tensor.dtype != np.float64 or not np.isfinite(tensor).all():
            raise ArtifactError(f"the tensor {key!r} is not all finite float64 numbers")
    try:
        method = parse_stored(name)
    except CalibrationError as error:
        raise ArtifactError(f"not a calibrator: {error}") from error
    logit_map = _logit_map(method, _part(LOGIT_MAP, tensors), num_classes, LOGIT_MAP)
    box = BOUND_MAPS.get(method.bounds, ConstantBounds)
    bound_map = box.restored(_part(BOUND_MAP, tensors), num_classes, BOUND_MAP)
    taken = {f"{LOGIT_MAP}.{key}" for key in logit_map.parameters}
    taken |= {f"{BOUND_MAP}.{key}" for key in bound_map.parameters}
    if foreign := sorted(set(tensors) - taken):
        raise ArtifactError(f"the method {name!r} has no tensor {foreign[0]!r}")
    if invalid_reason := logit_map.invalid_reason() or bound_map.invalid_reason():
        raise ArtifactError(invalid_reason)
    if written is not None and written != _digest(spec, tensors):
        raise ArtifactError("the calibrator is damaged: its content does not have the SHA-256 that it names")
    return Content(name, logit_map, bound_map, num_classes, _classes(spec, num_classes), _sketch(spec))


def _classes(spec: dict[str, Any], num_classes: int) -> tuple[str, ...] | None:
    classes = spec.get("classes")
    if classes is None:
        return None
    if not isinstance(classes, list) or not all(isinstance(name, str) for name in classes):
        raise ArtifactError("the spec's classes are no list of names")
    if not len(classes) == len(set(classes)) == num_classes:
        raise ArtifactError(f"the spec names {len(set(classes))} classes, not {num_classes}")
    return tuple(classes)


def _sketch(spec: dict[str, Any]) -> Sketch | None:
    if "fitted_to" not in spec:
        return None
    try:
        sketch = Sketch.read(spec["fitted_to"])
    except (KeyError, TypeError, ValueError) as error:
        raise ArtifactError("the spec's `fitted_to` is no sketch of rows") from error
    if (found := len(sketch.hashes)) > SKETCHED:
        raise ArtifactError(f"the spec's `fitted_to` has {found} hashes; a sketch has {SKETCHED}")
    return sketch


def _logit_map(method: Method, tensors: Mapping[str, Array], num_classes: int, part: str) -> LogitMap:
    """Build the logit map; the last of several is second to all before it."""
    if not (method.adjusted or method.tempered or method.clipped or method.mixed):
        if method.components:
            return _stack(method.components, tensors, num_classes, part)
        return method.logit_map.restored(tensors, num_classes, part)
    last: type[LogitMap]
    if method.adjusted:
        before, last = method._replace(adjusted=False), ClassPriorAdjustment
    elif method.tempered:
        before, last = method._replace(tempered=False), ParameterisedTemperature
    elif method.clipped:
        before, last = method._replace(clipped=False), LogitBounding
    else:
        before, last = Method(Mixture.name, Mixture), method.logit_map
    first = _logit_map(before, _part(FIRST[:-1], tensors), num_classes, f"{part}.{FIRST[:-1]}")
    second = last.restored(_part(SECOND[:-1], tensors), num_classes, f"{part}.{SECOND[:-1]}")
    return Chain(first, second)


def _stack(names: Sequence[str], tensors: Mapping[str, Array], num_classes: int, part: str) -> Stack:
    """Build a stack of its components, each with the tensors of its place."""
    components = [
        Component(name, _logit_map(parse(name), _part(str(place), tensors), num_classes, f"{part}.{place}"))
        for place, name in enumerate(names)
    ]
    for name, shape in ((WEIGHTS, (len(names),)), (FLOOR, ())):
        found = tensors[name].shape if name in tensors else "missing"
        if found != shape:
            raise ArtifactError(f"the tensor {f'{part}.{name}'!r} should have shape {shape}; it is {found}")
    return Stack(components, tensors[WEIGHTS], tensors[FLOOR].item())


def _part(part: str, tensors: Mapping[str, Array]) -> dict[str, Array]:
    """Take the tensors of one part, by their names in it; copied, as those of a file may be read-only."""
    start = f"{part}."
    return {name.removeprefix(start): np.array(v) for name, v in tensors.items() if name.startswith(start)}


def _method_and_size(spec: dict[str, Any]) -> tuple[str, int]:
    """Check the format, the version, the method and the number of classes."""
    if spec.get("format") != FORMAT:
        raise ArtifactError(f"not a calibrator: the spec's format is {spec.get('format')!r}, not {FORMAT!r}")
    if spec.get("version") != VERSION:
        found = spec.get("version")
        what = "install a later release" if isinstance(found, int) and found > VERSION else "fit it again"
        raise ArtifactError(
            f"the calibrator has the format version {found!r}; this release reads version {VERSION}, which"
            f" was new in 0.3.0: {what}"
        )
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
