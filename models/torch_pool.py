"""A pool of one thread per core on which torch computes with one thread each."""

from __future__ import annotations

from collections.abc import Callable
from threading import Barrier
from typing import TypeVar

import torch

from boxcal.models.core_pool import CorePool

T = TypeVar("T")


class ThreadPerCorePool(CorePool[torch.Tensor]):
    """Threads on which torch computes with one thread each.

    Parameters
    ----------
    cores
        Number of threads; by default every core this process may use.
    """

    def __init__(self, cores: int | None = None) -> None:
        super().__init__(lambda pieces: torch.cat(list(pieces)), cores)
        threads = torch.get_num_threads()
        barrier = Barrier(self.cores)

        def limit(_: int) -> None:
            barrier.wait()  # so that each thread of the pool runs this once
            torch.set_num_threads(1)
            torch.get_num_threads()  # torch fixes the number of this thread when it is asked for
            barrier.wait()

        list(self._pool.map(limit, range(self.cores)))
        torch.set_num_threads(threads)

    def on_one(self, forward: Callable[[T], torch.Tensor], batch: T) -> torch.Tensor:
        """Run a whole batch on one of the threads."""
        return self._pool.submit(forward, batch).result()


def padded(batch: torch.Tensor, smallest: int) -> torch.Tensor:
    """Repeat the last sample until there are `smallest`."""
    missing = smallest - len(batch)
    return batch if missing <= 0 else torch.cat([batch, batch[-1:].expand(missing, *batch.shape[1:])])
