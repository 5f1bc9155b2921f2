"""What one fit does, from the checked validation set to everything the registry keeps of it.

It runs in the worker process and needs nothing of the service: it is given a folder and gives a calibrator.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from app.refit.messages import FitOutcome, FitTask
from app.refit.pictures import PictureSet, to_validation_set
from app.registry.records import FittedCalibrator
from calibrators import Calibrator, fit
from calibrators.evaluation.reliability import reliability_png, reliability_svg
from calibrators.evaluation.report import cross_fitted_report

Progress = Callable[[float, str], None]
SEED = 0
ROUND_TRIP_ROWS = 100
PICTURES = 0.3  # of the progress, where there are pictures


def perform(task: FitTask, progress: Progress) -> FitOutcome:
    """Fit, judge on unseen folds, draw, and prove that the bytes give the same answers.

    Raises
    ------
    ValueError
        The data cannot be fitted by this method; says why.
    """
    data, begin = task.data, 0.0
    if isinstance(data, PictureSet):
        begin = PICTURES
        data = to_validation_set(data, task.source, _part(progress, 0.0, begin))
    progress(begin, "reading the validation set")
    logits, labels = (torch.from_numpy(array) for array in data.arrays())
    result = fit(task.method, logits, labels, seed=SEED, progress=_part(progress, begin + 0.02, 0.5))
    report = cross_fitted_report(
        result.method,
        logits,
        labels,
        seed=SEED,
        progress=_part(progress, 0.5, 0.95),
        against=None if task.against is None else Calibrator.from_bytes(task.against),
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
    _check_round_trip(result.calibrator, artifact, logits[:ROUND_TRIP_ROWS])
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


def _part(progress: Progress, start: float, end: float) -> Progress:
    """Map the progress of one step onto its share of the whole."""
    return lambda fraction, stage: progress(start + fraction * (end - start), stage)


def _check_round_trip(calibrator: Calibrator, artifact: bytes, logits: torch.Tensor) -> None:
    if not torch.equal(Calibrator.from_bytes(artifact)(logits), calibrator(logits)):
        raise RuntimeError(f"The `{calibrator.method}` calibrator answers differently once it was saved.")
