"""Admits requests, queues their samples for the backbone, and returns the results of each request.

This is the part of the batcher on the event loop; `lanes` has its threads. Every request fails, expires or is
cancelled alone: the batch goes on.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass
from typing import Generic

from boxcal.app.http.problems import BackboneFailed, DeadlineExceeded, NotReady, QueueFull, TooManySamples
from boxcal.app.predict.device import Turns
from boxcal.app.predict.lanes import (
    BatchSizer,
    Context,
    Entry,
    Finished,
    Lanes,
    Outcomes,
    Part,
    Pass,
    PendingImage,
    Result,
    Samples,
    Scores,
)

ADMISSION_SAFETY_FACTOR = 1.4
"""A request is refused at once if this many times the expected wait exceeds its timeout."""


@dataclass(eq=False)
class Batcher(Generic[Context, Result]):
    """The queue in front of the backbone.

    `forward`: the backbone: from samples (N, *shape), and whether no other pass runs, to logits (N, K);
    called in a lane. `finish`: from the logits of a batch and its parts to one result or one error for each
    part; called in a lane, or, while requests wait, in a thread of its own. `on_batch`: called with the size
    of every batch, on the event loop. `on_thread`: called first in every thread. `turns`: of this model on a
    device that several models share; None if it has the device alone.
    """

    forward: Callable[[Samples, bool], Scores]
    finish: Callable[[Scores, Sequence[Part[Context, Result]]], Sequence[Result | Exception]]
    _: KW_ONLY
    batch_sizer: BatchSizer
    max_queue_samples: int
    on_batch: Callable[[int], None] = lambda _: None
    on_thread: Callable[[], None] = lambda: None
    turns: Turns | None = None

    def __post_init__(self) -> None:
        self._open: set[asyncio.Future[Finished[Result]]] = set()
        self._held = 0
        self._loop = loop = asyncio.get_running_loop()
        self._lanes: Lanes[Context, Result] = Lanes(
            self.forward,
            self.finish,
            batch_sizer=self.batch_sizer,
            on_thread=self.on_thread,
            turns=self.turns,
            deliver=lambda *batch: loop.call_soon_threadsafe(self._deliver, *batch),
            on_failure=lambda: loop.call_soon_threadsafe(self._fail_all),
        )
        self.close = self._lanes.close

    @property
    def failure(self) -> BaseException | None:
        """The exception that ended a thread, after which every request is refused; None while all run."""
        return self._lanes.failure

    @property
    def held(self) -> int:
        """Samples of admitted requests: being decoded, waiting or in progress."""
        return self._held

    @property
    def device_seconds(self) -> float:
        """Seconds of all passes that have ended."""
        return self._lanes.device_seconds

    def check_room(self, samples: int, deadline: float = math.inf) -> None:
        """Refuse a request for whose samples there is no room.

        `deadline`: of `time.monotonic`, the deadline of the request.
        """
        if self._lanes.failure is not None:
            raise NotReady("The backbone has failed and the service is stopping; see the server log.")
        limit = self.max_queue_samples
        if samples > limit:
            raise TooManySamples(f"The request holds {samples} samples; the queue takes at most {limit}.")
        wait = self.batch_sizer.wait_for(self._held)
        retry_after = max(1, math.ceil(wait))
        if self._held + samples > limit:
            raise QueueFull(
                f"{self._held} samples are waiting and at most {limit} may; {samples} more do not fit.",
                retry_after=retry_after,
            )
        left = deadline - time.monotonic()
        if left < wait * ADMISSION_SAFETY_FACTOR or left <= 0:
            # A client retries a 503, which is useless if the timeout is too short for an empty queue.
            if left <= self.batch_sizer.wait_for(samples):
                raise DeadlineExceeded("The request's timeout is shorter than its work alone would take.")
            raise QueueFull(
                f"{self._held} samples are waiting, about {wait * 1e3:.0f} ms of work, which is longer than "
                "the request's timeout.",
                retry_after=retry_after,
            )

    @contextmanager
    def reserve_slot(self, samples: int, deadline: float = math.inf) -> Iterator[None]:
        """Hold room for the samples of one request, from before they are decoded until the response.

        Takes and raises what `check_room` does.
        """
        self.check_room(samples, deadline)
        self._held += samples
        try:
            yield
        finally:
            self._held -= samples

    async def run(
        self, samples: Samples | PendingImage, context: Context, deadline: float = math.inf
    ) -> Finished[Result]:
        """Send samples through the backbone, together with those of other requests.

        `samples`: (n, *shape) of one request, or one that a lane decodes; more than a batch takes are split.
        `deadline`: of `time.monotonic`.
        """
        if self._lanes.failure is not None:
            raise NotReady("The backbone has failed and the service is stopping; see the server log.")
        future: asyncio.Future[Finished[Result]] = self._loop.create_future()
        entry: Entry[Context, Result] = Entry(samples, context, deadline, future, time.perf_counter())
        timer = None
        if deadline < math.inf:
            timer = self._loop.call_later(deadline - time.monotonic(), _expire, future)
        self._open.add(future)
        self._lanes.put(entry)
        try:
            return await future
        finally:
            self._open.discard(future)
            if timer is not None:
                timer.cancel()

    def _fail_all(self) -> None:
        for future in list(self._open):
            if not future.done():
                future.set_exception(BackboneFailed("The backbone has failed; see the server log."))

    def _deliver(
        self,
        passed: Pass[Context, Result],
        outcomes: Outcomes[Context, Result],
        finish_seconds: float,
    ) -> None:
        if passed.size:
            self.on_batch(passed.size)
        for part, outcome in outcomes:
            entry = part.entry
            if entry.future.done():
                continue
            if isinstance(outcome, Exception):
                entry.future.set_exception(outcome)
                continue
            if not entry.parts:
                entry.stages[1] = passed.began - entry.entered - entry.stages[0]
            entry.stages[2] += passed.seconds
            entry.stages[3] += finish_seconds
            entry.parts.append((part.offset, part.stop - part.start, outcome))
            if sum(count for _, count, _ in entry.parts) == len(entry.samples):
                entry.parts.sort(key=lambda p: p[0])
                entry.future.set_result(Finished([p[2] for p in entry.parts], *entry.stages))


def _expire(future: asyncio.Future[Finished[Result]]) -> None:
    if not future.done():
        future.set_exception(DeadlineExceeded("The request's timeout passed before its work was done."))
