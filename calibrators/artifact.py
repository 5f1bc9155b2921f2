"""A calibrator as bytes and back: safetensors whose metadata holds a JSON spec; never pickle.

The tensors are the float64 parameters of the logit map and the bound map; the spec names the method, the
number of classes and, for people, the parameters.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import torch
from safetensors.torch import save
from torch import Tensor, nn

from boxcal.calibrators.bound_maps.base import BoundMap
from boxcal.calibrators.errors import ArtifactError, CalibrationError
from boxcal.calibrators.logit_maps.base import LogitMap
from boxcal.calibrators.method import parse_stored
from boxcal.calibrators.stored import AS_GIVEN, BOUND_MAP, FORMAT, LOGIT_MAP, VERSION
from boxcal.calibrators.stored import read as read_stored


class Content(NamedTuple):
    """What an artifact holds, in the order in which a `Calibrator` is built of it."""

    method: str
    logit_map: LogitMap
    bound_map: BoundMap
    num_classes: int
    centred: bool


def write(logit_map: LogitMap, bound_map: BoundMap, spec: dict[str, Any], *, centred: bool = True) -> bytes:
    """Serialise a calibrator's two maps and its spec; equal calibrators give equal bytes."""
    tensors = {
        f"{part}.{name}": value.contiguous()
        for part, module in ((LOGIT_MAP, logit_map), (BOUND_MAP, bound_map))
        for name, value in module.state_dict().items()
    }
    document = {"format": FORMAT, "version": VERSION if centred else AS_GIVEN, **spec}
    return save(tensors, metadata={"spec": json.dumps(document, sort_keys=True)})


def read(data: bytes) -> Content:
    """Rebuild the maps that the bytes hold.

    Raises
    ------
    ArtifactError
        If the bytes are no safetensors file, have no spec of ours, or hold other tensors than the method has.
    """
    stored = read_stored(data)
    name, num_classes = stored.method, stored.num_classes
    try:
        method = parse_stored(name)
    except CalibrationError as error:
        raise ArtifactError(f"not a calibrator: {error}") from error
    # Copied: arrays of a file may share read-only memory.
    tensors = {key: torch.tensor(array) for key, array in stored.tensors.items()}
    of_logit_map, of_box = (
        {key.removeprefix(f"{part}."): v for key, v in tensors.items() if key.startswith(part)}
        for part in (LOGIT_MAP, BOUND_MAP)
    )
    logit_map, bound_map = method.stored_maps(of_logit_map, of_box, num_classes)
    taken = _take(tensors, LOGIT_MAP, logit_map) | _take(tensors, BOUND_MAP, bound_map)
    if foreign := sorted(set(tensors) - taken):
        raise ArtifactError(f"the method {name!r} has no tensor {foreign[0]!r}")
    if invalid_reason := logit_map.invalid_reason() or bound_map.invalid_reason():
        raise ArtifactError(invalid_reason)
    return Content(name, logit_map, bound_map, num_classes, stored.centred)


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
