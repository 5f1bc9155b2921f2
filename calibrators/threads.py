"""How fits use the processor: a few threads of their own over rows, and none of a library's.

The threads of torch and of BLAS wait for each other in loops that burn the processor. Beside other work that
stalls them for milliseconds at every step, and the small matrices of a fit are never worth it: one descent
over two coordinates took 0.2 s with two BLAS threads and 1 ms with one. Compiled loops that let other threads
run share their rows among plain threads instead.
"""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from typing import Any, TypeVar

Result = TypeVar("Result")
Item = TypeVar("Item")

THREADS = min(4, os.cpu_count() or 1)
SMALL = 100_000
"""Entries of the logits below which a second thread is not worth its start."""
BLOCK = 1 << 16
"""Entries of a block: half a megabyte in float64, which stays in the processor's cache."""


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(THREADS, thread_name_prefix="fit")


def over_rows(work: Callable[[slice], Result], rows: int, *, worth: bool) -> list[Result]:
    """Do the work for all rows, in a slice per thread where that is worth the start of threads."""
    if not worth or THREADS == 1:
        return [work(slice(0, rows))]
    edges = [rows * part // THREADS for part in range(THREADS + 1)]
    return list(_pool().map(work, map(slice, edges, edges[1:])))


def block_rows(num_classes: int) -> int:
    """Return how many rows a block has."""
    return max(1, BLOCK // num_classes)


def blocks(rows: slice, num_classes: int) -> Iterator[slice]:
    """Part the rows of one thread into blocks."""
    step = block_rows(num_classes)
    for begin in range(rows.start, rows.stop, step):
        yield slice(begin, min(begin + step, rows.stop))


def over_blocks(work: Callable[[slice], Result], rows: int, block: int) -> Iterator[Result]:
    """Do the work for blocks of rows in a few threads, and yield the results in the order of the rows."""
    parts = [slice(start, min(start + block, rows)) for start in range(0, rows, block)]
    return in_order(work, parts) if len(parts) > 1 else map(work, parts)


def in_order(work: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
    """Do the work for each item in a few threads, and yield the results in the order of the items.

    The results do not depend on the number of threads, and only a few of them wait at any time. The work must
    not itself wait for these threads.
    """
    if THREADS == 1:
        yield from map(work, items)
        return
    waiting: deque[Future[Result]] = deque()
    try:
        for item in items:
            waiting.append(_pool().submit(work, item))
            if len(waiting) > THREADS:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        for left in waiting:
            left.cancel()


@cache
def _blas(*loaded: bool) -> Any:
    """Control the BLAS libraries that are loaded, of NumPy and of these that bring their own."""
    from threadpoolctl import ThreadpoolController  # noqa: PLC0415 - only fits need it

    return ThreadpoolController().select(user_api="blas")


@contextmanager
def one_library_thread() -> Iterator[None]:
    """Keep torch and BLAS to one thread each, and give them back what they had.

    With more, sums of a library would also differ in the last bit from machine to machine.
    """
    loaded = [name in sys.modules for name in ("scipy.linalg", "torch")]
    torch = sys.modules.get("torch")
    before = torch.get_num_threads() if torch else 0
    if torch:
        torch.set_num_threads(1)
    try:
        with _blas(*loaded).limit(limits=1):
            yield
    finally:
        if torch:
            torch.set_num_threads(before)
