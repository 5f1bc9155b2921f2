"""What one fit does, from the checked validation set to everything the registry keeps of it.

It runs in the worker process and needs nothing of the service: it is given a folder and gives a calibrator.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from boxcal.app.fitting import requirements
from boxcal.app.fitting.image_sets import ImageSet, to_validation_set
from boxcal.app.fitting.messages import FitOutcome, FitTask
from boxcal.app.fitting.validation_set import ValidationSet
from boxcal.app.registry.records import FittedCalibrator
from boxcal.calibrators import Calibrator, fit
from boxcal.calibrators.duplicates import Sketch
from boxcal.calibrators.errors import MissingDataError
from boxcal.calibrators.evaluation.reliability import reliability_png, reliability_svg
from boxcal.calibrators.evaluation.report import cross_fitted_report

Progress = Callable[[float, str], None]
SEED = 0
ROUND_TRIP_ROWS = 100
IMAGES = 0.3  # of the progress, where there are images


def perform(task: FitTask, progress: Progress) -> FitOutcome:
    """Fit, judge on unseen folds, draw, and prove that the bytes give the same answers.

    Raises
    ------
    ValueError
        The data cannot be fitted by this method; says why.
    """
    data, begin = task.data, 0.0
    against = None if task.against is None else Calibrator.from_bytes(task.against)
    wanted = {requirements.reads(task.method)} | ({against.reads} if against else set())
    if isinstance(data, ImageSet):
        begin = IMAGES
        data = to_validation_set(data, task.source, _part(progress, 0.0, begin), wanted)
    progress(begin, "reading the validation set")
    logits, labels = (torch.from_numpy(array) for array in data.arrays())
    extras = _extras(task, data, against)
    result = fit(
        task.method, logits, labels, seed=SEED, progress=_part(progress, begin + 0.02, 0.5), **extras
    )
    report = cross_fitted_report(
        result.method,
        logits,
        labels,
        seed=SEED,
        progress=_part(progress, 0.5, 0.95),
        against=against,
        known=None if task.known is None else Sketch.read(task.known),
        **extras,
    )
    progress(0.95, "drawing the reliability diagram")
    document = report.to_dict()
    svg, png = reliability_svg(document), reliability_png(document)
    document["fit"] = {
        "method": result.method,
        "nll": result.nll,
        "seconds": result.seconds,
        "certificate": result.certificate.to_dict(),
        "choice": result.choice,
    }
    artifact = result.calibrator.to_bytes()
    source = (
        torch.from_numpy(extras["features"]) if result.calibrator.reads == requirements.FEATURES else logits
    )
    _check_round_trip(result.calibrator, artifact, source[:ROUND_TRIP_ROWS])
    fitted = FittedCalibrator(
        method=result.method,
        artifact=artifact,
        spec=result.calibrator.spec,
        report=document,
        reliability_svg=svg,
        reliability_png=png,
        samples=task.data.samples,
    )
    return FitOutcome(fitted, report.is_better)


def _extras(task: FitTask, data: ValidationSet, against: Calibrator | None) -> dict[str, Any]:
    """Give what the method, and the calibrator it is compared with, read besides logits."""
    named = {requirements.reads(task.method): f"the method {task.method!r}"}
    if against is not None:
        named.setdefault(against.reads, f"the active calibrator, {against.method!r}, to compare with it")
    if task.method == "auto" and data.besides(requirements.FEATURES) is not None:
        named.setdefault(requirements.FEATURES, "the methods that read the features sent")
    if set(named) == {"logits"}:
        return {}
    backbone = task.source.load()
    for wanted, who in named.items():
        if missing := requirements.missing(wanted, data, backbone):
            raise MissingDataError(f"For {who}, {missing}.")
    return requirements.extras(set(named), data, backbone)


def _part(progress: Progress, start: float, end: float) -> Progress:
    """Map the progress of one step onto its share of the whole."""
    return lambda fraction, stage: progress(start + fraction * (end - start), stage)


def _check_round_trip(calibrator: Calibrator, artifact: bytes, logits: torch.Tensor) -> None:
    if not torch.equal(Calibrator.from_bytes(artifact)(logits), calibrator(logits)):
        raise RuntimeError(f"The `{calibrator.method}` calibrator answers differently once it was saved.")
