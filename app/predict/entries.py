"""What passes through the batcher: the samples of a request, their parts in batches, what they became."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

Context = TypeVar("Context")
Result = TypeVar("Result")
Samples = NDArray[np.float32]


@dataclass(eq=False, slots=True)
class Entry(Generic[Context, Result]):
    """The samples of one request while they are waiting or in work.

    Whether it is still wanted is said by its future alone: that of a request which failed, expired or was
    cancelled is done.
    """

    samples: Samples
    context: Context
    deadline: float
    future: asyncio.Future[Finished[Result]]
    entered: float
    taken: int = 0
    parts: list[tuple[int, int, Result]] = field(default_factory=list)
    stages: list[float] = field(default_factory=lambda: [0.0, 0.0, 0.0])


@dataclass(frozen=True, slots=True)
class Part(Generic[Context, Result]):
    """Some samples of one request, which went into the same batch: rows `start` to `stop` of that batch."""

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
    """What came out of the backbone for one batch.

    Attributes
    ----------
    size
        Samples of the batch.
    began, seconds
        When it entered the backbone, by `time.perf_counter`, and how long it was there.
    logits
        Of the samples of `scored`.
    scored, failed
        The parts that are to be finished, and those that the backbone could not take, each with its error.
    """

    size: int
    began: float
    seconds: float
    logits: Tensor
    scored: Sequence[Part[Context, Result]]
    failed: Sequence[tuple[Part[Context, Result], Exception]]


@dataclass(frozen=True, slots=True)
class Finished(Generic[Result]):
    """What became of one request.

    Attributes
    ----------
    results
        One for each batch that held some of its samples, in the order of the samples.
    queue, forward, finish
        Seconds waited, in the backbone, and in what follows it.
    """

    results: list[Result]
    queue: float
    forward: float
    finish: float
