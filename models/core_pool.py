"""Passes that run side by side, each on one thread: how every core of a CPU serves one backbone.

One forward pass spread over all cores waits at a barrier after every layer, which costs a third of the
throughput beside a busy server and now and then stalls for tens of milliseconds. Passes of one thread never
wait for each other. Only a lone sample is better off with all cores.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import torch


class ThreadPerCorePool:
    """Threads, one for each core, on which torch and onnxruntime compute with one thread alone.

    Parameters
    ----------
    cores
        How many; by default every core this process may use.
    """

    def __init__(self, cores: int | None = None) -> None:
        self.cores = cores or usable_cores()
        self._pool = ThreadPoolExecutor(self.cores, thread_name_prefix="piece")
        threads = torch.get_num_threads()
        everyone = Barrier(self.cores)
        list(self._pool.map(lambda _: self._alone(everyone), range(self.cores)))
        torch.set_num_threads(threads)

    @staticmethod
    def _alone(everyone: Barrier) -> None:
        """Fix this thread's number at one; asking for it makes torch remember it for good."""
        everyone.wait()
        torch.set_num_threads(1)
        torch.get_num_threads()
        everyone.wait()

    def run(
        self,
        forward: Callable[[torch.Tensor], torch.Tensor],
        batch: torch.Tensor,
        smallest: int = 1,
        largest: int | None = None,
    ) -> torch.Tensor:
        """Run `forward` on a batch (N, ...) in one piece a core, within these sizes, and join the results."""
        size = max(smallest, -(-len(batch) // self.cores))
        return torch.cat(list(self._pool.map(forward, torch.split(batch, min(size, largest or size)))))

    def on_one(self, forward: Callable[[torch.Tensor], torch.Tensor], batch: torch.Tensor) -> torch.Tensor:
        """Run `forward` on a whole batch, on one of the threads."""
        return self._pool.submit(forward, batch).result()


def padded(batch: torch.Tensor, smallest: int) -> torch.Tensor:
    """Repeat the last sample until there are `smallest`."""
    short = smallest - len(batch)
    return batch if short <= 0 else torch.cat([batch, batch[-1:].expand(short, *batch.shape[1:])])


def usable_cores() -> int:
    """Cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
