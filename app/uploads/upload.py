"""The first step of a refit: a multipart body becomes a checked validation set, or is refused with why.

The body is streamed into a nameless temporary file, which vanishes with the process however that ends; it is
read and checked in a thread. What the file is, its first bytes say: names and content types are not believed.
"""

from __future__ import annotations

import asyncio
import errno
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError
from starlette.datastructures import Headers, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import ClientDisconnect

from boxcal.app.errors import InvalidParameter, MalformedBody, UnsupportedMediaType
from boxcal.app.fitting.errors import (
    InvalidUpload,
    StorageFull,
    UnknownMethod,
    UnknownUploadFormat,
    UploadStalled,
    UploadTooLarge,
)
from boxcal.app.fitting.image_sets import ImageSet, is_archive_of_images
from boxcal.app.fitting.image_sets import create as create_from_images
from boxcal.app.fitting.npz import NpzFile
from boxcal.app.fitting.parquet import read_parquet
from boxcal.app.fitting.validation_set import ValidationSet, check_shapes, create, keep_features
from boxcal.app.registry.records import ActivatePolicy

AUTO = "auto"
FEATURES = "features"
MAX_FIELD_BYTES = 4096
STALLED_SECONDS = 60.0


class FitFields(BaseModel):
    """The plain fields beside the file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    method: str = AUTO
    activate: ActivatePolicy = ActivatePolicy.IF_BETTER


@dataclass(frozen=True, slots=True)
class Upload:
    """A body taken apart: the file, wound back to its beginning, and the fields."""

    file: IO[bytes]
    fields: FitFields


@asynccontextmanager
async def receive(
    headers: Mapping[str, str], stream: AsyncGenerator[bytes, None], max_bytes: int
) -> AsyncIterator[Upload]:
    """Take the body apart as it arrives; the file is closed at the end.

    Parameters
    ----------
    headers, stream
        Those of the request.
    max_bytes
        How large the body may be.

    Raises
    ------
    UnsupportedMediaType, MalformedBody, UploadTooLarge
        It is no multipart body, not a well-formed one, or has more bytes.
    InvalidUpload, InvalidParameter, UnknownMethod
        There is no file, or a field is unknown or has a value that is not accepted.
    UploadStalled
        Nothing came for `STALLED_SECONDS`.
    StorageFull
        There is no room for it.
    """
    kind = headers.get("content-type", "")
    if kind.partition(";")[0].strip().lower() != "multipart/form-data":
        raise UnsupportedMediaType(f"/fit reads multipart/form-data, got {kind or 'no content type'!r}.")
    announced = headers.get("content-length", "")
    if announced.isdigit() and int(announced) > max_bytes:
        raise UploadTooLarge(f"The upload has {int(announced):,} bytes; the limit is {max_bytes:,}.")
    parser = MultiPartParser(
        Headers(headers),
        _limited(stream, max_bytes),
        max_files=1,
        max_fields=8,
        max_part_size=MAX_FIELD_BYTES,
    )
    try:
        form = await parser.parse()
    except MultiPartException as error:
        raise MalformedBody(f"The multipart body cannot be read: {error.message}") from error
    except OSError as error:
        raise _storage(error) from error
    try:
        file = form.get("file")
        if not isinstance(file, UploadFile):
            raise InvalidUpload(
                "The form needs a part `file` with a file name, holding .npz, .parquet or .zip."
            )
        yield Upload(file.file, _fields({k: v for k, v in form.multi_items() if k != "file"}))
    finally:
        await form.close()


def read_any(
    file: IO[bytes], folder: Path, *, classes: Sequence[str], max_bytes: int
) -> ValidationSet | ImageSet:
    """Turn an uploaded file of arrays or of images into a set to fit to; blocks.

    Parameters
    ----------
    classes
        The backbone's K labels.

    Raises
    ------
    UnknownUploadFormat, InvalidUpload, UploadTooLarge, StorageFull
        As `read`; or names the image or the folder that cannot be accepted.
    """
    if not is_archive_of_images(file):
        return read(file, folder, num_classes=len(classes), max_bytes=max_bytes)
    try:
        return create_from_images(file, folder, classes=classes, max_bytes=max_bytes)
    except OSError as error:
        raise _storage(error) from error


def read(file: IO[bytes], folder: Path, *, num_classes: int, max_bytes: int) -> ValidationSet:
    """Turn an uploaded file into a checked validation set; blocks, so the service calls it in a thread.

    Parameters
    ----------
    file
        Seekable.
    folder
        Where the set shall lie.
    num_classes
        K of the backbone.
    max_bytes
        How large its arrays may be, unpacked.

    Raises
    ------
    UnknownUploadFormat, InvalidUpload, UploadTooLarge, StorageFull
        Names the array, the place and the value that cannot be accepted.
    """
    file.seek(0)
    magic = file.read(4)
    file.seek(0)
    raw = folder / "upload.raw"
    try:
        if magic[:2] == b"PK":
            return _read_npz(NpzFile(file, max_bytes), folder, raw, num_classes)
        if magic == b"PAR1":
            logits, labels = read_parquet(file, raw, num_classes=num_classes, max_bytes=max_bytes)
            return create(folder, logits, labels, num_classes=num_classes, probabilities=False)
    except OSError as error:
        raise _storage(error) from error
    finally:
        raw.unlink(missing_ok=True)
    start = f"it begins with {magic!r}" if magic else "it is empty"
    raise UnknownUploadFormat(f"The file is neither .npz nor .parquet, nor a .zip of images: {start}.")


def _read_npz(archive: NpzFile, folder: Path, raw: Path, num_classes: int) -> ValidationSet:
    scores = [name for name in ("logits", "probabilities") if name in archive.names]
    there = ", ".join(f"`{name}`" for name in sorted(archive.names)[:20]) or "no arrays"
    if not scores or "labels" not in archive.names:
        raise InvalidUpload(
            f"The .npz needs `labels` and either `logits` or `probabilities`; it holds {there}."
        )
    if len(scores) > 1:
        raise InvalidUpload("The .npz holds both `logits` and `probabilities`; send the one to be fitted.")
    name = scores[0]
    more = [FEATURES] if FEATURES in archive.names else []
    headers = archive.headers([name, "labels", *more])
    check_shapes(name, headers[name].shape, headers["labels"].shape, num_classes)
    labels = np.array(archive.unpack(headers["labels"], raw))
    values = archive.unpack(headers[name], raw)
    data = create(folder, values, labels, num_classes=num_classes, probabilities=name == "probabilities")
    for extra in more:
        keep_features(data, archive.unpack(headers[extra], raw))
    return data


def _fields(form: Mapping[str, Any]) -> FitFields:
    try:
        fields = FitFields.model_validate(form)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"])
        raise InvalidParameter(f"The field `{name}` = {first['input']!r:.200}: {first['msg']}.") from error
    from boxcal.calibrators.method import methods  # noqa: PLC0415 - every method there is, for fits alone

    if fields.method != AUTO and fields.method not in methods():
        raise UnknownMethod(
            f"There is no method {fields.method!r:.200}; there are {AUTO}, {', '.join(methods())}."
        )
    return fields


async def _limited(stream: AsyncGenerator[bytes, None], max_bytes: int) -> AsyncGenerator[bytes, None]:
    size = 0
    while True:
        try:
            async with asyncio.timeout(STALLED_SECONDS):
                piece = await anext(stream)
        except StopAsyncIteration:
            return
        except TimeoutError as error:
            raise UploadStalled(f"Nothing came for {STALLED_SECONDS:g} s after {size:,} bytes.") from error
        except ClientDisconnect as error:
            raise MalformedBody(f"The upload broke off after {size:,} bytes.") from error
        size += len(piece)
        if size > max_bytes:
            raise UploadTooLarge(f"The upload has more than {max_bytes:,} bytes, which is the limit.")
        yield piece


def _storage(error: OSError) -> Exception:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return StorageFull(
            "There is no room on the disk for this upload; try again once other fits are over."
        )
    return error
