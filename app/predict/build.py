"""Builds the predict path at startup: pool, batcher and pipeline, warmed up before the first request."""

from __future__ import annotations

import asyncio
import os
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
from boxcal.app.predict.options import BoundsOption, Labels, check_bounds
from boxcal.app.predict.pipeline import Pipeline
from boxcal.app.predict.solver import Solver, lower_thread_priority
from boxcal.app.registry.activator import Activator, ServedCalibrator
from boxcal.app.settings import limits
from boxcal.app.settings.service import Settings
from boxcal.models.backends.backbone import Backbone


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
