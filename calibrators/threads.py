"""How fits use the processor: a few threads of their own over rows, and none of a library's.

The threads of torch and of BLAS wait for each other in loops that burn the processor. Beside other work that
stalls them for milliseconds at every step, and the small matrices of a fit are never worth it: one descent
over two coordinates took 0.2 s with two BLAS threads and 1 ms with one. Compiled loops that let other threads
run share their rows among plain threads instead.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from typing import Any, TypeVar

import torch

Result = TypeVar("Result")

THREADS = min(4, os.cpu_count() or 1)
SMALL = 100_000
"""Entries of the logits below which a second thread is not worth its start."""


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(THREADS, thread_name_prefix="fit")


def over_rows(work: Callable[[slice], Result], rows: int, *, worth: bool) -> list[Result]:
    """Do the work for all rows, in a slice per thread where that is worth the start of threads."""
    if not worth or THREADS == 1:
        return [work(slice(0, rows))]
    edges = [rows * part // THREADS for part in range(THREADS + 1)]
    return list(_pool().map(work, map(slice, edges, edges[1:])))


@cache
def _blas() -> Any:
    """Control the BLAS libraries that are loaded; fits load theirs before they ask."""
    from threadpoolctl import ThreadpoolController  # noqa: PLC0415 - only fits need it

    return ThreadpoolController().select(user_api="blas")


@contextmanager
def one_library_thread() -> Iterator[None]:
    """Keep torch and BLAS to one thread each, and give them back what they had."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with _blas().limit(limits=1):
            yield
    finally:
        torch.set_num_threads(before)
