"""The inputs of `/predict`: read from the body of a request, and decoded to samples of the backbone.

Images are decoded in a small pool of threads, or by a lane, within limits of pixels.
"""

from __future__ import annotations

import asyncio
import binascii
import csv
import re
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from boxcal.app.http.limits import Budget
from boxcal.app.http.problems import (
    BackboneFailed,
    ImageTooLarge,
    InvalidInput,
    InvalidParameter,
    TooManySamples,
)
from boxcal.app.predict.bodies import CSV, FORM, IMAGES, TEXT, WRITTEN, RequestBody
from boxcal.app.predict.lanes import PendingImage
from boxcal.app.tables.kinds import START_BYTES, dialect
from boxcal.calibrators.errors import hint
from boxcal.models import BackboneError, TooManyPixels
from boxcal.models.inputs.base import Inputs as ModelInputs
from boxcal.models.inputs.base import Samples
from boxcal.models.inputs.images import check_size, image_size

MEMBERS: Mapping[str, type | tuple[type, ...]] = {
    "tensor": list, "features": (list, dict), "text": str, "tokens": dict,
}  # fmt: skip
"""What one input of a JSON body may be besides an image, and its type."""
IMAGES_PER_REQUEST = 20
"""Images of the largest size whose pixels one request may hold; all requests may hold twice as many."""
LARGE_IMAGE_PIXELS = 4_000_000
QUICK_PIXELS = 1_000_000
"""Of an image that a lane decodes: its neighbours in the batch wait for some milliseconds."""
QUICK_AT_ONCE = 4
"""Images of so few pixels that are decoded at once: more threads would wait for the interpreter, and with
them the event loop and the passes."""
SMALL_PIXELS = 4096
"""Of images that one thread decodes for the whole request: most of it is Python code, so that threads would
wait for each other's interpreter, and for a change of thread with every image."""
MAX_COLUMNS = 65_536
SHORT = 4
"""Characters from which a value of CSV is not shared with those that are equal."""
DATA_URI = re.compile(r"\A\s*data:[^,]{0,200};base64,", re.IGNORECASE)
URL_ALPHABET = bytes.maketrans(b"-_", b"+/")
PLAUSIBLE_INPUT = 2.0**16
"""Larger than any value that a backbone reads from an image, as float16 can represent it."""


class Input(NamedTuple):
    """One input of `/predict`: an encoded image as bytes, or a member of the input's JSON object."""

    member: str
    value: Any


Inputs = Sequence[Input] | NDArray[np.generic]
"""What one JSON body or form holds, or an array (N, *shape) of samples."""


def inputs_of(posted: RequestBody, limit: int, inputs: ModelInputs) -> list[Input]:
    """Return the inputs of a body of `/predict` that is not `.npy`; large JSON bodies take a while."""
    members = inputs.members
    if posted.kind in IMAGES:
        return [Input("image", posted.content)]
    if posted.kind == TEXT:
        return [Input("text", _decoded(posted.content))]
    if posted.kind == CSV:
        if "cells" not in members:
            raise InvalidInput(inputs.refusal("rows of CSV"))
        return csv_rows(posted.content, limit)
    sent = posted.content
    if not isinstance(sent, list) or not sent:
        raise InvalidParameter(f"inputs must be a list of at least one of {_written(members)}.")
    if len(sent) > limit:
        raise TooManySamples(f"The request holds {len(sent)} samples; the queue takes at most {limit}.")
    if posted.kind == FORM:
        return [Input("image", file) for file in sent]
    return [_input(item, f"inputs[{n}]", members) for n, item in enumerate(sent)]


def _input(item: Any, name: str, members: Sequence[str]) -> Input:
    if isinstance(item, dict) and len(item) == 1 and isinstance(text := item.get("image"), str):
        return Input("image", from_base64(text, name))
    if isinstance(item, dict) and len(item) == 1:
        member, value = next(iter(item.items()))
        if isinstance(value, MEMBERS.get(member, ())):
            return Input(member, value)
    unknown = next(iter(item), None) if isinstance(item, dict) and len(item) == 1 else None
    known = [member for member in members if member in WRITTEN]
    meant = hint(unknown, known) if isinstance(unknown, str) and unknown not in known else ""
    raise InvalidParameter(f"{name} must be {_written(members)}, got {reprlib.repr(item)}{meant or '.'}")


