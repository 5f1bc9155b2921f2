"""Labelled images in place of logits: a zip archive with a folder for each class, and what fits make of it.

The upload is judged by the archive's directory and the first bytes of each image. The process of the fit
decodes them and has a backbone of its own, so predictions never wait for them.
"""

from __future__ import annotations

import json
import shutil
import zipfile
import zlib
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, TYPE_CHECKING, Self

import numpy as np
import torch

from boxcal.app.fitting.archives import open_archive
from boxcal.app.fitting.errors import InvalidUpload, UploadTooLarge
from boxcal.app.fitting.validation_set import MIN_SAMPLES, ValidationSet, besides_path, labels_path
from boxcal.models.backbone import Backbone, OpenBackbone
from boxcal.models.decoding import decode, image_format
from boxcal.models.errors import InvalidImage
from boxcal.models.loading import load_backbone

if TYPE_CHECKING:
    from boxcal.app.settings import Settings

ARCHIVE = "images.zip"
NAMES = "images.json"
MAX_IMAGE_BYTES = 32 * 2**20
BATCH = 32
HEAD = 16


@dataclass(frozen=True, slots=True)
class BackboneSource:
    """How to load the backbone that the service runs; small enough to be handed to another process.

    Attributes
    ----------
    max_pixels
        Most pixels of an image that is decoded.
    """

    model: str
    weights: str | None
    labels: Path | None
    device: str
    precision: str
    max_pixels: int

    @classmethod
    def of(cls, settings: Settings) -> Self:
        """Take it from the service's settings."""
        return cls(
            settings.model,
            settings.weights,
            settings.labels,
            settings.device,
            settings.precision,
            settings.max_pixels,
        )

    def load(self) -> Backbone:
        """Load it.

        Raises
        ------
        BackboneError
            The weights cannot be read.
        """
        return load_backbone(
            self.model,
            weights=self.weights,
            labels=self.labels,
            device=self.device,
            precision=self.precision,
        )


@dataclass(frozen=True, slots=True)
class ImageSet:
    """N labelled images, not decoded yet.

    Attributes
    ----------
    folder
        Holds the archive, the names of its N images in order, and `labels.npy` (N,), int64.
    samples
        N.
    """

    folder: Path
    samples: int

    def images(self) -> Iterator[tuple[str, bytes]]:
        """Yield the name and the bytes of each image, in the order of the labels."""
        names = json.loads((self.folder / NAMES).read_text())
        with zipfile.ZipFile(self.folder / ARCHIVE) as archive:
            for name in names:
                yield name, archive.read(name)


def is_archive_of_images(file: IO[bytes]) -> bool:
    """Whether a file is a zip archive that holds something, and nothing that is an array.

    Raises
    ------
    UploadTooLarge
        It is an archive, and its directory is too large to look at.
    """
    try:
        names = open_archive(file, ".zip").namelist()
    except InvalidUpload:
        return False
    return bool(names) and not any(name.endswith(".npy") for name in names)


def create(file: IO[bytes], folder: Path, *, classes: Sequence[str], max_bytes: int) -> ImageSet:
    """Check an archive and keep a copy of it in `folder`.

    Parameters
    ----------
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
    names, labels = [], []
    with open_archive(file, ".zip") as archive:
        entries = [entry for entry in archive.infolist() if not _is_hidden(entry)]
        total = sum(entry.file_size for entry in entries)
        if total > max_bytes:
            raise UploadTooLarge(f"The images unpack to {total:,} bytes; the limit is {max_bytes:,}.")
        for entry in entries:
            label = PurePosixPath(entry.filename).parent.name
            if label not in index_of:
                known = ", ".join(repr(one) for one in list(classes)[:10])
                raise InvalidUpload(
                    f"{entry.filename!r} lies in the folder {label!r}, which is no class of the backbone; "
                    f"its {len(classes)} classes begin with {known}."
                )
            _check_image(archive, entry)
            names.append(entry.filename)
            labels.append(index_of[label])
    if len(names) < MIN_SAMPLES:
        raise InvalidUpload(
            f"The archive holds {len(names)} images; a fit that is judged on unseen folds needs at least "
            f"{MIN_SAMPLES}."
        )
    file.seek(0)
    with (folder / ARCHIVE).open("wb") as copy:
        shutil.copyfileobj(file, copy)
    (folder / NAMES).write_text(json.dumps(names))
    np.save(labels_path(folder), np.array(labels, dtype=np.int64), allow_pickle=False)
    return ImageSet(folder, len(names))


def to_validation_set(
    data: ImageSet,
    source: BackboneSource,
    progress: Callable[[float, str], None],
    reads: Collection[str] = (),
) -> ValidationSet:
    """Run the backbone over the images, in the process of the fit.

    Parameters
    ----------
    reads
        What the set shall hold besides logits: `features`, `inputs`, both or neither.

    Raises
    ------
    ValueError
        An image cannot be decoded; names it.
    """
    progress(0.0, f"loading {source.model}")
    backbone = source.load()
    if backbone.preprocessing is None:
        raise ValueError(f"{source.model} reads tensors, not images; upload its logits.")
    kept: dict[str, list[torch.Tensor]] = {"logits": []}
    if "inputs" in reads:
        kept["inputs"] = []
    if "features" in reads and isinstance(backbone, OpenBackbone) and backbone.head is not None:
        kept["features"] = []
    batch: list[torch.Tensor] = []
    for position, (name, image) in enumerate(data.images()):
        try:
            decoded = decode(image, preprocessing=backbone.preprocessing, max_pixels=source.max_pixels)
        except InvalidImage as error:
            raise ValueError(f"{name}: {error}") from error
        batch.append(torch.from_numpy(decoded))
        if len(batch) == BATCH or position + 1 == data.samples:
            samples = torch.stack(batch)
            kept["logits"].append(backbone(samples))
            if "inputs" in kept:
                kept["inputs"].append(samples)
            if "features" in kept and isinstance(backbone, OpenBackbone):
                kept["features"].append(backbone.features(samples))
            batch.clear()
            progress((position + 1) / data.samples, f"running {source.model} on {data.samples} images")
    for name, batches in kept.items():
        np.save(besides_path(data.folder, name), torch.cat(batches).numpy(), allow_pickle=False)
    return ValidationSet(data.folder, data.samples)


def _is_hidden(entry: zipfile.ZipInfo) -> bool:
    """Whether it is a folder, or one of the files that file managers leave in archives."""
    parts = PurePosixPath(entry.filename).parts
    return entry.is_dir() or "__MACOSX" in parts or parts[-1].startswith(".") or parts[-1] == "Thumbs.db"


def _check_image(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> None:
    if entry.flag_bits & 0x1:
        raise InvalidUpload(f"{entry.filename!r} is encrypted.")
    if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise InvalidUpload(
            f"{entry.filename!r} is packed with zip method {entry.compress_type}; 0 and 8 are read."
        )
    if entry.file_size > MAX_IMAGE_BYTES:
        raise UploadTooLarge(
            f"{entry.filename!r} has {entry.file_size:,} bytes; an image may have {MAX_IMAGE_BYTES:,}."
        )
    try:
        with archive.open(entry) as image:
            image_format(image.read(HEAD))
    except InvalidImage as error:
        raise InvalidUpload(f"{entry.filename!r}: {error}") from error
    except (zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise InvalidUpload(f"{entry.filename!r} is damaged: {error}.") from error
