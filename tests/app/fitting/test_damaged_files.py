"""Damaged archives and files, and an upload that stalls: none makes the reader fail otherwise than refuse."""

import asyncio
import struct
from collections.abc import AsyncGenerator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from boxcal.app.fitting.server.upload_validation import receive
from boxcal.app.http.problems import BoxcalError, InvalidUpload, UploadStalled, UploadTooLarge
from tests.app.fitting.files import (
    LABELS,
    LIMIT,
    LOGITS,
    K,
    arrow,
    bomb,
    by_class,
    compressed,
    csv,
    parquet,
    read_bytes,
)
from tests.app.fitting.validation_data import CONTENT_TYPE
from tests.app.raising import raises_problem


def test_a_directory_of_made_up_entries_is_not_even_read(tmp_path: Path) -> None:
    """A million entries of no bytes would take gigabytes of memory to list."""
    entry = struct.pack("<4s6H3L5H2L", b"PK\x01\x02", 20, 20, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0) + b"x"
    directory = entry * (17 * 2**20 // len(entry))
    end = struct.pack("<4s4H2LH", b"PK\x05\x06", 0, 0, 65535, 65535, len(directory), 0, 0)
    too_large = r"directory of the archive has 17,[0-9,]+ bytes; the limit is 16,777,216"
    with raises_problem(UploadTooLarge, match=too_large):
        read_bytes(directory + end, tmp_path)
    # The 64-bit form keeps the size elsewhere; the last record may then say anything.
    elsewhere = struct.pack("<4sLQL", b"PK\x06\x07", 0, len(directory), 1)
    small = struct.pack("<4s4H2LH", b"PK\x05\x06", 0, 0, 1, 1, len(entry), 0, 0)
    with pytest.raises(InvalidUpload, match="64-bit form"):
        read_bytes(directory + elsewhere + small, tmp_path)


def test_an_archive_cannot_hide_its_size(tmp_path: Path) -> None:
    """A directory that understates what a member unpacks to does not get more bytes out of it."""
    data = bytearray(bomb((2**17, K)))
    true_size = struct.pack("<I", 2**17 * K * 8 + 128)
    assert data.count(true_size) >= 1
    lie = bytes(data).replace(true_size, struct.pack("<I", 928))
    with pytest.raises(BoxcalError, match=r"`logits`.*Bad CRC-32"):
        read_bytes(lie, tmp_path)


def test_every_single_flipped_byte_is_refused_or_harmless(tmp_path: Path) -> None:
    """No damage to a file makes the reader fail in another way than by refusing it."""
    rng = np.random.default_rng(1)
    kinds = (compressed(logits=LOGITS, labels=LABELS), parquet(), arrow(compression="zstd"), csv(by_class()))
    for kind in kinds:
        for trial in range(150):
            data = bytearray(kind)
            data[rng.integers(len(data))] = rng.integers(256)
            folder = tmp_path / f"{len(kind)}-{trial}"
            folder.mkdir()
            with suppress(BoxcalError):
                logits, labels = read_bytes(bytes(data), folder).arrays()
                assert np.isfinite(logits).all()
                assert ((labels >= 0) & (labels < K)).all()


def test_an_upload_that_stalls_loses_its_slot(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("boxcal.app.fitting.server.upload_validation.RATE_SECONDS", 0.05)

    async def stalls() -> AsyncGenerator[bytes, None]:
        yield b"--x\r\nContent-Disposition: form-data; name=file; filename=v.npz\r\n\r\nPK"
        await asyncio.Event().wait()

    async def receives() -> None:
        await receive({"content-type": CONTENT_TYPE}, stalls(), tmp_path / "body", LIMIT)

    with raises_problem(UploadStalled, match=r"brought 68 bytes in 0\.05 s, after 0; the minimum is 163,840"):
        asyncio.run(receives())
