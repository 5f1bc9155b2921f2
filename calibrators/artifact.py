"""A calibrator as bytes and back: safetensors whose metadata holds a JSON spec; never pickle.

The tensors are the float64 parameters of the logit map and the bound map; the spec names the method, the
number of classes and, for people, the parameters.
"""

from __future__ import annotations

import json
import struct
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import nn

from calibrators.calibrator import Calibrator
from calibrators.errors import ArtifactError, CalibrationError
from calibrators.method import parse

FORMAT = "boxcal-calibrator"
LOGIT_MAP, BOUND_MAP = "logit_map", "bound_map"
VERSION = 1
LARGEST_HEADER = 1 << 20
MOST_CLASSES = 1_000_000


def to_bytes(calibrator: Calibrator) -> bytes:
    """Serialise a calibrator; equal calibrators give equal bytes."""
    tensors = {
        f"{part}.{name}": value.contiguous()
        for part, module in _parts(calibrator).items()
        for name, value in module.state_dict().items()
    }
    spec = {"format": FORMAT, "version": VERSION, **calibrator.spec}
    return save(tensors, metadata={"spec": json.dumps(spec, sort_keys=True)})


def from_bytes(data: bytes) -> Calibrator:
    """Build the calibrator that the bytes hold.

    Raises
    ------
    ArtifactError
        If the bytes are no safetensors file, have no spec of ours, or hold other tensors than the method has.
    """
    spec = _read_spec(data)
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
    try:
        method = parse(name)
        tensors = load(data)
    except (CalibrationError, SafetensorError) as error:
        raise ArtifactError(f"not a calibrator: {error}") from error
    for key, tensor in tensors.items():
        if tensor.dtype is not torch.float64 or not torch.isfinite(tensor).all():
            raise ArtifactError(f"the tensor {key!r} is not all finite float64 numbers")
    of_logit_map = {
        key.removeprefix(f"{LOGIT_MAP}."): v for key, v in tensors.items() if key.startswith(LOGIT_MAP)
    }
    calibrator = Calibrator(name, *method.stored_maps(of_logit_map, num_classes), num_classes)
    expected = set()
    for part, module in _parts(calibrator).items():
        for key, own in module.state_dict().items():
            full = f"{part}.{key}"
            expected.add(full)
            if full not in tensors or tensors[full].shape != own.shape:
                found = tuple(tensors[full].shape) if full in tensors else "missing"
                raise ArtifactError(
                    f"the tensor {full!r} should have shape {tuple(own.shape)}; it is {found}"
                )
            own.copy_(tensors[full])
    if foreign := sorted(set(tensors) - expected):
        raise ArtifactError(f"the method {name!r} has no tensor {foreign[0]!r}")
    if complaint := calibrator.logit_map.complaint() or calibrator.bound_map.complaint():
        raise ArtifactError(complaint)
    return calibrator


def _parts(calibrator: Calibrator) -> dict[str, nn.Module]:
    return {LOGIT_MAP: calibrator.logit_map, BOUND_MAP: calibrator.bound_map}


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
