"""A validation file on this machine, read and checked by the same code that reads uploads to the service."""

from pathlib import Path
from typing import IO

from app.refit.errors import InvalidUpload
from app.refit.npz import NpzFile
from app.refit.upload import read
from app.refit.validation_set import ValidationSet

__all__ = ["read_validation_set"]

NO_LIMIT = 2**62  # the user's own file, on the user's own machine


def read_validation_set(path: Path, folder: Path) -> ValidationSet:
    """Read `.npz` or `.parquet` into a checked set that lies in `folder`.

    Raises
    ------
    BoxcalError
        Naming the array, the place and the value that cannot be accepted.
    """
    with path.open("rb") as file:
        return read(file, folder, num_classes=_num_classes(file), max_bytes=NO_LIMIT)


def _num_classes(file: IO[bytes]) -> int:
    """Take K from the file itself; a file that does not tell is refused by the reader, with the reason."""
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
