"""`boxcal predict SOURCE --output FILE.parquet`: a folder of images or a Parquet file, in parts.

Each part is written whole. A run that was stopped continues with the first part that is missing, if the
source, the model, the calibrator and the bounds are still the same.
"""

import hashlib
import json
import shutil
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from numpy.typing import NDArray

from boxcal.app.cli.failures import UsageError
from boxcal.app.cli.local import Bound, bounds_of, calibrator_of, image_of, scores_of
from boxcal.app.cli.output import messages, progress_bar
from boxcal.app.cli.settings import read_settings
from boxcal.app.fitting.reading import SampleFile, ScoreFile, holds_samples
from boxcal.app.settings import Settings
from boxcal.calibrators import Bounds, Calibrator
from boxcal.models.backbone import Backbone
from boxcal.models.inputs import Samples

PART_ROWS = 20_000
PART_IMAGES = 512
PART_TEXTS = 2048
AHEAD = 2
"""Batches that are decoded while the model runs."""
SUFFIXES = (".jpg", ".jpeg", ".png", ".webp")

Part = tuple[dict[str, Any], torch.Tensor]
"""Further columns of some rows, and what the calibrator reads of them."""


def run(source: Path, output: Path, *, lower: Bound, upper: Bound, calibrator: str | None) -> int:
    """Predict everything in the source, and write the label and the probabilities of each row.

    Returns
    -------
    The number of rows.

    Raises
    ------
    BoxcalError, BackboneError, CalibrationError, UsageError
        Naming the image, the column or the value that is wrong.
    """
    settings = read_settings()
    backbone = settings.load_backbone()
    loaded = calibrator_of(calibrator, backbone.num_classes)
    bounds = bounds_of(lower, upper, backbone.labels)
    identity = {
        "source": [str(source.absolute()), _state_of(source)],
        "model": backbone.fingerprint,
        "labels": backbone.labels,
        "calibrator": hashlib.sha256(loaded.to_bytes()).hexdigest(),
        "bounds": [lower, upper],
    }
    folder = output.with_name(output.name + ".parts")
    _prepare(folder, json.dumps(identity, sort_keys=True))
    count = 0
    with progress_bar("predicting") as advance:
        if source.is_dir():
            parts, total = _images(source, folder, backbone, loaded, settings)
        else:
            parts, total = _rows(source, folder, backbone, settings.max_batch_size)
        for number, size, part in parts:
            if part is not None:
                others, scores = part
                _write(folder / f"{number}.parquet", _table(others, scores, loaded, bounds, backbone.labels))
            count += size
            advance(count / max(1, total), f"{count:,} rows")
    if count == 0:
        raise UsageError(f"{source} has no images or rows")
    _join(folder, output)
    messages.print(f"saved {output}", soft_wrap=True, markup=False)
    return count


Numbered = Iterator[tuple[int, int, Part | None]]
"""Number and rows of each part; None for one that an earlier run has written."""


def _rows(source: Path, folder: Path, backbone: Backbone, batch_size: int) -> tuple[Numbered, int]:
    """Read a Parquet file of features, texts, logits or probabilities."""

    def parts(file: ScoreFile | SampleFile, size: int, logits: Callable[[Any], torch.Tensor]) -> Numbered:
        for number, (count, read) in enumerate(file.parts(size)):
            done = (folder / f"{number}.parquet").exists()
            yield number, count, None if done else ({}, logits(read()))

    if holds_samples(source, backbone.inputs):
        samples = SampleFile(source, backbone.inputs)
        if backbone.inputs.kind == "texts":
            return parts(samples, PART_TEXTS, partial(_of_texts, backbone, batch_size)), samples.rows
        run_on = partial(_of_features, backbone)
        return parts(samples, PART_ROWS, run_on), samples.rows
    scores = ScoreFile(source, backbone.labels)
    return parts(scores, PART_ROWS, torch.from_numpy), scores.rows


def _of_features(backbone: Backbone, samples: Samples) -> torch.Tensor:
    return torch.as_tensor(backbone(backbone.inputs.batch(samples)))


