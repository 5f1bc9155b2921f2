"""What a method reads besides logits, and whether it can have it: told before a fit begins.

Most methods read logits alone. `fc` and `ta` read features and the backbone's last layer, `nc` the inputs and
the backbone itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from boxcal.app.fitting.backbones import BackboneSummary
from boxcal.app.fitting.worker.validation_set import StoredSet

if TYPE_CHECKING:
    from boxcal.models.backends.backbone import Backbone

FEATURES, INPUTS = "features", "inputs"
REQUIRED = {
    FEATURES: (
        "features are needed: an array `features` (N, D) beside `logits` and `labels` in the .npz, or "
        "labelled images, a folder for each class"
    ),
    INPUTS: "the inputs themselves are needed: upload labelled images, a folder for each class",
}
COMPARED_ROWS = 64
DIFFERENCE = 0.02  # of log-probabilities: what half precision leaves


def missing(wanted: str, data: StoredSet, backbone: BackboneSummary) -> str | None:
    """Say what is missing for methods that read `wanted`; None where nothing is."""
    if wanted not in {FEATURES, INPUTS}:
        return None
    if not (backbone.gives_features if wanted == FEATURES else backbone.is_open):
        given = "logits and features" if backbone.gives_features else "logits"
        return f"{wanted} are needed, and the format of {backbone.name} gives {given} alone"
    if wanted == FEATURES and backbone.head is None:
        return f"features are needed, and {backbone.name} has no linear last layer that reads them"
    sent = data.besides(wanted)
    if sent is None:
        return None if data.holds_images else REQUIRED[wanted]
    return _misfit(sent, data.arrays()[0], backbone) if wanted == FEATURES else None


def extras(wanted: set[str], data: StoredSet, backbone: Backbone) -> dict[str, Any]:
    """Give what `boxcal.calibrators.fit` takes besides logits and labels, for methods that read `wanted`."""
    from boxcal.models.backends.backbone import (  # noqa: PLC0415 - a check needs no backbone
        FeatureBackbone,
        OpenBackbone,
    )

    given: dict[str, Any] = {}
    if FEATURES in wanted and isinstance(backbone, FeatureBackbone):
        given |= {FEATURES: np.array(data.besides(FEATURES)), "head": backbone.head}
    if INPUTS in wanted and isinstance(backbone, OpenBackbone):
        given |= {INPUTS: np.array(data.besides(INPUTS)), "backbone": backbone.differentiable}
    return given


def _misfit(features: Any, logits: Any, backbone: BackboneSummary) -> str | None:
    """Say so if the backbone's last layer does not make the logits of the features."""
    if backbone.head is None:
        return None
    head = np.load(backbone.head)
    weight, bias = head[:, :-1], head[:, -1]
    if features.shape[1] != weight.shape[1]:
        return (
            f"`features` has {features.shape[1]} columns, and {backbone.name} has {weight.shape[1]} features"
        )
    rows = slice(0, COMPARED_ROWS)
    made, sent = features[rows] @ weight.T + bias, np.asarray(logits[rows], dtype=np.float64)
    made, sent = (values - values.mean(axis=1, keepdims=True) for values in (made, sent))
    off = np.abs(made - sent).max(axis=1) > DIFFERENCE * (1.0 + np.abs(sent).max(axis=1))
    if off.any():
        row = off.argmax()
        return f"the last layer of {backbone.name} does not make logits[{row}] of features[{row}]"
    return None
