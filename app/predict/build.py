"""Builds the predict path at startup: pool, batcher and pipeline, warmed up before the first request."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager

import numpy as np
from numpy.typing import NDArray

from boxcal.app.observability.telemetry import Telemetry
from boxcal.app.predict.answers import CalibrationRequest, Rows, Scoring, calibrate, calibrate_batch
from boxcal.app.predict.batcher import Batcher
from boxcal.app.predict.device import Turns
from boxcal.app.predict.inputs import InputDecoder
from boxcal.app.predict.lanes import BatchSizer
from boxcal.app.predict.options import BoundsOption, Labels, RequestBounds, check_bounds
from boxcal.app.predict.pipeline import Pipeline
from boxcal.app.registry.activator import Activator, ServedCalibrator
from boxcal.app.settings import limits
from boxcal.app.settings.service import Settings
from boxcal.models.backends.backbone import Backbone

NICENESS = 5


@asynccontextmanager
async def open_pipeline(
    settings: Settings,
    backbone: Backbone,
    activator: Activator,
    telemetry: Telemetry,
    *,
    keep: Callable[[int, NDArray[np.float64]], Sequence[str]],
    adjusted: Callable[[ServedCalibrator], Awaitable[ServedCalibrator]],
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
            name, labels, decoder, batcher, scoring, activator, telemetry, keep, adjusted, checked
        )
        try:
            await asyncio.to_thread(warm, backbone, activator.active.current, settings.max_batch_size)
            yield pipeline
        finally:
            await asyncio.to_thread(batcher.close)


def warm(backbone: Backbone, served: ServedCalibrator, max_batch_size: int) -> None:
    """Run once what is slow the first time: the backbone, and the operator with bounds."""
    sizes = [1]
    if backbone.device != "cpu":  # a GPU prepares for every new size; batches come in any
        sizes += [2**power for power in range(1, max_batch_size.bit_length())]
    backbone.warm_up(sizes)
    num_classes = backbone.num_classes
    bounds = RequestBounds(np.zeros(num_classes), np.full(num_classes, 0.9))
    scores = np.zeros((1, num_classes), np.float32)
    if backbone.inputs.kind != "none":
        scoring = Scoring(backbone)
        with scoring.requested_by(served):
            scores = scoring(backbone.inputs.blank(1), True)
    calibrate(scores.astype(np.float64), CalibrationRequest(served, bounds))


def lower_thread_priority() -> None:
    """Lower the priority of this thread below the event loop's: health checks must be answered under load.

    Linux has a priority for each thread; threads that this one starts (OpenMP's) inherit it.
    """
    if sys.platform == "linux":
        thread = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + NICENESS)
