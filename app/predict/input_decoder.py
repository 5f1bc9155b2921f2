"""Decodes the inputs of a request to samples, in a small pool of threads, within limits of pixels."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext

import numpy as np
from numpy.typing import NDArray

from boxcal.app.budget import Budget
from boxcal.app.errors import BackboneFailed, ImageTooLarge, InvalidInput
from boxcal.app.predict.lanes import Undecoded
from boxcal.app.predict.posted_inputs import Input
from boxcal.models.decoding import check_size, image_size
from boxcal.models.errors import BackboneError, TooManyPixels
from boxcal.models.inputs import Inputs as ModelInputs
from boxcal.models.inputs import Samples

IMAGES_PER_REQUEST = 20
"""Images of the largest size whose pixels one request may hold; all requests may hold twice as many."""
LARGE_IMAGE_PIXELS = 4_000_000
QUICK_PIXELS = 1_000_000
"""Of an image that a lane decodes: its neighbours in the batch wait for some milliseconds."""
SMALL_PIXELS = 4096
"""Of images that one thread decodes for the whole request: most of it is Python code, so that threads would
wait for each other's interpreter, and for a change of thread with every image."""
PLAUSIBLE_INPUT = 2.0**16
"""Larger than any value that a backbone reads from an image, as float16 can represent it."""

Inputs = Sequence[Input] | NDArray[np.generic]
"""What one JSON body or form holds, or an array (N, *shape) of samples."""


class InputDecoder:
    """Decodes inputs.

    Parameters
    ----------
    inputs
        Decodes one input to one sample of the backbone.
    pool, threads
        For decoding, and how many threads it has.
    max_pixels
        Of one image.
    in_lanes
        Whether a lane decodes single small images itself.
    """

    def __init__(
        self,
        inputs: ModelInputs,
        pool: ThreadPoolExecutor,
        *,
        threads: int,
        max_pixels: int,
        in_lanes: bool,
    ) -> None:
        self._inputs = inputs
        self._in_lanes = in_lanes
        self._pool = pool
        self._threads = threads
        self._max_pixels = max_pixels
        self._pixels = Budget("pixels", 2 * IMAGES_PER_REQUEST * max_pixels)
        # One thread of the pool, if it has more, is left to small images.
        self._large_images = asyncio.Semaphore(max(1, threads - 1))

    def later(self, inputs: Inputs) -> Undecoded | None:
        """Return a single small image for the thread that runs the model, if that is a core like any other.

        Raises
        ------
        InvalidInput, ImageTooLarge
            Its header cannot be read; too many pixels.
        """
        if not self._in_lanes or isinstance(inputs, np.ndarray) or len(inputs) != 1:
            return None
        pixels = self._pixels_of(inputs[0], "")
        if not 0 < pixels <= QUICK_PIXELS:
            return None
        return Undecoded(lambda: self._sample(inputs[0], "")[None])

    async def decode(self, inputs: Inputs) -> Samples:
        """Return one sample for each input, in their order.

        Raises
        ------
        InvalidInput, ImageTooLarge, QueueFull
            Naming the input that cannot be read; too many pixels in the request, or in all requests.
        """
        loop = asyncio.get_running_loop()
        if isinstance(inputs, np.ndarray):
            with _naming(""):
                return await loop.run_in_executor(self._pool, self._inputs.check, inputs)
        names = [f"inputs[{n}]: " for n in range(len(inputs))] if len(inputs) > 1 else [""]
        if self._inputs.kind in {"rows", "texts"}:
            return await loop.run_in_executor(self._pool, self._decode_all, inputs, names)
        pixels = [self._pixels_of(sent, name) for sent, name in zip(inputs, names, strict=True)]
        limit = self._pixels.limit // 2
        if sum(pixels) > limit:
            raise ImageTooLarge(
                f"The images have {sum(pixels):,} pixels; the limit of a request is {limit:,}."
            )
        if len(inputs) > 1 and max(pixels) <= SMALL_PIXELS:
            return await loop.run_in_executor(self._pool, self._decode_all, inputs, names)

        async def decoded(sent: Input, name: str, size: int) -> Samples:
            async with self._large_images if size > LARGE_IMAGE_PIXELS else nullcontext():
                return await loop.run_in_executor(self._pool, self._sample, sent, name)

        with self._pixels.holding(sum(pixels)) if sum(pixels) > LARGE_IMAGE_PIXELS else nullcontext():
            if len(inputs) == 1:
                return (await decoded(inputs[0], names[0], pixels[0]))[None]
            samples = self._inputs.blank(len(inputs))
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
        """Attribute a failure of the backbone to inputs so large that its arithmetic overflows.

        Raises
        ------
        InvalidInput
            They have a value larger than `PLAUSIBLE_INPUT`.
        """
        if self._inputs.kind not in {"images", "tensors"}:
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
        samples = self._inputs.blank(len(inputs))
        for position, (sent, name) in enumerate(zip(inputs, names, strict=True)):
            self._check_member(sent, name)
            samples[position] = self._sample(sent, name)
        return samples

    def _check_member(self, sent: Input, name: str) -> None:
        if sent.member not in self._inputs.members:
            raise InvalidInput(f"{name}{self._inputs.refusal(sent.member)}")

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
        if isinstance(sent.value, np.ndarray):  # decoded as the body was parsed
            return sent.value
        with _naming(name):
            return self._inputs.decode(sent.member, sent.value, self._max_pixels)


@contextmanager
def _naming(name: str) -> Iterator[None]:
    """Turn an error about an input into the service's, with the input's name in front."""
    try:
        yield
    except TooManyPixels as error:
        raise ImageTooLarge(f"{name}{error}") from error
    except BackboneError as error:
        raise InvalidInput(f"{name}{error}") from error