def _written(members: Sequence[str]) -> str:
    """Show what one input of the model may be."""
    return " or ".join(WRITTEN[member] for member in members if member in WRITTEN) or "an input of a model"


def csv_rows(body: bytes, limit: int) -> list[Input]:
    """Read rows of features: each as the names of the columns, from the first line, and its values."""
    delimiter, decimal = dialect(body[:START_BYTES])
    reader = csv.reader(_lines(_decoded(body), delimiter), delimiter=delimiter, strict=True)
    short: dict[str, str] = {}  # Equal values, which take 20 times their text each
    rows: list[Input] = []
    try:
        names = next(reader, [])
        for row in filter(None, reader):
            if len(row) != len(names):
                raise InvalidInput(
                    f"line {reader.line_num} does not have {len(names)} values, one for "
                    "each column that the first line names."
                )
            if len(rows) == limit:
                raise TooManySamples(
                    f"The request holds more than {limit} samples, which the queue can take."
                )
            values = [short.setdefault(one, one) if len(one) < SHORT else one for one in row]
            rows.append(Input("cells", (names, values, decimal)))
    except csv.Error as error:
        raise InvalidInput(f"line {reader.line_num} is no readable CSV: {error}.") from error
    if not rows:
        raise InvalidInput("The CSV document has no rows.")
    return rows


def _lines(text: str, delimiter: str) -> Iterator[str]:
    """Give the lines of a CSV document, each of which the reader splits while no other thread runs."""
    separator = "\n" if "\n" in text else "\r"
    start = number = 0
    while start < len(text):
        end = text.find(separator, start) + 1 or len(text)
        number += 1
        if (count := text.count(delimiter, start, end)) >= MAX_COLUMNS:
            raise InvalidInput(f"line {number} has {count + 1:,} values; the limit is {MAX_COLUMNS:,}.")
        yield text[start:end]
        start = end


def _decoded(body: bytes) -> str:
    try:
        return body.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InvalidInput(f"The text is not UTF-8: {error}.") from error


def from_base64(text: str, name: str) -> bytes:
    """Decode an image in base64: also a data URI, in lines, with the alphabet for URLs, without padding."""
    try:
        return binascii.a2b_base64(text, strict_mode=True)
    except ValueError:
        pass
    try:
        data = DATA_URI.sub("", text).encode("ascii").translate(URL_ALPHABET, b" \t\r\n").rstrip(b"=")
        return binascii.a2b_base64(data + b"=" * (-len(data) % 4), strict_mode=True)
    except ValueError as error:
        is_address = text[:8].lower().startswith(("http://", "https://"))
        why = "addresses are not fetched; send what is there" if is_address else error
        raise InvalidInput(f"{name}: The image is not base64: {why}.") from error


