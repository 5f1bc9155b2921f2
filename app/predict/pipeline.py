"""The predict path as one object, without HTTP: inputs or logits and options in, calibrated answers out.

    inputs → decode (a small pool) → batcher → backbone → calibrate (in the batch) → rows → answer

Nothing computes on the event loop but rows so few that a change of thread would cost more than they do.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from boxcal.app.activation.activator import Activator
from boxcal.app.errors import DeadlineExceeded, QueueFull
from boxcal.app.predict import request_bounds
from boxcal.app.predict.answers import Answer, Rows
from boxcal.app.predict.arrays import check_samples
from boxcal.app.predict.batcher import Batcher
from boxcal.app.predict.calibration import CalibrationRequest, calibrate_logits
from boxcal.app.predict.inputs import Decoder, Input
from boxcal.app.predict.options import Options
from boxcal.app.predict.request_bounds import Labels
from boxcal.app.predict.scoring import Scoring, check_reads_logits, shifted
from boxcal.app.telemetry import Telemetry

INLINE_NUMBERS = 16_384
"""Up to so many numbers are dealt with on the event loop: well under a millisecond."""

LARGE_AT_ONCE = 32
"""So many requests with more numbers than that may wait for the pool."""

T = TypeVar("T")


class Pipeline:
    """Answers requests.

    Parameters
    ----------
    model
        The name that answers carry.
    labels
        The class names, in the order of the logits.
    decoder
        From one input as it was sent to one sample.
    activator
        Gives the active calibrator, and others by version.
    batcher
        Leads to the backbone; its `forward` is `scoring`, its `finish` is `calibrate_batch`.
    scoring
        Is told which requests need features.
    pool
        Where decoding, and other work too long for the event loop, is done.
    """

    def __init__(
        self,
        *,
        model: str,
        labels: Labels,
        decoder: Decoder,
        activator: Activator,
        batcher: Batcher[CalibrationRequest, Rows],
        scoring: Scoring,
        pool: ThreadPoolExecutor,
        telemetry: Telemetry,
        timeout_seconds: float,
    ) -> None:
        self.model = model
        self.labels = labels
        self._decoder = decoder
        self._activator = activator
        self._batcher = batcher
        self._scoring = scoring
        self._pool = pool
        self._telemetry = telemetry
        self._timeout = timeout_seconds
        self._large = 0

    def check_room(self, options: Options) -> None:
        """Refuse a request before its body is read, where not even one sample would find a place in time.

        Raises
        ------
        QueueFull, DeadlineExceeded
            As the batcher would, once it is read.
        """
        self._batcher.check_room(1, time.monotonic() + self._timeout_of(options))

    async def predict(self, inputs: Sequence[Input] | NDArray[np.generic], options: Options) -> Answer:
        """Classify inputs.

        Parameters
        ----------
        inputs
            What the request holds, undecoded; or an array (N, *shape) of samples.
        options
            How it wants to be answered.

        Raises
        ------
        BoxcalError
            What is wrong with an input, the bounds or the version; no place in the queue; too late.
        """
        arrived = time.perf_counter()
        deadline = time.monotonic() + self._timeout_of(options)
        wanted = await self._wanted(options)
        with self._batcher.reserve_slot(len(inputs), deadline), self._scoring.requested_by(wanted.served):
            samples = await within(deadline - time.monotonic(), self._decode(inputs))
            if wanted.served.calibrator.reads == "inputs":
                samples = await self.off_the_loop(shifted, samples, wanted.served)
            decoded = time.perf_counter()
            finished = await self._batcher.run(samples, wanted, deadline)
        seconds = {
            "decode": decoded - arrived,
            "queue": finished.queue,
            "backbone": finished.forward,
            "calibrate": finished.finish,
        }
        return self._answer(wanted, Rows.join(finished.results), options, arrived, seconds)

    async def calibrate(
        self, read: Callable[[], NDArray[np.float64]], numbers: int, options: Options
    ) -> Answer:
        """Calibrate logits that a model elsewhere computed.

        Parameters
        ----------
        read
            Gives the logits (N, K), checked.
        numbers
            About how many there are; many are read and calibrated off the event loop.
        options
            How the request wants to be answered.

        Raises
        ------
        BoxcalError
            What is wrong with the logits, the bounds or the version; too many large requests; too late.
        """
        arrived = time.perf_counter()
        wanted = await self._wanted(options)
        check_reads_logits(wanted.served)

        def work() -> tuple[Rows, float]:
            logits = read()
            decoded = time.perf_counter()
            return calibrate_logits(logits, wanted), decoded

        if numbers <= INLINE_NUMBERS:
            rows, decoded = work()
        else:
            with self._large_one():
                rows, decoded = await within(self._timeout_of(options), self.off_the_loop(work))
        seconds = {"decode": decoded - arrived, "calibrate": time.perf_counter() - decoded}
        return self._answer(wanted, rows, options, arrived, seconds)

    async def write(self, answer: Answer, writer: Callable[[Answer], bytes]) -> bytes:
        """Count an answer and turn it into bytes."""

        def work() -> bytes:
            self._telemetry.stages(answer.seconds)
            self._telemetry.answered(answer.confidences(), *answer.bound_hits(), answer.rows.relaxed_count)
            return writer(answer)

        if answer.rows.probabilities.size <= INLINE_NUMBERS:
            return work()
        return await self.off_the_loop(work)

    async def off_the_loop(self, work: Callable[..., T], *arguments: object) -> T:
        """Do work in the pool."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, work, *arguments)

    def _timeout_of(self, options: Options) -> float:
        return self._timeout if options.timeout_ms is None else options.timeout_ms / 1e3

    @contextmanager
    def _large_one(self) -> Iterator[None]:
        """Count the requests that wait for the pool with their logits in memory."""
        if self._large >= LARGE_AT_ONCE:
            raise QueueFull(f"{self._large} large requests are waiting and at most {LARGE_AT_ONCE} may.")
        self._large += 1
        try:
            yield
        finally:
            self._large -= 1

    async def _wanted(self, options: Options) -> CalibrationRequest:
        bounds = request_bounds.check(options.bounds, self.labels)
        served = self._activator.active.current
        version = served.version if options.calibrator == "active" else options.calibrator
        if version != served.version:
            served = await asyncio.to_thread(self._activator.load, version)
        return CalibrationRequest(served, bounds)

    async def _decode(self, inputs: Sequence[Input] | NDArray[np.generic]) -> NDArray[np.float32]:
        if isinstance(inputs, np.ndarray):
            return await self.off_the_loop(check_samples, inputs, self._decoder.input_shape)
        if len(inputs) == 1:
            return (await self.off_the_loop(self._decoder.decode, inputs[0]))[None]
        samples = await asyncio.gather(
            *(
                self.off_the_loop(self._decoder.decode, sent, f"inputs[{position}]")
                for position, sent in enumerate(inputs)
            )
        )
        return np.stack(samples)

    def _answer(
        self,
        wanted: CalibrationRequest,
        rows: Rows,
        options: Options,
        arrived: float,
        seconds: dict[str, float],
    ) -> Answer:
        seconds["total"] = time.perf_counter() - arrived
        return Answer(self.model, self.labels.names, wanted.served, rows, options, seconds)


async def within(seconds: float, work: Awaitable[T]) -> T:
    """Wait for work that a timeout stops; what the pool has not begun by then it will not do.

    Raises
    ------
    DeadlineExceeded
        It took longer.
    """
    try:
        async with asyncio.timeout(seconds):
            return await work
    except TimeoutError:
        raise DeadlineExceeded("The request's timeout passed before its work was done.") from None
