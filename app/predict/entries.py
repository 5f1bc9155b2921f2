"""What goes from the batcher through the lanes and back: samples, cut into batches, and results."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

Context = TypeVar("Context")
Result = TypeVar("Result")
Samples = NDArray[np.float32]
Scores = NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class PendingImage:
    """One sample that a lane decodes just before its pass: a change of thread less."""

    decode: Callable[[], Samples]  # Returns it as (1, *shape), or raises what is wrong with it

    def __len__(self) -> int:
        return 1


@dataclass(frozen=True, slots=True)
class Finished(Generic[Result]):
    """The results of one request, one for each batch that held some of its samples, in their order."""

    results: list[Result]
    decode: float  # Seconds of decoding in a lane, of waiting, in the backbone, and in what follows it
    queue: float
    forward: float
    finish: float


@dataclass(eq=False, slots=True)
class Entry(Generic[Context, Result]):
    """The samples of one request, waiting or in progress.

    The future is done if the request has failed, expired or been cancelled; its samples are then skipped.
    """

    samples: Samples | PendingImage
    context: Context
    deadline: float
    future: asyncio.Future[Finished[Result]]
    entered: float
    taken: int = 0
    parts: list[tuple[int, int, Result]] = field(default_factory=list)
    stages: list[float] = field(default_factory=lambda: [0.0, 0.0, 0.0, 0.0])


@dataclass(frozen=True, slots=True)
class Part(Generic[Context, Result]):
    """Samples of one request in one batch: rows `start` to `stop` of that batch."""

    entry: Entry[Context, Result]
    offset: int
    start: int
    stop: int

    @property
    def context(self) -> Context:
        """What the request asked for."""
        return self.entry.context


@dataclass(frozen=True, slots=True, eq=False)
class Pass(Generic[Context, Result]):
    """The output of the backbone for one batch."""

    size: int  # Samples of the batch
    began: float  # When it entered the backbone, by `time.perf_counter`, and for how long
    seconds: float
    logits: Scores  # Of the samples of `scored`
    # The parts to finish, and those that the backbone failed on, each with its error
    scored: Sequence[Part[Context, Result]]
    failed: Sequence[tuple[Part[Context, Result], Exception]]


Outcomes = Sequence[tuple[Part[Context, Result], Result | Exception]]


def decoded(
    parts: list[Part[Context, Result]],
) -> tuple[list[Part[Context, Result]], list[tuple[Part[Context, Result], Exception]]]:
    """Decode what is not decoded yet; returns the parts to score, and those that cannot be read."""
    if not any(isinstance(part.entry.samples, PendingImage) for part in parts):
        return parts, []
    readable: list[Part[Context, Result]] = []
    unreadable: list[tuple[Part[Context, Result], Exception]] = []
    stop = 0
    for part in parts:
        entry, began = part.entry, time.perf_counter()
        if entry.future.done():
            continue
        try:
            if isinstance(entry.samples, PendingImage):
                entry.samples = entry.samples.decode()
                entry.stages[0] = time.perf_counter() - began
        except Exception as error:
            unreadable.append((part, error))
            continue
        start, stop = stop, stop + part.stop - part.start
        readable.append(replace(part, start=start, stop=stop))
    return readable, unreadable
