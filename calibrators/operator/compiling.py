"""How the CPU engine's loops are compiled: once per machine, kept on disk where a folder can be written."""

import hashlib
import inspect
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Collection
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from numba import njit, typeof
from numba.core import event
from numba.core.caching import NullCache

Function = TypeVar("Function", bound=Callable[..., Any])
logger = logging.getLogger("boxcal.compiling")


class Notice(event.Listener):
    """Says once in a process why it waits, when a loop is compiled that could not be loaded from disk."""

    said = False

    def on_start(self, started: Any) -> None:
        if self.said or not started.data["dispatcher"].py_func.__module__.startswith("boxcal."):
            return
        self.said = True
        logger.warning(
            "boxcal: compiling loops for this processor, which takes up to half a minute, once; "
            "'python -m boxcal.calibrators.warm' compiles all before"
        )

    def on_end(self, ended: Any) -> None:
        """Say nothing."""


event.register("numba:compile", Notice())  # type: ignore[no-untyped-call]


def unpack(image: Path, kept: Path) -> None:
    """Copy the loops that a container image holds to where numba keeps them, if that folder does not exist.

    The folder is on a volume, and one that was mounted empty hides what the image has there. What cannot be
    copied is compiled.
    """
    if kept.exists() or not image.is_dir():
        return
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=kept.parent, ignore_cleanup_errors=True) as folder:
            # Renamed as a whole: another process that starts now sees all of it or nothing.
            shutil.copytree(image, Path(folder) / "loops").rename(kept)
    except OSError:
        return


if {"COMPILED_LOOPS_DIR", "NUMBA_CACHE_DIR"} <= os.environ.keys():
    unpack(Path(os.environ["COMPILED_LOOPS_DIR"]), Path(os.environ["NUMBA_CACHE_DIR"]))


def inner(
    *, fastmath: Collection[str] = (), makes_arrays: bool = False, inlined: bool = True
) -> Callable[[Function], Function]:
    """Compile a loop that other loops call; inlined, where a call would cost as much as a short row.

    Unless it makes arrays, it only borrows its caller's: numba then counts no references to their rows, which
    would cost more than that.
    """
    options: dict[str, Any] = {"error_model": "numpy", "fastmath": set(fastmath), "_nrt": makes_arrays}
    compile_it: Callable[[Function], Function] = njit(forceinline=inlined, **options)
    return compile_it


def compiled(function: Function, *, fastmath: Collection[str] = ()) -> Function:
    """Compile an entry into the loops: it lets other threads run, and is loaded from disk the next time.

    numba keeps it beside the source, in NUMBA_CACHE_DIR or in the user's cache folder; where none can be
    written, each process compiles for itself. It is compiled anew when any file of its folder or of this one
    has changed: numba by itself looks at the entry's own file, not at those of the functions that it calls.
    """
    options: dict[str, Any] = {"nogil": True, "error_model": "numpy", "fastmath": set(fastmath)}
    try:
        entry: Any = njit(function, cache=True, **options)
    except RuntimeError:
        entry = njit(function, **options)
    else:
        kept = entry._cache._cache_file
        folders = Path(inspect.getfile(function)).parent, Path(__file__).parent
        kept._source_stamp = kept._source_stamp, *map(_sources, folders)
    found: Function = entry
    return found


def can_be_kept(entry: Any) -> bool:
    """Whether there is a folder where an entry can be kept on disk."""
    return not isinstance(entry._cache, NullCache)


def is_kept(entry: Any, *arguments: object) -> bool:
    """Whether an entry was compiled before for such arguments, on this processor, and can be loaded."""
    return entry._cache.load_overload(tuple(map(typeof, arguments)), entry.targetctx) is not None


@cache
def _sources(folder: Path) -> str:
    """Hash what stands in a folder's modules."""
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()
