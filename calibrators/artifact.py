"""A calibrator as bytes and back: safetensors whose metadata holds a JSON spec; never pickle.

The tensors are the float64 parameters of the logit map and the bound map; the spec names the method, the
number of classes and, for people, the parameters.
"""

from __future__ import annotations

import json
import struct
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, nn

from boxcal.calibrators.bound_maps.base import BoundMap
from boxcal.calibrators.errors import ArtifactError, CalibrationError
from boxcal.calibrators.logit_maps.base import LogitMap
from boxcal.calibrators.method import parse_stored

FORMAT = "boxcal-calibrator"
LOGIT_MAP, BOUND_MAP = "logit_map", "bound_map"
VERSION = 1
LARGEST_HEADER = 1 << 20
MOST_CLASSES = 1_000_000


class Content(NamedTuple):
    """What an artifact holds, in the order in which a `Calibrator` is built of it."""

    method: str
    logit_map: LogitMap
    bound_map: BoundMap
    num_classes: int


def write(logit_map: LogitMap, bound_map: BoundMap, spec: dict[str, Any]) -> bytes:
    """Serialise a calibrator's two maps and its spec; equal calibrators give equal bytes."""
    tensors = {
        f"{part}.{name}": value.contiguous()
        for part, module in ((LOGIT_MAP, logit_map), (BOUND_MAP, bound_map))
        for name, value in module.state_dict().items()
    }
    document = {"format": FORMAT, "version": VERSION, **spec}
    return save(tensors, metadata={"spec": json.dumps(document, sort_keys=True)})


def read(data: bytes) -> Content:
    """Rebuild the maps that the bytes hold.

    Raises
    ------
    ArtifactError
        If the bytes are no safetensors file, have no spec of ours, or hold other tensors than the method has.
    """
    name, num_classes = _method_and_size(_read_spec(data))
    try:
        method = parse_stored(name)
        tensors = load(data)
    except (CalibrationError, SafetensorError) as error:
        raise ArtifactError(f"not a calibrator: {error}") from error
    for key, tensor in tensors.items():
        if tensor.dtype is not torch.float64 or not torch.isfinite(tensor).all():
            raise ArtifactError(f"the tensor {key!r} is not all finite float64 numbers")
    of_logit_map = {
        key.removeprefix(f"{LOGIT_MAP}."): v for key, v in tensors.items() if key.startswith(LOGIT_MAP)
    }
    logit_map, bound_map = method.stored_maps(of_logit_map, num_classes)
    taken = _take(tensors, LOGIT_MAP, logit_map) | _take(tensors, BOUND_MAP, bound_map)
    if foreign := sorted(set(tensors) - taken):
        raise ArtifactError(f"the method {name!r} has no tensor {foreign[0]!r}")
    if invalid_reason := logit_map.invalid_reason() or bound_map.invalid_reason():
        raise ArtifactError(invalid_reason)
    return Content(name, logit_map, bound_map, num_classes)


def _take(tensors: dict[str, Tensor], part: str, module: nn.Module) -> set[str]:
    """Give a map its stored parameters, and return their names.

    A tensor that a map was given after version 1 keeps its fresh value where older bytes do not have it.
    """
    taken = set()
    added_later = {
        f"{place}.{name}".lstrip(".")
        for place, inner in module.named_modules()
        for name in getattr(inner, "added_later", ())
    }
    for key, own in module.state_dict().items():
        full = f"{part}.{key}"
        if full not in tensors and key in added_later:
            continue
        if full not in tensors or tensors[full].shape != own.shape:
            found = tuple(tensors[full].shape) if full in tensors else "missing"
            raise ArtifactError(f"the tensor {full!r} should have shape {tuple(own.shape)}; it is {found}")
        own.copy_(tensors[full])
        taken.add(full)
    return taken


def _method_and_size(spec: dict[str, Any]) -> tuple[str, int]:
    """Check the format, the version, the method and the number of classes."""
    if spec.get("format") != FORMAT:
        raise ArtifactError(f"not a calibrator: the spec's format is {spec.get('format')!r}, not {FORMAT!r}")
    if spec.get("version") != VERSION:
        raise ArtifactError(f"calibrator format version {spec.get('version')!r} is not {VERSION}")
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
