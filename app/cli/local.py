"""Prediction on this machine: the service's own decoding, backbone and calibration, without the service."""

import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from boxcal.app import client
from boxcal.app.activation.active import ServedCalibrator
from boxcal.app.cli.failures import UsageError
from boxcal.app.cli.output import progress_bar
from boxcal.app.cli.settings import read_settings
from boxcal.app.client.calls import AnswerOptions, options_document
from boxcal.app.predict import options as request_options
from boxcal.app.predict import request_bounds
from boxcal.app.predict.answers import Answer
from boxcal.app.predict.build import decoder_of
from boxcal.app.predict.calibration import CalibrationRequest, calibrate_rows
from boxcal.app.predict.inputs import EncodedImage
from boxcal.app.predict.scoring import Scoring, shifted
from boxcal.calibrators import Calibrator
from boxcal.models.loading import load_backbone

__all__ = ["predict"]


def predict(images: Sequence[Path], options: AnswerOptions, calibrator: str | None) -> client.Answer:
    """Predict images with the model of the settings and a saved calibrator, or none.

    Raises
    ------
    BoxcalError, BackboneError, CalibrationError, UsageError
        Naming the image, the bound or the file that is wrong.
    """
    settings = read_settings()
    checked = request_options.from_json(options_document(options))
    backbone = load_backbone(
        settings.model,
        weights=settings.weights,
        labels=settings.labels,
        device=settings.device,
        precision=settings.precision,
    )
    labels = request_bounds.Labels(backbone.labels)
    bounds = request_bounds.check(checked.bounds, labels)
    served = _calibrator(calibrator, len(labels))
    decoder = decoder_of(backbone, settings.max_pixels)
    started = time.perf_counter()
    scoring, logits = Scoring(backbone), []
    with progress_bar("predicting") as advance:
        for first in range(0, len(images), settings.max_batch_size):
            batch = images[first : first + settings.max_batch_size]
            samples = np.stack([decoder.decode(EncodedImage(path.read_bytes()), str(path)) for path in batch])
            with scoring.requested_by(served):
                logits.append(scoring(shifted(samples, served), True))
            advance((first + len(batch)) / len(images), "")
    rows = calibrate_rows(torch.cat(logits), CalibrationRequest(served, bounds))
    seconds = {"total": time.perf_counter() - started}
    answer = Answer(backbone.name, labels.names, served, rows, checked, seconds)
    return client.Answer.model_validate_json(answer.to_json())


def _calibrator(path: str | None, num_classes: int) -> ServedCalibrator:
    """Load a saved calibrator; it counts as version 0, for no registry knows it."""
    if path is None:
        return ServedCalibrator(0, "uncalibrated", Calibrator.uncalibrated(num_classes))
    loaded = Calibrator.from_bytes(Path(path).read_bytes())
    if loaded.num_classes != num_classes:
        raise UsageError(f"{path} calibrates {loaded.num_classes} classes, but the model has {num_classes}")
    return ServedCalibrator(0, loaded.method, loaded)
