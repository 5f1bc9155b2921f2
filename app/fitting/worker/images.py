"""Labelled images in place of logits: a zip archive with a folder for each class, and what fits make of it.

The check judges the archive's directory and the first bytes of each image; `fit.py` decodes them.
"""

from __future__ import annotations

import json
import zipfile
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any
from unicodedata import normalize

import numpy as np
from numpy.typing import NDArray

from boxcal.app.fitting.worker.arrays import DAMAGE
from boxcal.app.fitting.worker.validation_set import LISTING, keep_labels
from boxcal.app.http.problems import InvalidUpload, UploadTooLarge
from boxcal.app.settings import limits
from boxcal.app.tables.columns import TRAINING
from boxcal.app.tables.file_part import FilePart
from boxcal.app.tables.labels import shown
from boxcal.models import InvalidImage
from boxcal.models.inputs.images import decode, image_format, is_hidden

if TYPE_CHECKING:
    from boxcal.models.inputs.images import Preprocessing

HEAD = 132
"""First bytes of an image, which tell its format."""


def keep_images(
    archive: zipfile.ZipFile, place: FilePart, folder: Path, *, classes: Sequence[str], max_bytes: int
) -> None:
    """Check an archive, and keep in `folder` where it lies and which images it holds."""
    index_of = {label: index for index, label in enumerate(classes)}
    for entry in archive.infolist():
        if entry.filename.startswith("/") or ".." in PurePosixPath(entry.filename).parts:
            raise InvalidUpload(f"The entry {entry.filename!r:.200} lies outside the archive.")
    entries = [entry for entry in archive.infolist() if not _is_left_out(entry, index_of)]
    for name, count in Counter(entry.filename for entry in entries).items():
        if count > 1:  # a fit reads by name, and would read the last of them for each
            raise InvalidUpload(f"The archive holds {count} entries of the name {name!r:.200}.")
    total = sum(entry.file_size for entry in entries)
    if total > max_bytes:
        raise UploadTooLarge(f"The images unpack to {total:,} bytes; the limit is {max_bytes:,}.")
    labels: list[int] = []
    refused: list[str] = []
    for entry in entries:
        label = normalize("NFC", PurePosixPath(entry.filename).parent.name)  # as those of models are
        try:
            if label not in index_of:
                known = ", ".join(repr(one) for one in list(classes)[:10])
                where = f"in the folder {label!r:.200}, which is no" if label else "in no folder of a"
                raise InvalidUpload(
                    f"{entry.filename!r:.200} is {where} class of the backbone; its {len(classes)} classes "
                    f"begin with {known}."
                )
            _check_image(archive, entry)
            labels.append(index_of[label])
        except InvalidUpload as error:
            refused.append(entry.filename if refused else str(error))
    if refused:
        raise InvalidUpload(_all_of(refused))
    names = [entry.filename for entry in entries]
    _check_parts(names)
    path = place.path.name if place.path.parent == folder else str(place.path.absolute())
    listing = {"path": path, "start": place.start, "length": place.length, "names": names}
    (folder / LISTING).write_text(json.dumps(listing))
    keep_labels(folder, np.array(labels), classes)


def _check_parts(names: Sequence[str]) -> None:
    """Refuse images that the model was trained with beside others: they would make a calibrator too sure."""
    parts = sorted({PurePosixPath(name).parent.parent.as_posix() for name in names})
    trained = [part for part in parts if not TRAINING.isdisjoint(PurePosixPath(part.lower()).parts)]
    if 0 < len(trained) < len(parts):
        others = ", ".join(repr(part) for part in parts if part not in trained)
        raise InvalidUpload(
            f"The folders of classes lie in {trained[0]!r:.100} and in {others:.200}. A calibrator needs "
            "samples that the model was not trained with: send the folders of one part alone."
        )


def decoded_images(
    folder: Path, preprocessing: Preprocessing, max_pixels: int, size: int
) -> Iterator[NDArray[np.float32]]:
    """Yield the images of a set, decoded, `size` at a time."""
    batch: list[Any] = []
    refused: list[str] = []
    for name, image in _images(folder):
        try:
            batch.append(decode(image, preprocessing=preprocessing, max_pixels=max_pixels))
        except InvalidImage as error:
            refused.append(name if refused else f"{name}: {error}")
        if refused:  # the rest is read to name all of these at once
            batch.clear()
        elif len(batch) == size:
            yield np.stack(batch)
            batch.clear()
    if refused:
        raise ValueError(_all_of(refused))
    if batch:
        yield np.stack(batch)


def _all_of(refused: Sequence[str]) -> str:
    """Say why the first of some files cannot be used, and name the others."""
    why, *others = refused
    return f"{why} Nor can {shown(others)} be used." if others else why


def _images(folder: Path) -> Iterator[tuple[str, bytes]]:
    """Yield the name and the bytes of each image, in the order of the labels."""
    listing = json.loads((folder / LISTING).read_text())
    place = FilePart(folder / listing["path"], listing["start"], listing["length"])
    with place as file, zipfile.ZipFile(file) as archive:
        for name in listing["names"]:
            try:
                yield name, archive.read(name)
            except DAMAGE as error:
                raise ValueError(f"{name!r} is damaged: {error}.") from error


def _is_left_out(entry: zipfile.ZipInfo, classes: Collection[str]) -> bool:
    """Whether it is a folder, or a hidden file, or in a hidden folder that has not the name of a class."""
    parts = PurePosixPath(entry.filename).parts
    return entry.is_dir() or any(is_hidden(part) for part in parts if part not in classes)


def _check_image(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> None:
    if entry.file_size > limits.MAX_IMAGE_BYTES:
        raise UploadTooLarge(
            f"{entry.filename!r:.200} has {entry.file_size:,} bytes; an image may have "
            f"{limits.MAX_IMAGE_BYTES:,}."
        )
    try:
        with archive.open(entry) as image:
            image_format(image.read(HEAD))
    except InvalidImage as error:
        raise InvalidUpload(f"{entry.filename!r:.200}: {error}") from error
    except (*DAMAGE, ValueError, OSError) as error:
        raise InvalidUpload(f"{entry.filename!r:.200} is damaged: {error}.") from error
