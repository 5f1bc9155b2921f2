"""Labelled images in place of logits: a zip archive with a folder for each class, and what fits make of it.

The check judges the archive's directory and the first bytes of each image. The fit decodes them and runs a
backbone of its own, so predictions never wait for them.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

import numpy as np

from boxcal.app.fitting.archives import DAMAGE
from boxcal.app.fitting.errors import InvalidUpload
from boxcal.app.fitting.form import FilePart
from boxcal.app.fitting.validation_set import LISTING, MIN_SAMPLES, ArrayWriter, ValidationSet, keep_labels
from boxcal.app.uploads.errors import UploadTooLarge
from boxcal.models.decoding import decode, image_format
from boxcal.models.errors import InvalidImage

if TYPE_CHECKING:
    from boxcal.models.backbone import Backbone

MAX_IMAGE_BYTES = 32 * 2**20
BATCH = 32
HEAD = 16


def keep_images(
    archive: zipfile.ZipFile, place: FilePart, folder: Path, *, classes: Sequence[str], max_bytes: int
) -> None:
    """Check an archive, and keep in `folder` where it lies and which images it holds.

    Parameters
    ----------
    place
        Where the archive lies; the fit reads it there.
    classes
        The backbone's labels: what the folders may be called.
    max_bytes
        How large the images may be, unpacked, all together.

    Raises
    ------
    InvalidUpload
        Names the folder or the image that cannot be accepted.
    UploadTooLarge
        The images are larger than the limit.
    """
    index_of = {label: index for index, label in enumerate(classes)}
    for entry in archive.infolist():
        if entry.filename.startswith("/") or ".." in PurePosixPath(entry.filename).parts:
            raise InvalidUpload(f"The entry {entry.filename!r:.200} lies outside the archive.")
    entries = [entry for entry in archive.infolist() if not _is_hidden(entry)]
    total = sum(entry.file_size for entry in entries)
    if total > max_bytes:
        raise UploadTooLarge(f"The images unpack to {total:,} bytes; the limit is {max_bytes:,}.")
    labels = []
    for entry in entries:
        label = PurePosixPath(entry.filename).parent.name
        if label not in index_of:
            known = ", ".join(repr(one) for one in list(classes)[:10])
            raise InvalidUpload(
                f"{entry.filename!r:.200} is in the folder {label!r:.200}, which is no class of the "
                f"backbone; its {len(classes)} classes begin with {known}."
            )
        _check_image(archive, entry)
        labels.append(index_of[label])
    if len(labels) < MIN_SAMPLES:
        raise InvalidUpload(
            f"The archive holds {len(labels)} images; a fit that is judged on unseen folds needs at least "
            f"{MIN_SAMPLES}."
        )
    names = [entry.filename for entry in entries]
    listing = {"path": str(place.path), "start": place.start, "length": place.length, "names": names}
    (folder / LISTING).write_text(json.dumps(listing))
    keep_labels(folder, np.array(labels), len(classes))


def run_backbone(
    data: ValidationSet,
    backbone: Backbone,
    max_pixels: int,
    progress: Callable[[float, str], None],
    reads: Collection[str] = (),
) -> None:
    """Run the backbone over the images of a set, and keep the logits beside the labels.

    Parameters
    ----------
    max_pixels
        Most pixels of an image that is decoded.
    reads
        What the set shall hold besides logits: `features`, `inputs`, both or neither.

    Raises
    ------
    ValueError
        An image cannot be decoded; names it.
    """
    from boxcal.models.backbone import OpenBackbone  # noqa: PLC0415

    if backbone.preprocessing is None:
        raise ValueError(f"{backbone.name} reads tensors, not images; upload its logits.")
    steps: dict[str, Callable[[Any], Any]] = {"logits": backbone}
    if "inputs" in reads:
        steps["inputs"] = lambda samples: samples
    if "features" in reads and isinstance(backbone, OpenBackbone) and backbone.head is not None:
        steps["features"] = backbone.features
    count = data.samples
    writers: dict[str, ArrayWriter] = {}
    batch: list[Any] = []
    with ExitStack() as stack:
        for position, (name, image) in enumerate(_images(data.folder), start=1):
            try:
                decoded = decode(image, preprocessing=backbone.preprocessing, max_pixels=max_pixels)
            except InvalidImage as error:
                raise ValueError(f"{name}: {error}") from error
            batch.append(decoded)
            if len(batch) == BATCH or position == count:
                samples = np.stack(batch)
                for kept, step in steps.items():
                    block = np.asarray(step(samples))
                    if kept not in writers:
                        shape = (count, *block.shape[1:])
                        writers[kept] = stack.enter_context(
                            ArrayWriter(data.folder, kept, shape, block.dtype)
                        )
                    writers[kept].append(block)
                batch.clear()
                stage = f"running {backbone.name} on {count} images"
                progress(position / count, stage)


def _images(folder: Path) -> Iterator[tuple[str, bytes]]:
    """Yield the name and the bytes of each image, in the order of the labels."""
    listing = json.loads((folder / LISTING).read_text())
    place = FilePart(Path(listing["path"]), listing["start"], listing["length"])
    with place as file, zipfile.ZipFile(file) as archive:
        for name in listing["names"]:
            try:
                yield name, archive.read(name)
            except DAMAGE as error:
                raise ValueError(f"{name!r} is damaged: {error}.") from error


def _is_hidden(entry: zipfile.ZipInfo) -> bool:
    """Whether it is a folder, or one of the files that file managers leave in archives."""
    path = PurePosixPath(entry.filename)
    return entry.is_dir() or "__MACOSX" in path.parts or path.name.startswith(".") or path.name == "Thumbs.db"


def _check_image(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> None:
    if entry.file_size > MAX_IMAGE_BYTES:
        raise UploadTooLarge(
            f"{entry.filename!r:.200} has {entry.file_size:,} bytes; an image may have {MAX_IMAGE_BYTES:,}."
        )
    try:
        with archive.open(entry) as image:
            image_format(image.read(HEAD))
    except InvalidImage as error:
        raise InvalidUpload(f"{entry.filename!r:.200}: {error}") from error
    except (*DAMAGE, ValueError, OSError) as error:
        raise InvalidUpload(f"{entry.filename!r:.200} is damaged: {error}.") from error
