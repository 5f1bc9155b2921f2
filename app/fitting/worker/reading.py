"""Reads and fits validation data on this machine as the worker does with uploads, for the command line."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from boxcal.app.client.bodies import pack_images
from boxcal.app.fitting.backbones import BackboneSource, BackboneSummary
from boxcal.app.fitting.messages import FitTask
from boxcal.app.fitting.worker import check, requirements
from boxcal.app.fitting.worker.fit import run_backbone
from boxcal.app.fitting.worker.form import FilePart
from boxcal.app.fitting.worker.validation_set import StoredSet, logits_of, tokens_of
from boxcal.app.http.problems import InvalidUpload
from boxcal.app.registry.records import FittedCalibrator
from boxcal.app.settings import limits
from boxcal.app.tables.columns import LABEL, choose_columns
from boxcal.app.tables.kinds import START_BYTES, check_tables_package, table_kind
from boxcal.app.tables.labels import NOTHING, Declared
from boxcal.app.tables.sample_schema import TEXTS, ModelInputs
from boxcal.calibrators.scores import LOGITS, ScoreLook
from boxcal.models.inputs.base import Samples

if TYPE_CHECKING:
    from boxcal.app.settings.service import Settings
    from boxcal.models.backends.backbone import Backbone

Floats = npt.NDArray[np.float64]
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
        run_backbone(data, backbone or source.load(), limits.MAX_PIXELS, progress, reads)
    return data


class RowFile:
    """A table of scores, features or texts, read in parts; labels that it has are not read."""

    def __init__(self, path: Path, backbone: Backbone, declared: Declared = NOTHING) -> None:
        check_tables_package()
        import pyarrow as pa  # noqa: PLC0415 - fits of arrays need none of these

        from boxcal.app.tables.formats import open_table, readable  # noqa: PLC0415

        with path.open("rb") as file:
            kind = table_kind(file.read(START_BYTES))
        if kind is None:
            raise InvalidUpload(
                "The file is no folder of images, and no .parquet, .arrow, .csv or .json of records."
            )
        self._kind, self._backbone, self._samples = kind, backbone, ModelInputs.of(backbone)
        with readable(kind):
            self._table = open_table(path if kind == "parquet" else pa.OSFile(str(path)), kind)
        names, label = self._table.names, declared.label or LABEL
        own = () if self._samples is None else self._samples.table_columns
        self.has_samples = bool(own) and set(own) <= set(names)
        self.rows = self._table.rows or 0  # 0 where it does not say
        self._names: Sequence[str] = own
        self._numbers: Sequence[str] = ()
        if not self.has_samples:
            classes = backbone.labels
            others = [name for name in names if name != label]
            with readable(kind):
                self._columns = choose_columns([*others, label], classes, declared, texts=self._table.texts)
            self._names = self._columns.names
            self._numbers = () if self._columns.is_list else self._columns.names
            if declared.scores is None and self._columns.kind == LOGITS:
                self._check_kind()

    def _check_kind(self) -> None:
        """Refuse columns of logits that look like something else, by the first rows."""
        from boxcal.app.tables.formats import BATCH_ROWS, readable  # noqa: PLC0415 - as above
        from boxcal.app.tables.values import scores_of_batch  # noqa: PLC0415 - as above

        with readable(self._kind):
            for batch in islice(self._table.batches(self._names, self._numbers, BATCH_ROWS), 1):
                rows = scores_of_batch(batch, self._columns, 0)
                if said := ScoreLook.of([rows[np.isfinite(rows).all(axis=1)]]).refusal(LOGITS):
                    raise InvalidUpload(said)

    def parts(self, size: int) -> Iterator[tuple[int, Callable[[], Any]]]:
        """Yield the number of rows of each part, and a function that returns its rows.

        A part has at most `size` rows; of CSV it has those of a block.
        """
        from boxcal.app.tables.formats import readable  # noqa: PLC0415 - as above

        first = 0
        with readable(self._kind):
            for batch in self._table.batches(self._names, self._numbers, size):
                yield len(batch), partial(self._read, batch, first)
                first += len(batch)

    def _read(self, batch: Any, first: int) -> Samples | Floats:
        from boxcal.app.tables.values import samples_of_batch, scores_of_batch  # noqa: PLC0415 - as above

        if self.has_samples and self._samples:
            samples = samples_of_batch(batch, self._samples, first)
            is_text = self._samples.member == TEXTS
            return tokens_of(samples.tolist(), self._backbone.inputs, first) if is_text else samples
        values = scores_of_batch(batch, self._columns, first).astype(np.float64)
        if values.shape[1] != self._backbone.num_classes:
            raise InvalidUpload(
                f"The rows have {values.shape[1]} numbers, the model has {self._backbone.num_classes} "
                f"classes. Without a model, set BOXCAL_MODEL=logits:{values.shape[1]}, or name a calibrator."
            )
        return logits_of(values, self._columns.kind, first)[0]


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
    """Fit a method to validation data, judge it on unseen folds and draw the reliability diagram."""
    from boxcal.app.fitting.worker.fit import perform  # noqa: PLC0415 - matplotlib and the fits take long to load

    source = BackboneSource.of(settings)
    _read(path, folder, source, declared)
    return perform(FitTask(folder, source, method, budget_seconds=budget_seconds), progress).fitted


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
        packed = folder / "images.zip"
        packed.write_bytes(pack_images(path))
        path = packed
    size, are_images = path.stat().st_size, holds_images(path)
    # Each look into the file has a part of its own, which it closes.
    has_scores = are_images or check.holds_scores(FilePart(path, 0, size))
    may_be_samples = source.model.startswith(SAMPLE_MODELS) and not has_scores
    place = FilePart(path, 0, size)
    backbone = source.load() if are_images or may_be_samples else None
    data = check.read_file(
        place,
        folder,
        classes=backbone.labels if are_images and backbone else classes,
        max_bytes=NO_LIMIT,
        declared=declared,
        inputs=ModelInputs.of(backbone) if backbone else None,
    )
    return data, backbone
