"""Reads and fits validation data on this machine as the worker does with uploads, for the command line."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from boxcal.app.fitting.backbones import BackboneSource, BackboneSummary
from boxcal.app.fitting.messages import FitTask
from boxcal.app.fitting.worker import check, requirements
from boxcal.app.fitting.worker.validation_set import StoredSet
from boxcal.app.registry.records import FittedCalibrator
from boxcal.app.settings import limits
from boxcal.app.tables.file_part import FilePart
from boxcal.app.tables.labels import NOTHING, Declared
from boxcal.app.tables.sample_schema import ModelInputs

if TYPE_CHECKING:
    from boxcal.app.settings.service import Settings
    from boxcal.models.backends.backbone import Backbone

SAMPLE_MODELS = ("onnx:", "transformers:")
"""Formats whose models may read features or texts."""
NO_LIMIT = 2**62  # the user's own file, on the user's own machine

Progress = Callable[[float, str], None]


def read_validation_data(
    path: Path,
    folder: Path,
    settings: Settings,
    progress: Progress,
    *,
    reads: Collection[str] = (),
    declared: Declared = NOTHING,
    classes: Sequence[str] | None = None,
) -> StoredSet:
    """Read a file of arrays, a table or images into a checked set that is kept in `folder`.

    Images (a zip archive or a folder, with a folder for each class), rows of features and texts go through
    the model of the settings; the set then also holds what `reads` names, `features` or `inputs`. Columns are
    matched with `classes`, the names that a calibrator or another file gives, if there are any.
    """
    source = BackboneSource.of(settings)
    data, backbone = _read(path, folder, source, declared, classes)
    if data.needs_backbone:
        from boxcal.app.fitting.worker.fit import run_backbone  # noqa: PLC0415 - the fits take long to load

        run_backbone(data, backbone or source.load(), limits.MAX_PIXELS, progress, reads)
    return data


def holds_images(path: Path) -> bool:
    """Whether the data are images in place of logits."""
    return path.is_dir() or check.holds_images(FilePart(path, 0, path.stat().st_size))


def fit_file(
    path: Path,
    folder: Path,
    settings: Settings,
    method: str,
    progress: Progress,
    *,
    budget_seconds: float,
    declared: Declared = NOTHING,
) -> FittedCalibrator:
    """Fit a method to validation data and judge it on unseen folds; no diagram is drawn."""
    from boxcal.app.fitting.worker.fit import perform  # noqa: PLC0415 - the fits take long to load

    source = BackboneSource.of(settings)
    _read(path, folder, source, declared)
    task = FitTask(folder, source, method, budget_seconds=budget_seconds)
    return perform(task, progress, draws=False).fitted


def extras_of(
    data: StoredSet, wanted: Collection[str], settings: Settings
) -> tuple[dict[str, Any], list[str]]:
    """Give the features and inputs that a set holds, as `boxcal.calibrators.fit` takes them.

    Returns the arguments, and a sentence for each part that does not belong to the model of the settings.
    """
    held = {name for name in wanted if name in requirements.REQUIRED and data.besides(name) is not None}
    if not held:
        return {}, []
    backbone = BackboneSource.of(settings).load()
    summary = BackboneSummary.of(backbone, data.folder)
    notes = {name: note for name in held if (note := requirements.missing(name, data, summary))}
    return requirements.extras(held - notes.keys(), data, backbone), list(notes.values())


def _read(
    path: Path,
    folder: Path,
    source: BackboneSource,
    declared: Declared = NOTHING,
    classes: Sequence[str] | None = None,
) -> tuple[StoredSet, Backbone | None]:
    """Check a file, and load the backbone if the file may hold what it reads in place of logits."""
    if path.is_dir():
        from boxcal.app.client.bodies import pack_images  # noqa: PLC0415 - imports the whole client

        packed = folder / "images.zip"
        packed.write_bytes(pack_images(path))
        path = packed
    size, are_images = path.stat().st_size, holds_images(path)
    # Each look into the file has a part of its own, which it closes.
    has_scores = are_images or check.holds_scores(FilePart(path, 0, size))
    may_be_samples = source.model.startswith(SAMPLE_MODELS) and not has_scores
    place = FilePart(path, 0, size)
    are_named = source.model.startswith("logits") and source.labels is not None and classes is None
    backbone = source.load() if are_images or may_be_samples or are_named else None
    data = check.read_file(
        place,
        folder,
        classes=backbone.labels if backbone and (are_images or are_named) else classes,
        max_bytes=NO_LIMIT,
        declared=declared,
        inputs=ModelInputs.of(backbone) if backbone else None,
    )
    data.keep_declared(declared)
    return data, backbone
