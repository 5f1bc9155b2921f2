"""Groups the samples of concurrent requests into batches for the backbone and hands each request its own.

A request enters with `run`, on the event loop. Threads ("lanes"), one for each pass that the backbone bears
side by side, take what waits, in order, and leave their share to lanes that are free. While requests wait, a
lane goes on to the next batch at once and so keeps its core, and another thread finishes what came out of
the pass. Every request fails, expires or is cancelled alone: the batch goes on.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from queue import Queue
from typing import Generic

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from boxcal.app.errors import DeadlineExceeded, InternalError, QueueFull, TooManySamples
from boxcal.app.predict.batch_sizer import BatchSizer
from boxcal.app.predict.entries import Context, Entry, Finished, Part, Pass, Result, Samples

logger = logging.getLogger("boxcal")

ADMISSION_SAFETY_FACTOR = 1.4
"""How much longer than expected a wait may turn out; who would then come too late is refused at once."""


class Batcher(Generic[Context, Result]):
    """The queue in front of the backbone.

    Parameters
    ----------
    forward
        The backbone: from samples (N, *shape), and whether this pass has it to itself, to logits (N, K);
        called from a lane.
    finish
        From the logits of a batch and its parts to one result or one error for each part; called from a
        lane, or, while requests wait, from a thread of its own.
    batch_sizer
        Says how many passes run side by side, how large batches are and how long to gather them.
    max_queue_samples
        Samples of all requests that may be here at once.
    on_batch
        Told the size of every batch, on the event loop.
    on_thread
        Called first in every lane and in the thread that finishes.
    """

    def __init__(
        self,
        forward: Callable[[Samples, bool], Tensor],
        finish: Callable[[Tensor, Sequence[Part[Context, Result]]], Sequence[Result | Exception]],
        *,
        batch_sizer: BatchSizer,
        max_queue_samples: int,
        on_batch: Callable[[int], None] = lambda _: None,
        on_thread: Callable[[], None] = lambda: None,
    ) -> None:
        self._forward = forward
        self._finish = finish
        self._batch_sizer = batch_sizer
        self._max_queue_samples = max_queue_samples
        self._on_batch = on_batch
        self._on_thread = on_thread
        self._loop = asyncio.get_running_loop()
        self._queue: deque[Entry[Context, Result]] = deque()
        self._waiting = 0
        self._held = 0
        self._closing = False
        self._changed = threading.Condition()
        self._passes = batch_sizer.passes
        self._running = 0
        # Lanes further ahead than this wait, so that `batch_sizer` learns the rate of the slower side.
        self._finishing: Queue[Pass[Context, Result] | None] = Queue(maxsize=batch_sizer.passes)
        self._last = 0
        self._throughput_since: float | None = None
        self._lanes = [
            threading.Thread(target=self._drive, name=f"backbone-{lane}", daemon=True)
            for lane in range(batch_sizer.passes)
        ]
        self._finisher = threading.Thread(target=self._finish_passes, name="finisher", daemon=True)
        for thread in (*self._lanes, self._finisher):
            thread.start()

    @property
    def held(self) -> int:
        """Samples of requests that have a place: being decoded, waiting or in work."""
        return self._held

    def check_room(self, samples: int, deadline: float = math.inf) -> None:
        """Refuse a request for whose samples there is no room.

        Parameters
        ----------
        samples
            How many there are.
        deadline
            Of `time.monotonic`, the deadline of the request.

        Raises
        ------
        TooManySamples
            They would not fit into an empty queue.
        QueueFull
            They do not fit now, or would only be reached after the deadline.
        DeadlineExceeded
            The deadline has passed, or leaves no time for the work even if nobody else were here.
        """
        limit = self._max_queue_samples
        if samples > limit:
            raise TooManySamples(f"The request holds {samples} samples; the queue takes at most {limit}.")
        wait = self._batch_sizer.wait_for(self._held)
        retry_after = max(1, math.ceil(wait))
        if self._held + samples > limit:
            raise QueueFull(
                f"{self._held} samples are waiting and at most {limit} may; {samples} more do not fit.",
                retry_after=retry_after,
            )
        left = deadline - time.monotonic()
        if left < wait * ADMISSION_SAFETY_FACTOR or left <= 0:
            # A client repeats what a full queue refused, which is no use where the queue is not to blame.
            if left <= self._batch_sizer.wait_for(samples):
                raise DeadlineExceeded("The request's timeout is shorter than its work alone would take.")
            raise QueueFull(
                f"{self._held} samples are waiting, about {wait * 1e3:.0f} ms of work, which is longer than "
                "the request's timeout.",
                retry_after=retry_after,
            )

    @contextmanager
    def reserve_slot(self, samples: int, deadline: float = math.inf) -> Iterator[None]:
        """Hold room for the samples of one request, from before they are decoded until it is answered.

        Takes and raises what `check_room` does.
        """
        self.check_room(samples, deadline)
        self._held += samples
        try:
            yield
        finally:
            self._held -= samples

    async def run(self, samples: Samples, context: Context, deadline: float = math.inf) -> Finished[Result]:
        """Send samples through the backbone, together with those of other requests.

        Parameters
        ----------
        samples
            (n, *shape) of one request; more than a batch takes are split.
        context
            Given to `finish` with these samples.
        deadline
            Of `time.monotonic`.

        Raises
        ------
        DeadlineExceeded
            The deadline came first; samples not yet in the backbone will not go there.
        BoxcalError
            What `forward` or `finish` raised for these samples.
        """
        entry: Entry[Context, Result] = Entry(
            samples, context, deadline, self._loop.create_future(), time.perf_counter()
        )
        timer = None
        if deadline < math.inf:
            timer = self._loop.call_later(deadline - time.monotonic(), _expire, entry.future)
        with self._changed:
            self._queue.append(entry)
            self._waiting += len(samples)
            self._changed.notify()
        try:
            return await entry.future
        finally:
            if timer is not None:
                timer.cancel()

    def close(self) -> None:
        """Finish what waits, then stop the threads."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        for lane in self._lanes:
            lane.join()
        self._finishing.put(None)
        self._finisher.join()

    # -- the lanes -------------------------------------------------------------------------------------------

    def _drive(self) -> None:
        self._on_thread()
        while True:
            parts, alone = self._next()
            if not parts:
                return
            began = time.perf_counter()
            logits, scored, failed = self._score(parts, alone)
            seconds = time.perf_counter() - began
            with self._changed:
                self._running -= 1
            passed = Pass(parts[-1].stop, began, seconds, logits, scored, failed)
            if self._queue:
                self._finishing.put(passed)
            else:  # a change of threads would only delay the answer
                self._finish_pass(passed)
            del parts, logits, scored, failed, passed

    def _next(self) -> tuple[list[Part[Context, Result]], bool]:
        """Wait for work and take a batch of it, and say whether its pass is alone in the backbone.

        An empty batch means that the batcher is closing.
        """
        with self._changed:
            self._note_throughput()
            while True:
                asleep = time.perf_counter()
                while not self._queue and not self._closing:
                    self._throughput_since = None
                    self._changed.wait()
                if not self._queue:
                    return [], False
                if self._passes == 1:
                    self._gather(time.perf_counter() - asleep)
                share = math.ceil(self._waiting / (self._passes - self._running))
                if parts := self._take(self._batch_sizer.size_of(share)):
                    self._last = parts[-1].stop
                    self._running += 1
                    if self._queue:
                        self._changed.notify()
                    return parts, self._running == 1 and (self._passes == 1 or not self._queue)

    def _note_throughput(self) -> None:
        """Learn the rate at which the whole service works while there is always something waiting."""
        now = time.perf_counter()
        if self._last and self._throughput_since is not None:
            self._batch_sizer.observe_throughput(self._last, now - self._throughput_since)
        self._throughput_since = now if self._queue else None

    def _gather(self, idle: float) -> None:
        until = time.perf_counter() + self._batch_sizer.gather_seconds(self._waiting, self._last, idle)
        while self._waiting < min(self._last, self._batch_sizer.batch_size) and not self._closing:
            left = until - time.perf_counter()
            if left <= 0:
                return
            self._changed.wait(left)

    def _take(self, size: int) -> list[Part[Context, Result]]:
        parts: list[Part[Context, Result]] = []
        filled = 0
        again: list[Entry[Context, Result]] = []
        while self._queue and filled < size:
            entry = self._queue.popleft()
            left = len(entry.samples) - entry.taken
            if entry.future.done() or time.monotonic() >= entry.deadline:
                self._waiting -= left
                continue
            count = min(left, size - filled)
            parts.append(Part(entry, entry.taken, filled, filled + count))
            entry.taken += count
            filled += count
            self._waiting -= count
            if count < left:
                again.append(entry)
        # What is left of a large request goes behind those that wait, so it cannot keep them waiting long.
        self._queue.extend(again)
        return parts

    def _score(
        self, parts: list[Part[Context, Result]], alone: bool
    ) -> tuple[Tensor, list[Part[Context, Result]], list[tuple[Part[Context, Result], Exception]]]:
        """Run the backbone; parts whose samples it cannot take fail without the others."""
        pieces = [p.entry.samples[p.offset : p.offset + p.stop - p.start] for p in parts]
        runs = self._runs(pieces[0] if len(pieces) == 1 else np.concatenate(pieces), alone)
        if len(runs) == 1 and isinstance(runs[0], Tensor):
            return runs[0], parts, []
        scored: list[Part[Context, Result]] = []
        failed: list[tuple[Part[Context, Result], Exception]] = []
        logits: list[Tensor] = []
        rows: list[Tensor | Exception] = []
        for run in runs:
            rows.extend(run if isinstance(run, Tensor) else [run])
        for part in parts:
            outcomes = rows[part.start : part.stop]
            error = next((row for row in outcomes if isinstance(row, Exception)), None)
            if error is not None:
                failed.append((part, error))
                continue
            scored.append(replace(part, start=len(logits), stop=len(logits) + len(outcomes)))
            logits.extend(row for row in outcomes if isinstance(row, Tensor))
        # Runs may differ in width where features came to be wanted in between; what is missing, nobody reads.
        rows_left = pad_sequence(logits, batch_first=True) if logits else torch.empty(0)
        return rows_left, scored, failed

    def _runs(self, samples: Samples, alone: bool) -> list[Tensor | Exception]:
        """Score rows in runs, with an error for a row that fails: a batch that fails is tried by halves."""
        began = time.perf_counter()
        try:
            logits = self._forward(samples, alone)
        except Exception as error:
            if _is_out_of_memory(error):
                with self._changed:
                    self._batch_sizer.ran_out_of_memory(len(samples))
                logger.warning("out of memory with a batch of %d samples", len(samples))
            if len(samples) == 1:
                logger.exception("the backbone failed on a sample")
                return [InternalError("The backbone failed on this input; see the server log.")]
        else:
            if self._passes == 1 or not alone:  # what a pass costs that has more than its share is no measure
                with self._changed:
                    self._batch_sizer.measured(len(samples), time.perf_counter() - began)
            return [logits]
        half = len(samples) // 2
        return [*self._runs(samples[:half], alone), *self._runs(samples[half:], alone)]

    # -- behind the lanes ------------------------------------------------------------------------------------

    def _finish_passes(self) -> None:
        self._on_thread()
        while (passed := self._finishing.get()) is not None:
            self._finish_pass(passed)
            del passed  # nothing of a batch outlives it while the thread waits

    def _finish_pass(self, passed: Pass[Context, Result]) -> None:
        began = time.perf_counter()
        results: Sequence[Result | Exception] = []
        try:
            results = self._finish(passed.logits, passed.scored) if passed.scored else []
        except Exception as error:
            logger.exception("a batch of %d samples could not be finished", passed.size)
            results = [error] * len(passed.scored)
        outcomes = [*zip(passed.scored, results, strict=True), *passed.failed]
        seconds = time.perf_counter() - began
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self._loop.call_soon_threadsafe(self._deliver, passed, outcomes, seconds)

    # -- back on the event loop ------------------------------------------------------------------------------

    def _deliver(
        self,
        passed: Pass[Context, Result],
        outcomes: Sequence[tuple[Part[Context, Result], Result | Exception]],
        finish_seconds: float,
    ) -> None:
        self._on_batch(passed.size)
        for part, outcome in outcomes:
            entry = part.entry
            if entry.future.done():
                continue
            if isinstance(outcome, Exception):
                entry.future.set_exception(outcome)
                continue
            if not entry.parts:
                entry.stages[0] = passed.began - entry.entered
            entry.stages[1] += passed.seconds
            entry.stages[2] += finish_seconds
            entry.parts.append((part.offset, part.stop - part.start, outcome))
            if sum(count for _, count, _ in entry.parts) == len(entry.samples):
                entry.parts.sort(key=lambda p: p[0])
                entry.future.set_result(Finished([p[2] for p in entry.parts], *entry.stages))


def _expire(future: asyncio.Future[Finished[Result]]) -> None:
    if not future.done():
        future.set_exception(DeadlineExceeded("The request's timeout passed before its work was done."))


def _is_out_of_memory(error: Exception) -> bool:
    """Whether a device has no memory left; torch has an error for it, onnxruntime only words."""
    return type(error).__name__ == "OutOfMemoryError" or "Failed to allocate memory" in str(error)
