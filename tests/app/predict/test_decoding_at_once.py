"""How many images are decoded at once, where a GPU leaves every core to decoding."""

from __future__ import annotations

import asyncio
import io
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from PIL import Image

from boxcal.app.predict.inputs import Input, InputDecoder

pytestmark = pytest.mark.anyio

THREADS = 12


class Counting:
    """The inputs of a model that counts how many of them are decoded at the same moment.

    The first ones last until so many are, however busy the machine is.
    """

    kind, members = "images", ("image",)

    def __init__(self, expected: int) -> None:
        self.now = self.most = 0
        self._expected, self._reached = expected, threading.Event()
        self._lock = threading.Lock()

    def blank(self, count: int) -> Any:
        return np.zeros((count, 1), np.float32)

    def decode(self, member: str, value: bytes, max_pixels: int) -> Any:
        del member, value, max_pixels
        with self._lock:
            self.now += 1
            self.most = max(self.most, self.now)
            if self.now >= self._expected:
                self._reached.set()
        self._reached.wait(10)
        time.sleep(0.02)
        with self._lock:
            self.now -= 1
        return np.ones(1, np.float32)


@pytest.mark.parametrize(("side", "most"), [(65, 4), (1000, 4), (1001, THREADS), (2001, THREADS - 1)])
@pytest.mark.parametrize("joint", [False, True])
async def test_small_images_take_four_threads_and_large_ones_all_but_one(
    side: int, most: int, joint: bool
) -> None:
    file = io.BytesIO()
    Image.new("L", (side, side)).save(file, "PNG")
    images, inputs = [Input("image", file.getvalue())] * 3 * THREADS, Counting(most)
    with ThreadPoolExecutor(THREADS) as pool:
        decoder = InputDecoder(
            inputs,  # type: ignore[arg-type]
            pool,
            threads=THREADS,
            max_pixels=50_000_000,
            in_lanes=False,
        )
        batches = [images] if joint else [[image] for image in images]
        answers = await asyncio.gather(*(decoder.decode(batch) for batch in batches))
    assert inputs.most == most
    assert all((answer == 1.0).all() for answer in answers)
