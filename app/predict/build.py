"""Puts the predict path together at start-up: pool, batcher and pipeline, warmed before the first request."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial

import numpy as np

from boxcal.app.activation.activator import Activator
from boxcal.app.activation.active import ServedCalibrator
from boxcal.app.predict.answers import Rows
from boxcal.app.predict.batch_sizer import BatchSizer
from boxcal.app.predict.batcher import Batcher
from boxcal.app.predict.calibration import CalibrationRequest, calibrate_batch, calibrate_rows
from boxcal.app.predict.inputs import Decoder
from boxcal.app.predict.pipeline import Pipeline
from boxcal.app.predict.request_bounds import Labels, RequestBounds
from boxcal.app.predict.scoring import Scoring
from boxcal.app.settings import Settings
from boxcal.app.telemetry import Telemetry
from boxcal.models.backbone import Backbone
from boxcal.models.decoding import decode

NICENESS = 5


@asynccontextmanager
async def open_pipeline(
    settings: Settings, backbone: Backbone, activator: Activator, telemetry: Telemetry
) -> AsyncIterator[Pipeline]:
    """Start the threads of the predict path, answer once to warm it, and stop them in the end."""
    scoring = Scoring(backbone)
    batcher: Batcher[CalibrationRequest, Rows] = Batcher(
        scoring,
        calibrate_batch,
        batch_sizer=BatchSizer(settings.max_batch_size, settings.latency_target_ms / 1e3, backbone.passes),
        max_queue_samples=settings.max_queue_samples,
        on_batch=telemetry.batch,
        on_thread=lower_thread_priority,
    )
    telemetry.watch_queue(lambda: batcher.held)
    with ThreadPoolExecutor(
        settings.decode_threads, thread_name_prefix="decode", initializer=lower_thread_priority
    ) as pool:
        pipeline = Pipeline(
            model=backbone.name,
            labels=Labels(backbone.labels),
            decoder=decoder_of(backbone, settings.max_pixels),
            activator=activator,
            batcher=batcher,
            scoring=scoring,
            pool=pool,
            telemetry=telemetry,
            timeout_seconds=settings.timeout_ms / 1e3,
        )
        try:
            await asyncio.to_thread(warm, backbone, activator.active.current, settings.max_batch_size)
            yield pipeline
        finally:
            await asyncio.to_thread(batcher.close)


def warm(backbone: Backbone, served: ServedCalibrator, max_batch_size: int) -> None:
    """Run everything once that is slow the first time: the backbone, and the operator with bounds."""
    sizes = [1]
    if backbone.device != "cpu":  # a GPU prepares for every new size; batches come in any
        sizes += [2**power for power in range(1, max_batch_size.bit_length())]
    backbone.warm_up(sizes)
    num_classes = backbone.num_classes
    bounds = RequestBounds(np.zeros(num_classes), np.full(num_classes, 0.9))
    scoring = Scoring(backbone)
    with scoring.requested_by(served):
        scores = scoring(np.zeros((1, *backbone.input_shape), dtype=np.float32), True)
    calibrate_rows(scores, CalibrationRequest(served, bounds))


def lower_thread_priority() -> None:
    """Let the event loop's thread go before this one, which computes: refusals and health must come in time.

    Linux schedules threads one by one, and those that a thread starts (OpenMP's) follow it.
    """
    if sys.platform == "linux":
        thread = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + NICENESS)


def decoder_of(backbone: Backbone, max_pixels: int) -> Decoder:
    """Build the way from what clients send to what the backbone reads."""
    preprocessing = backbone.preprocessing
    if preprocessing is None:
        return Decoder(None, backbone.input_shape)
    return Decoder(partial(decode, preprocessing=preprocessing, max_pixels=max_pixels), backbone.input_shape)
