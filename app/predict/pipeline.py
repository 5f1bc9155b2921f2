"""Answers requests, without HTTP: from inputs or logits and options to calibrated rows.

    inputs → decode (a small pool) → batcher → backbone → calibrate (in the batch) → rows → response

Only rows so few that a change of thread would cost more are computed on the event loop.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from boxcal.app.http.limits import Budget
from boxcal.app.http.problems import (
    BackboneFailed,
    DeadlineExceeded,
    InvalidParameter,
    NoModel,
    RequestTooLarge,
)
from boxcal.app.observability.telemetry import Telemetry
from boxcal.app.predict.answers import (
    CalibratedAnswer,
    CalibrationRequest,
    Rows,
    Scoring,
    calibrate,
    calibrate_batch,
    check_reads_logits,
    is_quick,
    shifted,
)
from boxcal.app.predict.batcher import Batcher
from boxcal.app.predict.device import Turns
from boxcal.app.predict.inputs import InputDecoder, Inputs
from boxcal.app.predict.lanes import BatchSizer
from boxcal.app.predict.options import BoundsOption, Labels, Options, RequestBounds, check_bounds
from boxcal.app.predict.solver import Solver, lower_thread_priority
from boxcal.app.registry.activator import Activator, ServedCalibrator
from boxcal.app.settings import limits
from boxcal.app.settings.service import Settings
from boxcal.models.backends.backbone import Backbone
from boxcal.models.inputs.texts import TextInputs

INLINE_NUMBERS = 16_384
"""Up to this many numbers are processed on the event loop, in well under a millisecond."""
QUICK_NUMBERS = 4 * INLINE_NUMBERS
"""The same for arrays, if the calibrator has one temperature and no bounds apply: 0.1 ms."""
BYTES_PER_NUMBER = 32
"""Memory that calibration takes for each logit: float64 logits, mapped logits, probabilities and bounds."""
MEMORY_FACTOR = 16
"""Logits and responses under way may take this many times the largest body."""
DIGITS = 20
"""Usual length of a float64 in JSON, with its comma."""
NOTHING = nullcontext()

T = TypeVar("T")


@dataclass(eq=False)
class Pipeline:
    """Answers requests."""

    model: str  # The name that responses contain
    labels: Labels
    decoder: InputDecoder
    batcher: Batcher[CalibrationRequest, Rows]
    scoring: Scoring
    activator: Activator
    telemetry: Telemetry
    # Keeps logits (N, K) for feedback, with the version that answered, and returns an id for each row
    keep: Callable[[int, NDArray[np.float64]], Sequence[str]]
    # Adjusts a calibrator to the class frequencies of recent traffic
    adjusted: Callable[[ServedCalibrator], Awaitable[ServedCalibrator]]
    solver: Solver
    bounds: RequestBounds | None = None  # Of requests that set none

    def __post_init__(self) -> None:
        self.inputs = self.decoder.inputs
        self.memory = Budget("bytes", MEMORY_FACTOR * limits.MAX_BODY_BYTES)

    @property
    def active_version(self) -> int:
        return self.activator.active.current.version

    def check_room(self, options: Options, samples: int = 1) -> None:
        """Refuse a request before its body is read or its samples are made, if they would not be admitted."""
        if self.inputs.kind == "none":
            raise NoModel(self.inputs.refusal(""))
        self.batcher.check_room(samples, time.monotonic() + self._timeout_of(options))

    def memory_for(self, rows: int, options: Options, *, as_json: bool) -> AbstractContextManager[None]:
        """Hold, for a block, the memory that a request is estimated to need until its response is sent."""
        classes = len(self.labels.names)
        numbers = rows * classes
        if numbers <= INLINE_NUMBERS:
            return NOTHING
        response = 8 * numbers
        if as_json:
            listed = min(options.top_k, classes) * (100 + self.labels.longest)
            response = rows * (200 + listed) + DIGITS * numbers * (options.probabilities + options.logits)
        needed = BYTES_PER_NUMBER * numbers + response
        if needed > self.memory.limit:
            raise RequestTooLarge(
                f"{rows:,} samples of {classes} classes need about {needed:,} bytes, of which the "
                f"response has {response:,}; the limit is {self.memory.limit:,}."
            )
        return self.memory.holding(needed)

    async def predict(self, inputs: Inputs, options: Options) -> CalibratedAnswer:
        arrived = time.perf_counter()
        requested = await self._requested(options)
        began, deadline = time.perf_counter(), time.monotonic() + self._timeout_of(options)
        truncated = None
        with self.batcher.reserve_slot(len(inputs), deadline), self.scoring.requested_by(requested.served):
            is_shifted = requested.served.reads == "inputs"
            if not is_shifted and (undecoded := self.decoder.later(inputs)) is not None:
                decoded = time.perf_counter()
                finished = await self.batcher.run(undecoded, requested, deadline)
            else:
                samples = await within(deadline - time.monotonic(), self.decoder.decode(inputs))
                if isinstance(self.inputs, TextInputs):
                    truncated = self.inputs.truncated(samples)
                if is_shifted:
                    samples = await self._in_pool(shifted, samples, requested.served)
                decoded = time.perf_counter()
                try:
                    finished = await self.batcher.run(samples, requested, deadline)
                except BackboneFailed as error:
                    self.decoder.check_magnitude(samples, error)
                    raise
        seconds = {
            "decode": decoded - began + finished.decode,
            "queue": began - arrived + finished.queue,
            "backbone": finished.forward,
            "calibrate": finished.finish,
        }
        return self._answer(
            requested, Rows.join(finished.results), options, arrived, seconds, truncated=truncated
        )

    async def calibrate(
        self,
        read: Callable[[bool], NDArray[np.float64]],
        numbers: int,
        options: Options,
        *,
        is_array: bool = False,
    ) -> CalibratedAnswer:
        """Calibrate logits that another model computed.

        `read`: returns the logits (N, K), checked; the argument says whether to check that they are finite.
        """
        arrived = time.perf_counter()
        requested = await self._requested(options)
        check_reads_logits(requested.served)
        began, quick = time.perf_counter(), is_quick(requested)

        def work() -> tuple[Rows, float]:
            logits = read(not quick)
            decoded = time.perf_counter()
            return calibrate(logits, requested), decoded

        if numbers <= (QUICK_NUMBERS if quick and is_array else INLINE_NUMBERS):
            rows, decoded = work()
        else:
            rows, decoded = await within(self._timeout_of(options), self._in_pool(work))
        seconds = {
            "decode": decoded - began,
            "queue": began - arrived,
            "calibrate": time.perf_counter() - decoded,
        }
        return self._answer(requested, rows, options, arrived, seconds)

    async def write(
        self, answer: CalibratedAnswer, writer: Callable[[CalibratedAnswer], list[bytes]]
    ) -> list[bytes]:
        """Count a response and turn it into bytes, in pieces."""

        def work() -> list[bytes]:
            self.count(answer)
            return writer(answer)

        return await self.computed(answer.rows.probabilities.size, work)

    async def computed(self, numbers: int, work: Callable[[], T]) -> T:
        """Return what `work` does; in the pool if it processes more numbers than the event loop may."""
        return work() if numbers <= INLINE_NUMBERS else await self._in_pool(work)

    def count(self, answer: CalibratedAnswer) -> None:
        """Count a response in the metrics."""
        self.telemetry.stages(answer.seconds)
        hits = answer.bound_hits()
        self.telemetry.answered(answer.rows.largest, *hits, int(np.count_nonzero(answer.rows.relaxed)))

    async def _in_pool(self, work: Callable[..., T], *arguments: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(self.decoder.pool, work, *arguments)

    def _timeout_of(self, options: Options) -> float:
        return limits.TIMEOUT_SECONDS if options.timeout_ms is None else options.timeout_ms / 1e3

    async def _requested(self, options: Options) -> CalibrationRequest:
        if options.bounds is None:
            bounds = self.bounds
        elif _size(options.bounds) <= INLINE_NUMBERS // 16:
            bounds = check_bounds(options.bounds, self.labels)
        else:
            bounds = await self._in_pool(check_bounds, options.bounds, self.labels)
        served = self.activator.active.current
        version = served.version if options.calibrator == "active" else options.calibrator
        if version != served.version:
            served = await within(self._timeout_of(options), self.activator.fetch(version))
        if options.feedback and served.reads != "logits":
            raise InvalidParameter(
                f"The calibrator {served.version} (`{served.method}`) reads {served.reads}; `feedback` needs "
                "one that reads logits."
            )
        if options.prior_adjustment:
            served = await within(self._timeout_of(options), self.adjusted(served))
        requested = CalibrationRequest(served, bounds)
        if self.solver.is_loading and requested.needs_solver:
            # For as long as it takes, unless the request sets a limit.
            await within(None if options.timeout_ms is None else options.timeout_ms / 1e3, self.solver.wait())
        return requested

    def _answer(
        self,
        requested: CalibrationRequest,
        rows: Rows,
        options: Options,
        arrived: float,
        seconds: dict[str, float],
        *,
        truncated: Sequence[bool] | None = None,
    ) -> CalibratedAnswer:
        ids = self.keep(requested.served.version, rows.logits) if options.feedback else None
        seconds["total"] = time.perf_counter() - arrived
        return CalibratedAnswer(
            self.model, self.labels.names, requested.served, rows, options, seconds, ids, truncated
        )


def _size(bounds: BoundsOption) -> int:
    """Count the numbers of bounds as sent."""
    return sum(len(side) for side in (bounds.lower, bounds.upper) if isinstance(side, dict | list))


async def within(seconds: float | None, work: Awaitable[T]) -> T:
    """Wait for work until a timeout, if there is one; what the pool has not begun by then is dropped."""
    try:
        async with asyncio.timeout(seconds):
            return await work
    except TimeoutError:
        raise DeadlineExceeded("The request's timeout passed before its work was done.") from None


@asynccontextmanager
async def open_pipeline(
    settings: Settings,
    backbone: Backbone,
    activator: Activator,
    telemetry: Telemetry,
    *,
    keep: Callable[[int, NDArray[np.float64]], Sequence[str]],
    adjusted: Callable[[ServedCalibrator], Awaitable[ServedCalibrator]],
    solver: Solver,
    name: str,
    bounds: BoundsOption | None = None,
    turns: Turns | None = None,
) -> AsyncIterator[Pipeline]:
    """Start the threads of the predict path, make one prediction to warm up, and stop them at the end."""
    labels = Labels(backbone.labels)
    checked = check_bounds(bounds, labels)
    scoring = Scoring(backbone)
    batcher: Batcher[CalibrationRequest, Rows] = Batcher(
        scoring,
        calibrate_batch,
        batch_sizer=BatchSizer(settings.max_batch_size, limits.BATCH_SECONDS, backbone.passes),
        max_queue_samples=limits.MAX_QUEUE_SAMPLES,
        on_batch=telemetry.batch,
        on_thread=lower_thread_priority,
        turns=turns,
    )
    telemetry.watch_queue(lambda: batcher.held)
    telemetry.watch_device(lambda: batcher.device_seconds)
    is_on_cpu = backbone.device == "cpu"
    # Decoding for a GPU may use every core; on a CPU the passes need them.
    threads = 2 if is_on_cpu else max(2, os.cpu_count() or 1)
    with ThreadPoolExecutor(threads, thread_name_prefix="decode", initializer=lower_thread_priority) as pool:
        decoder = InputDecoder(
            backbone.inputs, pool, threads=threads, max_pixels=limits.MAX_PIXELS, in_lanes=is_on_cpu
        )
        pipeline = Pipeline(
            name, labels, decoder, batcher, scoring, activator, telemetry, keep, adjusted, solver, checked
        )
        try:
            await asyncio.to_thread(warm, backbone, activator.active.current, settings.max_batch_size)
            yield pipeline
        finally:
            await asyncio.to_thread(batcher.close)


def warm(backbone: Backbone, served: ServedCalibrator, max_batch_size: int) -> None:
    """Run once what is slow the first time: the backbone, and the active calibrator."""
    sizes = [1]
    if backbone.device != "cpu":  # a GPU prepares for every new size; batches come in any
        sizes += [2**power for power in range(1, max_batch_size.bit_length())]
    backbone.warm_up(sizes)
    scores = np.zeros((1, backbone.num_classes), np.float32)
    if backbone.inputs.kind != "none":
        scoring = Scoring(backbone)
        with scoring.requested_by(served):
            scores = scoring(backbone.inputs.blank(1), True)
    calibrate(scores.astype(np.float64), CalibrationRequest(served, None))
