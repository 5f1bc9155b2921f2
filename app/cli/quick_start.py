"""What a process that serves does before its other imports: memory allocation, and a start without SciPy."""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys

TUNABLES = "GLIBC_TUNABLES"
LARGEST_KEPT = 32 * 2**20
"""Bytes from which a block is returned to the system as soon as it is freed."""
SETTINGS = (
    f"glibc.malloc.arena_max=1:glibc.malloc.mmap_threshold={LARGEST_KEPT}"
    f":glibc.malloc.trim_threshold={2 * LARGEST_KEPT}"
)
NOTICE = (
    "boxcal: compiling the solver for this processor in the background, which takes some 20 seconds of the "
    "first start, and then what fits call, which takes a minute or two; a request with bounds waits for the "
    "solver; 'python -m boxcal.calibrators.warm' compiles all before"
)


def set_up_allocator() -> None:
    """Start this process anew with these settings of glibc.

    With an arena for each thread, the free end of each would stay with the process, up to 64 MiB;
    `malloc_trim` returns only that of the first. By default glibc starts with small thresholds and raises
    them, up to those set here, as larger blocks are freed. Until then the arrays of each request get fresh
    pages, which the system clears, and return them.

    glibc reads its tunables when a process starts, and at no later time. Tunables that are set already stay,
    and the process keeps its id.
    """
    if sys.platform == "linux" and TUNABLES not in os.environ:
        os.environ[TUNABLES] = SETTINGS
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])  # noqa: S606 - this very command


def hold_hangup() -> None:
    """Hold back SIGHUP until the process can answer it: it replaces the processes of a service with several.

    Before, it would end the service. What arrives meanwhile takes effect at its release.
    """
    if sys.platform != "win32":
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})


def release_hangup() -> None:
    if sys.platform != "win32":
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})


def prepare() -> None:
    """Stop garbage collection until the service is ready, and load the compiled engine without SciPy.

    Imports leave no garbage, but make collections look at all that they leave. numba imports SciPy's linear
    algebra, which the engine never calls. On a first start a second compiles what answers without bounds
    need; the solver is for `predict/solver.py`.
    """
    gc.disable()
    hidden = sys.modules.setdefault("scipy", None) is None  # type: ignore[arg-type]
    try:
        # Not imported before this.
        from boxcal.calibrators.temperature_fast_path import (  # noqa: PLC0415
            solver_is_kept,
            warm_arrays,
            warm_softmax,
        )

        if solver_is_kept():
            warm_arrays()
        else:
            sys.stderr.write(NOTICE + "\n")
            logging.getLogger("boxcal.compiling").setLevel(logging.ERROR)  # it would say the same
            warm_softmax()
    finally:
        if hidden:
            del sys.modules["scipy"]