def _of_texts(backbone: Backbone, size: int, samples: Samples) -> torch.Tensor:
    """Run the model on texts of similar lengths together, since a batch is padded to its longest text."""
    order = np.argsort([len(sample[0]) for sample in samples], kind="stable")
    groups = [order[start : start + size] for start in range(0, len(order), size)]
    found = torch.cat([torch.as_tensor(backbone(backbone.inputs.batch(samples[group]))) for group in groups])
    return found[np.argsort(order)]


def _images(
    source: Path, folder: Path, backbone: Backbone, calibrator: Calibrator, settings: Settings
) -> tuple[Numbered, int]:
    """Decode the images of a folder ahead of the model, which runs on batches."""
    size = settings.max_batch_size
    paths = sorted(path for path in source.rglob("*") if path.suffix.lower() in SUFFIXES)

    def batches(chosen: Sequence[Path]) -> Iterator[torch.Tensor]:
        with ThreadPoolExecutor(settings.decode_threads) as pool:
            waiting: deque[list[Future[NDArray[np.float32]]]] = deque()
            groups = (chosen[first : first + size] for first in range(0, len(chosen), size))
            for group in groups:
                waiting.append([pool.submit(image_of, path, backbone, settings.max_pixels) for path in group])
                if len(waiting) > AHEAD:
                    yield scores_of(
                        backbone, calibrator, np.stack([one.result() for one in waiting.popleft()])
                    )
            while waiting:
                yield scores_of(backbone, calibrator, np.stack([one.result() for one in waiting.popleft()]))

    def parts() -> Numbered:
        for number, first in enumerate(range(0, len(paths), PART_IMAGES)):
            chosen = paths[first : first + PART_IMAGES]
            if (folder / f"{number}.parquet").exists():
                yield number, len(chosen), None
                continue
            names = [str(path.relative_to(source)) for path in chosen]
            yield number, len(chosen), ({"path": names}, torch.cat(list(batches(chosen))))

    return parts(), len(paths)


def _table(
    others: dict[str, Any],
    scores: torch.Tensor,
    calibrator: Calibrator,
    bounds: Bounds | None,
    labels: Sequence[str],
) -> pa.Table:
    calibrated = calibrator.calibrate(scores, bounds)
    probabilities, mapped = calibrated.probabilities.numpy(), calibrated.logits.numpy()
    ties = probabilities == probabilities.max(axis=1, keepdims=True)
    index = np.where(ties, mapped, -np.inf).argmax(axis=1)
    lists = pa.FixedSizeListArray.from_arrays(pa.array(probabilities.ravel()), probabilities.shape[1])
    return pa.table(
        {
            **others,
            "label": np.asarray(labels, object)[index],
            "index": index.astype(np.int64),
            "probability": probabilities[np.arange(len(index)), index],
            "probabilities": lists,
        }
    )


def _prepare(folder: Path, identity: str) -> None:
    """Keep the parts of an earlier run with the same identity, and remove others."""
    note = folder / "run.json"
    if folder.exists() and (not note.exists() or note.read_text() != identity):
        shutil.rmtree(folder)
    folder.mkdir(parents=True, exist_ok=True)
    note.write_text(identity)


def _write(path: Path, table: pa.Table) -> None:
    unfinished = path.with_suffix(".unfinished")
    pq.write_table(table, unfinished)
    unfinished.replace(path)


def _join(folder: Path, output: Path) -> None:
    """Write the parts as one file, in their order, and remove them."""
    parts = sorted(folder.glob("*.parquet"), key=lambda path: int(path.stem))
    unfinished = folder / "output.unfinished"
    with pq.ParquetWriter(unfinished, pq.read_schema(parts[0])) as writer:
        for part in parts:
            writer.write_table(pq.read_table(part))
    unfinished.replace(output)
    shutil.rmtree(folder)


def _state_of(source: Path) -> list[Any]:
    """Describe a source so that a changed one is noticed."""
    files = sorted(source.rglob("*")) if source.is_dir() else [source]
    digest = hashlib.sha256()
    for file in files:
        found = file.stat()
        digest.update(f"{file} {found.st_size} {found.st_mtime_ns}\n".encode())
    return [len(files), digest.hexdigest()]
