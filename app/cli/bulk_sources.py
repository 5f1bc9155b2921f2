"""What a bulk prediction reads: images, rows of features, texts or logits, in tasks that run side by side."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from boxcal.app.cli.failures import UsageError
from boxcal.app.cli.local import image_of
from boxcal.app.fitting.worker.reading import RowFile
from boxcal.app.settings import limits
from boxcal.app.settings.service import Settings
from boxcal.calibrators.array_calibrator import ArrayCalibrator
from boxcal.models.backends.backbone import Backbone
from boxcal.models.inputs.base import Samples

ROWS = 5000
"""Rows of features or logits of a task; the model runs on all of them at once."""
IMAGES = 64
"""Images of a task."""
IMAGE_BATCH = 8
"""Images of a forward pass on a core: what a few images need stays in its cache."""
SMALL_BYTES = 8192
"""Mean size of images that one thread at a time decodes: most of it is Python code, and threads that wait
for the interpreter at every step take twice as long."""
TEXTS = 512
TEXT_BATCH = 32
SUFFIXES = (".jpg", ".jpeg", ".png", ".webp")

Scores = NDArray[Any]
Run = Callable[[Samples], Scores]
"""Runs the model on samples, and gives what the calibrator reads."""


@dataclass(frozen=True)
class Task:
    """Some rows of a source."""

    rows: int
    scores: Callable[[], Scores]  # Reads them and runs the model, if there is one; any thread may call it
    others: dict[str, Any] = field(default_factory=dict)  # Further columns of the output


@dataclass(frozen=True)
class Source:
    """All rows, in tasks."""

    rows: int  # How many there are
    size: int  # Rows of a task; the last ones of a file or row group may be fewer
    per_part: int  # Tasks whose results are kept together
    tasks: Iterator[Task]  # In the order of the output
    digest: str  # Of the names, sizes and times of the files: another one if a file has changed


def source_of(
    path: Path, backbone: Backbone, calibrator: ArrayCalibrator, settings: Settings, run: Run
) -> Source:
    """Open a folder of images, or a Parquet file of features, texts, logits or probabilities."""
    given = settings.max_batch_size if "max_batch_size" in settings.model_fields_set else None
    if path.is_dir():
        size = given or (IMAGE_BATCH if backbone.device == "cpu" else IMAGES)
        return _images(path, backbone, limits.MAX_PIXELS, size, run)
    _, digest = _sizes_of(path.parent, [path.name])
    file = RowFile(path, backbone)
    if file.has_samples and backbone.inputs.kind == "texts":
        return _rows(file, TEXTS, partial(_of_texts, run, given or TEXT_BATCH), digest)
    if file.has_samples:
        return _rows(file, given or ROWS, run, digest)
    if calibrator.reads != "logits":
        raise UsageError(f"{calibrator.method!r} reads {calibrator.reads}, but {path} has logits alone")
    return _rows(file, ROWS, _unchanged, digest)


def _rows(file: RowFile, size: int, scores: Callable[[Any], Scores], digest: str) -> Source:
    tasks = (Task(count, partial(_read_then, read, scores)) for count, read in file.parts(size))
    return Source(file.rows, size, 4, tasks, digest)


def _read_then(read: Callable[[], Any], scores: Callable[[Any], Scores]) -> Scores:
    return scores(read())


def _unchanged(scores: Scores) -> Scores:
    return scores


def _of_texts(run: Run, size: int, samples: Samples) -> Scores:
    """Run the model on texts of similar lengths together, since a batch is padded to its longest text."""
    order = np.argsort([len(sample[0]) for sample in samples], kind="stable")
    groups = [order[start : start + size] for start in range(0, len(order), size)]
    return np.concatenate([run(samples[group]) for group in groups])[np.argsort(order)]


def _images(folder: Path, backbone: Backbone, max_pixels: int, size: int, run: Run) -> Source:
    names = [name for name in _files_in(folder) if name.lower().endswith(SUFFIXES)]
    sizes, digest = _sizes_of(folder, names)
    alone = Lock()

    def decoded(batch: Sequence[str]) -> Samples:
        small = sum(sizes[name] for name in batch) < SMALL_BYTES * len(batch)
        with alone if small else nullcontext():
            return np.stack([image_of(folder / name, backbone, max_pixels) for name in batch])

    def scores(chosen: Sequence[str]) -> Scores:
        batches = (chosen[first : first + size] for first in range(0, len(chosen), size))
        return np.concatenate([run(decoded(batch)) for batch in batches])

    def tasks() -> Iterator[Task]:
        for first in range(0, len(names), IMAGES):
            chosen = names[first : first + IMAGES]
            yield Task(len(chosen), partial(scores, chosen), {"path": chosen})

    return Source(len(names), IMAGES, 8, tasks(), digest)


def _files_in(folder: Path) -> list[str]:
    """List the files of a folder and its subfolders, by their paths below it."""
    found = []
    for place, _, names in os.walk(folder):
        below = os.path.relpath(place, folder)
        found += names if below == "." else [f"{below}/{name}" for name in names]
    return sorted(found)


def _sizes_of(folder: Path, names: Iterable[str]) -> tuple[dict[str, int], str]:
    """Return the bytes of each file, and the digest of a `Source`."""
    digest, sizes = hashlib.sha256(), {}
    for name in names:
        found = os.stat(f"{folder}/{name}")  # noqa: PTH116 - a `Path` of each takes twice as long
        digest.update(f"{name} {found.st_size} {found.st_mtime_ns}\n".encode())
        sizes[name] = found.st_size
    return sizes, digest.hexdigest()
