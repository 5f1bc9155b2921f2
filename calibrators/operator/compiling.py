"""How the CPU engine's loops are compiled: once per machine, kept on disk where a folder can be written."""

import hashlib
import inspect
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from numba import njit

Function = TypeVar("Function", bound=Callable[..., Any])


def compiled(function: Function) -> Function:
    """Compile an entry into the loops: it lets other threads run, and is loaded from disk the next time.

    numba keeps it beside the source, in NUMBA_CACHE_DIR or in the user's cache folder; where none can be
    written, each process compiles for itself. It is compiled anew when any file of its folder has changed:
    numba by itself looks at the entry's own file, not at those of the functions that it calls.
    """
    compile_it: Callable[..., Any] = njit
    try:
        entry: Any = compile_it(function, cache=True, nogil=True, error_model="numpy")
    except RuntimeError:
        entry = compile_it(function, nogil=True, error_model="numpy")
    else:
        kept = entry._cache._cache_file
        kept._source_stamp = kept._source_stamp, _sources(Path(inspect.getfile(function)).parent)
    found: Function = entry
    return found


@cache
def _sources(folder: Path) -> str:
    """Hash what stands in a folder's modules."""
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()
