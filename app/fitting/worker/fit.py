"""What one fit does, from the checked validation set to everything the registry keeps of it.

It runs in the worker process, apart from the service: a folder comes in, a calibrator goes out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from boxcal.app.fitting.backbones import BackboneSummary
from boxcal.app.fitting.messages import CompareTask, FitOutcome, FitTask
from boxcal.app.fitting.resources import limit_memory
from boxcal.app.fitting.worker import requirements
from boxcal.app.fitting.worker.model_pass import run_backbone
from boxcal.app.fitting.worker.validation_set import StoredSet
from boxcal.app.registry.records import FittedCalibrator
from boxcal.app.settings import limits
from boxcal.calibrators.array_calibrator import ArrayCalibrator
from boxcal.calibrators.data import check_validation_set
from boxcal.calibrators.duplicates import Sketch
from boxcal.calibrators.errors import MissingDataError
from boxcal.calibrators.evaluation.reliability import reliability_png, reliability_svg
from boxcal.calibrators.evaluation.report import report_on
from boxcal.calibrators.fitting.api import fit_data
from boxcal.calibrators.method import reads_of_methods
from boxcal.calibrators.threads import one_library_thread
from boxcal.models.backends.backbone import Backbone

Progress = Callable[[float, str], None]
SEED = 0
ROUND_TRIP_ROWS = 100
BACKBONE = 0.3  # of the progress, where the backbone computes the logits


def perform(task: FitTask, progress: Progress) -> FitOutcome:
    """Fit, judge on unseen folds, draw, and check that the saved calibrator gives the same answers."""
    data = StoredSet(task.folder)
    begin = BACKBONE if data.needs_backbone else 0.0
    against = None if task.against is None else ArrayCalibrator.from_bytes(task.against)
    required_by = _required_by(task.method, data, against)
    extras = read_besides_logits(task, data, required_by, _part(progress, 0.0, begin))
    extras |= data.grouping
    progress(begin, "checking the validation set")
    checked = check_validation_set(*data.arrays(), **extras)
    result = fit_data(
        task.method,
        checked,
        seed=SEED,
        progress=_part(progress, begin + 0.02, 0.4),
        budget_seconds=task.budget_seconds,
    )
    # With more threads, sums of the library would differ in the last bit from machine to machine.
    with one_library_thread():
        report = report_on(
            result.method,
            checked,
            seed=SEED,
            progress=_part(progress, 0.4, 0.95),
            against=against,
            selection_bias=result.choice.get("selection_bias", {}),
            known=None if task.known is None else Sketch.read(task.known),
        )
    progress(0.95, "drawing the reliability diagram")
    document = report.to_dict()
    document["warnings"] += data.notes
    svg = reliability_svg(document)
    progress(0.98, "drawing the reliability diagram")
    png = reliability_png(document)
    document["fit"] = {
        "method": result.method,
        "nll": result.nll,
        "seconds": result.seconds,
        "certificate": result.certificate.to_dict(),
        "choice": result.choice,
    }
    if data.columns is not None:
        document["fit"]["columns"] = data.columns
    calibrator = result.on_arrays.named(data.classes)
    artifact = calibrator.to_bytes()
    source = extras["features"] if calibrator.reads == requirements.FEATURES else checked.logits
    _check_round_trip(calibrator, artifact, source[:ROUND_TRIP_ROWS])
    fitted = FittedCalibrator(
        method=result.method,
        artifact=artifact,
        spec=calibrator.spec,
        report=document,
        reliability_svg=svg,
        reliability_png=png,
        samples=data.samples,
    )
    return FitOutcome(fitted, report.is_better)


def read_besides_logits(
    task: FitTask | CompareTask, data: StoredSet, required_by: dict[str, str], progress: Progress
) -> dict[str, Any]:
    """Limit the memory, run the backbone if that is needed, and give what else is read, as `fit` takes it."""
    if not data.needs_backbone and required_by.keys() == {"logits"}:
        limit_memory(task.memory_bytes)
        return {}
    progress(0.0, f"loading {task.source.model}")
    backbone = task.source.load()
    limit_memory(task.memory_bytes)
    if data.needs_backbone:
        run_backbone(data, backbone, limits.MAX_PIXELS, progress, required_by)
    return _extras(required_by, data, backbone)


def _required_by(method: str, data: StoredSet, against: ArrayCalibrator | None) -> dict[str, str]:
    """Say what is read (`logits`, `features`, `inputs`), and by whom."""
    required_by = {reads_of_methods()[method]: f"the method {method!r}"}
    if against is not None:
        required_by.setdefault(
            against.reads, f"the active calibrator, {against.method!r}, to compare with it"
        )
    if method == "auto" and data.besides(requirements.FEATURES) is not None:
        required_by.setdefault(requirements.FEATURES, "the methods that read the features sent")
    return required_by


def _extras(required_by: dict[str, str], data: StoredSet, backbone: Backbone) -> dict[str, Any]:
    """Give what the method, and the calibrator it is compared with, read besides logits."""
    summary = BackboneSummary.of(backbone, data.folder)
    for wanted, who in required_by.items():
        if missing := requirements.missing(wanted, data, summary):
            raise MissingDataError(f"For {who}, {missing}.")
    return requirements.extras(set(required_by), data, backbone)


def _part(progress: Progress, start: float, end: float) -> Progress:
    """Map the progress of one step onto its share of the whole."""
    return lambda fraction, stage: progress(start + fraction * (end - start), stage)


def _check_round_trip(calibrator: ArrayCalibrator, artifact: bytes, logits: NDArray[Any]) -> None:
    if not np.array_equal(ArrayCalibrator.from_bytes(artifact)(logits), calibrator(logits)):
        raise RuntimeError(f"The `{calibrator.method}` calibrator answers differently once it was saved.")
