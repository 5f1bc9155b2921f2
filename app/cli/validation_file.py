"""Validation data on this machine, read and checked by the same code that reads uploads to the service."""

import io
from collections.abc import Collection
from pathlib import Path
from typing import IO

from boxcal.app.cli.output import Advance
from boxcal.app.cli.settings import read_settings
from boxcal.app.client.calls import pack_images
from boxcal.app.fitting import image_sets
from boxcal.app.fitting.errors import InvalidUpload
from boxcal.app.fitting.npz import NpzFile
from boxcal.app.fitting.validation_set import ValidationSet
from boxcal.app.uploads.upload import read

__all__ = ["holds_images", "read_validation_set"]

NO_LIMIT = 2**62  # the user's own file, on the user's own machine


def read_validation_set(
    path: Path, folder: Path, advance: Advance, reads: Collection[str] = ()
) -> ValidationSet:
    """Read `.npz`, `.parquet` or images into a checked set that lies in `folder`.

    Images (a zip archive or a folder, with a folder for each class) go through the model of the settings;
    the set then also holds what `reads` names, `features` or `inputs`.

    Raises
    ------
    BoxcalError, BackboneError, ValueError
        Naming the array, the image or the place, and the value that cannot be accepted.
    """
    with _opened(path) as file:
        if image_sets.is_archive_of_images(file):
            return _from_images(file, folder, advance, reads)
        return read(file, folder, num_classes=_num_classes(file), max_bytes=NO_LIMIT)


def holds_images(path: Path) -> bool:
    """Whether the data are images in place of logits."""
    with _opened(path) as file:
        return image_sets.is_archive_of_images(file)


def _opened(path: Path) -> IO[bytes]:
    return io.BytesIO(pack_images(path)) if path.is_dir() else path.open("rb")


def _from_images(file: IO[bytes], folder: Path, advance: Advance, reads: Collection[str]) -> ValidationSet:
    source = image_sets.BackboneSource.of(read_settings())
    backbone = source.load()
    found = image_sets.create(file, folder, classes=backbone.labels, max_bytes=NO_LIMIT)
    try:
        return image_sets.to_validation_set(found, source, advance, reads)
    except ValueError as error:
        raise InvalidUpload(str(error)) from error


def _num_classes(file: IO[bytes]) -> int:
    """Take K from the file itself; a file that does not tell is refused by the reader, with the reason."""
    file.seek(0)
    magic = file.read(4)
    if magic == b"PAR1":
        return _num_classes_of_parquet(file)
    if magic == b"PK\x03\x04":
        archive = NpzFile(file, NO_LIMIT)
        for name in ("logits", "probabilities"):
            if name in archive.names and len(shape := archive.headers([name])[name].shape) == 2:
                return shape[1]
    return 0


def _num_classes_of_parquet(file: IO[bytes]) -> int:
    import pyarrow as pa  # noqa: PLC0415 - costs every command for the few who read parquet
    import pyarrow.parquet as pq  # noqa: PLC0415

    try:
        source = pq.ParquetFile(file)
        if "logits" in source.schema_arrow.names:
            for batch in source.iter_batches(batch_size=1, columns=["logits"]):
                first = batch.column("logits")[0].as_py()
                return len(first) if isinstance(first, list) else 0
    except pa.ArrowException as error:
        raise InvalidUpload(f"The file is no readable .parquet: {error}") from error
    return 0
