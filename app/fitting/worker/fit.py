"""What one fit does, from the checked validation set to everything the registry keeps of it.

It runs in the worker process, apart from the service: a folder comes in, a calibrator goes out. For images,
rows and texts it runs the model first, with a backbone of its own, and keeps the logits beside the labels.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
from numpy.typing import NDArray

from boxcal.app.fitting.backbones import BackboneSummary
from boxcal.app.fitting.messages import CompareTask, FitOutcome, FitTask
from boxcal.app.fitting.resources import limit_memory
from boxcal.app.fitting.worker import requirements
from boxcal.app.fitting.worker.images import decoded_images
from boxcal.app.fitting.worker.validation_set import ArrayWriter, StoredSet, kept_samples
from boxcal.app.registry.records import FittedCalibrator
from boxcal.app.settings import limits
from boxcal.app.tables.sample_schema import FEATURES, ModelInputs
from boxcal.calibrators.array_calibrator import ArrayCalibrator
from boxcal.calibrators.data import check_validation_set
from boxcal.calibrators.errors import MissingDataError
from boxcal.calibrators.evaluation.reliability import reliability_images
from boxcal.calibrators.evaluation.report import report_on
from boxcal.calibrators.fitting.api import fit_data
from boxcal.calibrators.method import reads_of_methods
from boxcal.calibrators.row_statistics import Sketch
from boxcal.models.backends.backbone import Backbone, FeatureBackbone

BATCH = 32
BATCH_ON_CPU = 8
"""Images or texts of a batch; so few that even a slow model reports progress every few seconds."""
ROWS = 256
"""Rows of features in a batch."""


def run_backbone(
    data: StoredSet,
    backbone: Backbone,
    max_pixels: int,
    progress: Callable[[float, str], None],
    reads: Collection[str] = (),
) -> None:
    """Run the backbone over the samples of a set, and keep the logits beside the labels."""
    samples, what = _batches(data, backbone, max_pixels)
    steps: dict[str, Callable[[Any], Any]] = {"logits": backbone}
    if "inputs" in reads:
        steps["inputs"] = lambda batch: batch
    if "features" in reads and isinstance(backbone, FeatureBackbone) and backbone.head is not None:
        steps["features"] = backbone.features
    count, done = data.samples, 0
    stage = f"running {backbone.name} on {count} {what}"
    writers: dict[str, ArrayWriter] = {}
    with ExitStack() as stack:
        for batch in samples:
            given = backbone.inputs.batch(batch)
            for kept, step in steps.items():
                try:
                    block = np.asarray(step(given))
                except Exception as error:
                    if (named := _named(backbone, batch, done, what)) is not None:
                        raise named from error
                    raise
                if kept not in writers:
                    writer = ArrayWriter(data.folder, kept, block.shape[1:], block.dtype)
                    writers[kept] = stack.enter_context(writer)
                writers[kept].append(block)
            done += len(batch)
            progress(done / count, stage)


def _batches(data: StoredSet, backbone: Backbone, max_pixels: int) -> tuple[Iterator[Any], str]:
    """Give the samples of a set in batches, and what they are called."""
    size = BATCH_ON_CPU if backbone.device == "cpu" else BATCH
    if data.holds_images:
        if backbone.preprocessing is None:
            raise ValueError(f"{backbone.name} reads tensors, not images; upload its logits.")
        return decoded_images(data.folder, backbone.preprocessing, max_pixels, size), "images"
    inputs = ModelInputs.of(backbone)
    if inputs is None:
        raise ValueError(f"{backbone.name} reads neither features nor texts; upload its logits.")
    is_rows = inputs.member == FEATURES
    kept = kept_samples(data.folder, backbone.inputs, ROWS if is_rows else size)
    return kept, "rows" if is_rows else "texts"


def _named(backbone: Backbone, batch: Any, first: int, what: str) -> ValueError | None:
    """Find the sample of a batch on which the model fails; None if it fails on none alone."""
    for row in range(len(batch)):
        try:
            backbone(backbone.inputs.batch(batch[row : row + 1]))
        except Exception as error:
            return ValueError(f"{what}[{first + row}]: the model fails on it: {error}"[:1000])
    return None


Progress = Callable[[float, str], None]
SEED = 0
ROUND_TRIP_ROWS = 100
BACKBONE = 0.3  # of the progress, where the backbone computes the logits


def perform(task: FitTask, progress: Progress, *, draws: bool = True) -> FitOutcome:
    """Fit, judge on unseen folds, draw, and check that the saved calibrator gives the same answers."""
    data = StoredSet(task.folder)
    begin = BACKBONE if data.needs_backbone else 0.0
    against = None if task.against is None else ArrayCalibrator.from_bytes(task.against)
    required_by = _required_by(task.method, data, against)
    extras = read_besides_logits(task, data, required_by, _part(progress, 0.0, begin))
    extras |= data.grouping
    progress(begin, "checking the validation set")
    checked = check_validation_set(*data.arrays(), classes=data.classes, **extras)
    result = fit_data(
        task.method,
        checked,
        seed=SEED,
        progress=_part(progress, begin + 0.02, 0.4),
        budget_seconds=task.budget_seconds,
    )
    report = report_on(
        result.method,
        checked,
        seed=SEED,
        progress=_part(progress, 0.4, 0.95),
        against=against,
        unseen=result.unseen,
        known=None if task.known is None else Sketch.read(task.known),
    )
    document = report.to_dict()
    document["warnings"] += [*data.notes, *(warning.to_dict() for warning in result.warnings)]
    svg, png = b"", b""
    if draws:
        progress(0.95, "drawing the reliability diagram")
        svg, png = reliability_images(document)
    document["fit"] = {
        "method": result.method,
        "nll": result.nll,
        "seconds": result.seconds,
        "certificate": result.certificate.to_dict(),
        "choice": result.choice,
    }
    if data.columns is not None:
        document["fit"]["columns"] = data.columns
    calibrator = result.on_arrays.fitted_to(checked)
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
