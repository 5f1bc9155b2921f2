"""What a model that is loaded by its name reads and returns: `boxcal inspect` shows it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any

from boxcal.models.backends.backbone import OpenBackbone
from boxcal.models.inputs.preprocessing import ImageClassification
from boxcal.models.loading.specifications import load_backbone

BY_NAME = ("timm", "torchvision")
RANDOM = "random"


@dataclass(frozen=True)
class Description:
    model: str
    inputs: str  # Kind of its inputs, and what one input of a request may be
    members: tuple[str, ...]
    labels: tuple[str, ...]
    # Of one sample, and of the logits of two samples in a trial run; empty if there was none
    input_shape: tuple[int, ...]
    output_shape: tuple[int, ...]
    preprocessing: dict[str, Any] | None  # Of images; None if the model reads none, or if it is its own
    has_features: bool  # Whether calibrators may read the input of its last layer
    notes: tuple[str, ...]  # What must be known besides


def describe_model(spec: str) -> Description:
    """Load a model on the CPU, with random weights if its name has none, and run it on two blank inputs."""
    is_random = spec.partition(":")[0] in BY_NAME and "?" not in spec
    backbone = load_backbone(spec, weights=RANDOM if is_random else None, device="cpu")
    inputs, found, notes = backbone.inputs, (), []
    if inputs.kind == "none":
        notes.append(inputs.refusal(""))
    else:
        found = tuple(backbone(inputs.batch(inputs.blank(2))).shape)
    if is_random:
        notes.append("the weights were not loaded; to serve the model, set BOXCAL_WEIGHTS")
    if backbone.labels == tuple(map(str, range(backbone.num_classes))):
        notes.append("the classes have no names; name them in a file and set BOXCAL_LABELS")
    return Description(
        model=spec,
        inputs=inputs.kind,
        members=tuple(member for member in inputs.members if member != "cells"),
        labels=tuple(backbone.labels),
        input_shape=tuple(backbone.input_shape),
        output_shape=found,
        preprocessing=_written(backbone.preprocessing),
        has_features=isinstance(backbone, OpenBackbone) and backbone.head is not None,
        notes=tuple(notes),
    )


def _written(preprocessing: Any) -> dict[str, Any] | None:
    if not isinstance(preprocessing, ImageClassification):
        return None
    return {
        name: value.name.lower() if isinstance(value, Enum) else value
        for name, value in asdict(preprocessing).items()
    }
