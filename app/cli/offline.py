"""Prediction on this machine: the model of the settings and a saved calibrator, without a service."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from boxcal.app.cli.output import UsageError, progress_bar
from boxcal.app.cli.settings import read_settings
from boxcal.app.cli.validation import saved_calibrator
from boxcal.app.client import Answer
from boxcal.app.fitting.backbones import BackboneSource
from boxcal.app.http.problems import BoxcalError
from boxcal.app.predict.options import BoundsOption, Labels, check_bounds
from boxcal.app.settings import limits
from boxcal.app.tables.labels import are_indices
from boxcal.calibrators.array_calibrator import ArrayCalibrator, Box, CalibratedArrays
from boxcal.models import InvalidImage
from boxcal.models.backends.backbone import Backbone, FeatureBackbone
from boxcal.models.inputs.base import Samples
from boxcal.models.inputs.images import decode

Bound = float | dict[str, float] | None


def predict(
    images: Sequence[Path], *, lower: Bound, upper: Bound, top_k: int, calibrator: str | None
) -> Answer:
    """Predict images with the model of the settings and a saved calibrator, or none."""
    settings = read_settings()
    backbone = BackboneSource.of(settings).load()
    bounds = bounds_of(lower, upper, backbone.labels)
    loaded = calibrator_of(calibrator, backbone.labels)
    started = time.perf_counter()
    scores = []
    with progress_bar("predicting") as advance:
        for first in range(0, len(images), settings.max_batch_size):
            batch = images[first : first + settings.max_batch_size]
            inputs = [image_of(path, backbone, limits.MAX_PIXELS) for path in batch]
            scores.append(scores_of(backbone, loaded, np.stack(inputs)))
            advance((first + len(batch)) / len(images), "")
    calibrated = loaded.calibrate(np.concatenate(scores), bounds)
    return Answer.model_validate(
        {
            "model": backbone.name,
            "calibrator": {"version": 0, "method": loaded.method},  # no registry knows it
            "bounds_relaxed": bool(calibrated.relaxed.any()),
            "predictions": _predictions(calibrated, backbone.labels, top_k),
            "timing_ms": {"total": (time.perf_counter() - started) * 1e3},
        }
    )


def bounds_of(lower: Bound, upper: Bound, labels: Sequence[str]) -> Box | None:
    """Bring the bounds of a command to vectors; None if they bound nothing."""
    sides = {name: side for name, side in (("lower", lower), ("upper", upper)) if side is not None}
    try:
        checked = check_bounds(BoundsOption(**sides), Labels(labels))
    except BoxcalError as error:
        raise UsageError(str(error)) from error
    return None if checked is None else (checked.lower, checked.upper)


def calibrator_of(path: str | None, labels: Sequence[str]) -> ArrayCalibrator:
    """Load a saved calibrator, or none; UsageError if it is for other classes."""
    num_classes = len(labels)
    if path is None:
        return ArrayCalibrator.uncalibrated(num_classes)
    loaded = saved_calibrator(path)
    if loaded.num_classes != num_classes:
        raise UsageError(f"{path} calibrates {loaded.num_classes} classes, but the model has {num_classes}")
    if loaded.classes is not None and not are_indices(labels) and loaded.classes != tuple(labels):
        at = next(k for k, name in enumerate(loaded.classes) if name != labels[k])
        raise UsageError(
            f"{path} calibrates other classes than those of the model: class {at} is {loaded.classes[at]!r}, "
            f"and {labels[at]!r} in the model"
        )
    return loaded


def image_of(path: Path, backbone: Backbone, max_pixels: int) -> NDArray[np.float32]:
    """Decode an image file; UsageError names the file."""
    if backbone.preprocessing is None:
        raise UsageError(f"{backbone.name} reads no images: {backbone.inputs.refusal('image')}")
    try:
        return decode(path.read_bytes(), preprocessing=backbone.preprocessing, max_pixels=max_pixels)
    except InvalidImage as error:
        raise UsageError(f"{path}: {error}") from error


def scores_of(
    backbone: Backbone, calibrator: ArrayCalibrator, samples: Samples, *, alone: bool = True
) -> NDArray[Any]:
    """Run the model, and give what the calibrator reads.

    Returns logits (N, K), features (N, D), or logits of shifted inputs.
    """
    if calibrator.reads == "features":
        if not isinstance(backbone, FeatureBackbone) or backbone.head is None:
            raise UsageError(f"{backbone.name} gives no features, which {calibrator.method!r} reads")
        return np.asarray(backbone.features(backbone.inputs.batch(samples)))
    if calibrator.input_shift is not None:
        samples = (samples + calibrator.input_shift).astype(np.float32)
    return np.asarray(backbone(backbone.inputs.batch(samples), alone=alone))


def _predictions(calibrated: CalibratedArrays, labels: Sequence[str], top_k: int) -> list[dict[str, object]]:
    """List the most probable classes of each row; ties go to the larger calibrated logit."""
    probabilities, logits = calibrated.probabilities, calibrated.logits
    box = (np.broadcast_to(side, logits.shape) for side in calibrated.box)
    at_lower, at_upper = (
        (probabilities == side) & (side != vacuous) for side, vacuous in zip(box, (0.0, 1.0), strict=True)
    )
    predictions = []
    for row, order in enumerate(np.lexsort((-logits, -probabilities))[:, :top_k].tolist()):
        top = [
            {
                "label": labels[index],
                "index": index,
                "probability": probabilities[row, index],
                "bound": "upper" if at_upper[row, index] else "lower" if at_lower[row, index] else None,
            }
            for index in order
        ]
        predictions.append({"top": top} | {name: top[0][name] for name in ("label", "index", "probability")})
    return predictions
