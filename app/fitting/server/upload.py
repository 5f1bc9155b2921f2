"""Receives the body of `/fit`: it is streamed into a preallocated file, and nothing in it is parsed here.

A worker reads it later. Its size is limited, its space on the disk is reserved before it is written, and it
must arrive at a minimum rate, because it holds one of a few slots.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, Mapping
from pathlib import Path

from starlette.requests import ClientDisconnect

from boxcal.app.fitting.disk_errors import disk_errors_as_problems
from boxcal.app.http.problems import MalformedBody, UnsupportedMediaType, UploadStalled, UploadTooLarge

WRITE_BYTES = 2**20
CONTENT_TYPES = ("multipart/form-data", "application/json")
RATE_SECONDS, RATE_BYTES = 10.0, 10 * 2**14
"""Within each 10 s an upload must bring 160 KiB, or end."""


async def receive(
    headers: Mapping[str, str], stream: AsyncGenerator[bytes, None], path: Path, max_bytes: int
) -> None:
    """Write the body to `path` as it arrives."""
    kind = headers.get("content-type", "")
    if kind.partition(";")[0].strip().lower() not in CONTENT_TYPES:
        raise UnsupportedMediaType(
            f"An upload is {' or '.join(CONTENT_TYPES)}, got {kind or 'no content type'!r}."
        )
    length = headers.get("content-length", "")
    announced = int(length) if length.isdecimal() else 0
    if announced > max_bytes:
        raise UploadTooLarge(f"The upload has {announced:,} bytes; the limit is {max_bytes:,}.")
    with disk_errors_as_problems(), path.open("wb", buffering=0) as file:
        descriptor, size, buffer = file.fileno(), 0, bytearray()
        if announced:
            await asyncio.to_thread(os.posix_fallocate, descriptor, 0, announced)
        async for piece in _at_minimum_rate(stream):
            buffer += piece
            if size + len(buffer) > max_bytes:
                raise UploadTooLarge(f"The upload has more than {max_bytes:,} bytes, which is the limit.")
            if len(buffer) >= WRITE_BYTES:
                size += await asyncio.to_thread(_append, descriptor, size, buffer)
                buffer = bytearray()
        size += await asyncio.to_thread(_append, descriptor, size, buffer)
        os.ftruncate(descriptor, size)


def _append(descriptor: int, size: int, piece: bytearray) -> int:
    """Write a piece at the end; its space is reserved first, where the length was not announced."""
    if piece:
        os.posix_fallocate(descriptor, size, len(piece))
    view = memoryview(piece)
    while view:
        view = view[os.pwrite(descriptor, view, size + len(piece) - len(view)) :]
    return len(piece)


async def _at_minimum_rate(stream: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    loop = asyncio.get_running_loop()
    size = brought = 0
    deadline = loop.time() + RATE_SECONDS
    while True:
        try:
            async with asyncio.timeout_at(deadline):
                piece = await anext(stream)
        except StopAsyncIteration:
            return
        except TimeoutError as error:
            raise UploadStalled(
                f"The upload brought {brought:,} bytes in {RATE_SECONDS:g} s, after {size - brought:,}; "
                f"the minimum is {RATE_BYTES:,}."
            ) from error
        except ClientDisconnect as error:
            raise MalformedBody(f"The upload broke off after {size:,} bytes.") from error
        size, brought = size + len(piece), brought + len(piece)
        if brought >= RATE_BYTES:
            brought, deadline = 0, loop.time() + RATE_SECONDS
        yield piece
