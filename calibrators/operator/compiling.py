"""How the CPU engine's loops are compiled: once per machine, kept on disk where a folder can be written."""

from collections.abc import Callable
from typing import Any, TypeVar

from numba import njit

Function = TypeVar("Function", bound=Callable[..., Any])


def compiled(function: Function) -> Function:
    """Compile an entry into the loops: it lets other threads run, and is loaded from disk the next time.

    numba keeps it beside the source, in NUMBA_CACHE_DIR or in the user's cache folder; where none can be
    written, each process compiles for itself.
    """
    compile_it: Callable[..., Any] = njit
    try:
        entry: Function = compile_it(function, cache=True, nogil=True, error_model="numpy")
    except RuntimeError:
        entry = compile_it(function, nogil=True, error_model="numpy")
    return entry