class InputDecoder:
    def __init__(
        self,
        inputs: ModelInputs,
        pool: ThreadPoolExecutor,
        *,
        threads: int,
        max_pixels: int,
        in_lanes: bool,
    ) -> None:
        self.inputs = inputs
        self._in_lanes = in_lanes
        self.pool = pool
        self._threads = threads
        self._max_pixels = max_pixels
        self._pixels = Budget("pixels", 2 * IMAGES_PER_REQUEST * max_pixels)
        # One thread of the pool, if it has more, is left to small images.
        self._large_images = asyncio.Semaphore(max(1, threads - 1))
        self._quick_images = asyncio.Semaphore(QUICK_AT_ONCE)

    def later(self, inputs: Inputs) -> PendingImage | None:
        """Return a single small image for the thread that runs the model, if that is an ordinary core."""
        if not self._in_lanes or isinstance(inputs, np.ndarray) or len(inputs) != 1:
            return None
        pixels = self._pixels_of(inputs[0], "")
        if not 0 < pixels <= QUICK_PIXELS:
            return None
        return PendingImage(lambda: self._sample(inputs[0], "")[None])

    async def decode(self, inputs: Inputs) -> Samples:
        """Return one sample for each input, in their order."""
        loop = asyncio.get_running_loop()
        if isinstance(inputs, np.ndarray):
            with _naming(""):
                return await loop.run_in_executor(self.pool, self.inputs.check, inputs)
        names = [f"inputs[{n}]: " for n in range(len(inputs))] if len(inputs) > 1 else [""]
        if self.inputs.kind in {"rows", "texts"}:
            for sent, name in zip(inputs, names, strict=True):
                self._check_member(sent, name)
            return await loop.run_in_executor(self.pool, self._decode_all, inputs, names)
        pixels = [self._pixels_of(sent, name) for sent, name in zip(inputs, names, strict=True)]
        limit = self._pixels.limit // 2
        if sum(pixels) > limit:
            raise ImageTooLarge(
                f"The images have {sum(pixels):,} pixels; the limit of a request is {limit:,}."
            )
        if len(inputs) > 1 and max(pixels) <= SMALL_PIXELS:
            return await loop.run_in_executor(self.pool, self._decode_all, inputs, names)

        async def decoded(sent: Input, name: str, size: int) -> Samples:
            turn = self._large_images if size > LARGE_IMAGE_PIXELS else nullcontext()
            async with self._quick_images if size <= QUICK_PIXELS else turn:
                return await loop.run_in_executor(self.pool, self._sample, sent, name)

        with self._pixels.holding(sum(pixels)) if sum(pixels) > LARGE_IMAGE_PIXELS else nullcontext():
            if len(inputs) == 1:
                return (await decoded(inputs[0], names[0], pixels[0]))[None]
            samples = self.inputs.blank(len(inputs))
            left = iter(zip(range(len(inputs)), inputs, names, pixels, strict=True))

            async def decode_next() -> None:
                for position, sent, name, size in left:
                    samples[position] = await decoded(sent, name, size)

            # No more than the pool has threads, so that images of other requests need not wait for all.
            tasks = [asyncio.create_task(decode_next()) for _ in range(self._threads)]
            try:
                await asyncio.gather(*tasks)
            finally:
                for task in tasks:
                    task.cancel()
        return samples

    def check_magnitude(self, samples: Samples, error: BackboneFailed) -> None:
        """Attribute a failure of the backbone to inputs so large that its arithmetic overflows."""
        if self.inputs.kind not in {"images", "tensors"}:
            return
        position = int(np.abs(samples).argmax())
        largest = float(samples.flat[position])
        if abs(largest) > PLAUSIBLE_INPUT:
            place = [int(index) for index in np.unravel_index(position, samples.shape)]
            raise InvalidInput(
                f"The model's arithmetic fails on this input, whose value at {place} is {largest:g}. "
                f"Values up to {PLAUSIBLE_INPUT:g} in magnitude are expected."
            ) from error

    def _decode_all(self, inputs: Sequence[Input], names: Sequence[str]) -> Samples:
        """Decode inputs that each take microseconds, up to a tenth of a millisecond."""
        samples = self.inputs.blank(len(inputs))
        for position, (sent, name) in enumerate(zip(inputs, names, strict=True)):
            samples[position] = self._sample(sent, name)
        return samples

    def _check_member(self, sent: Input, name: str) -> None:
        if sent.member not in self.inputs.members:
            raise InvalidInput(f"{name}{self.inputs.refusal(sent.member)}")

    def _pixels_of(self, sent: Input, name: str) -> int:
        """Return how many pixels the header of an image announces; 0 for another input."""
        self._check_member(sent, name)
        if sent.member != "image":
            return 0
        with _naming(name):
            width, height = image_size(sent.value)
            check_size(width, height, self._max_pixels)
        return width * height

    def _sample(self, sent: Input, name: str) -> Samples:
        with _naming(name):
            return self.inputs.decode(sent.member, sent.value, self._max_pixels)


@contextmanager
def _naming(name: str) -> Iterator[None]:
    """Turn an error about an input into the service's, with the input's name in front."""
    try:
        yield
    except TooManyPixels as error:
        raise ImageTooLarge(f"{name}{error}") from error
    except BackboneError as error:
        raise InvalidInput(f"{name}{error}") from error
