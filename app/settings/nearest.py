"""Which known name an unknown one probably means, for error messages."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that is most like `name`, or None."""
    return next(iter(difflib.get_close_matches(name[:100], list(known)[:10_000], n=1)), None)


def hint(name: str, known: Iterable[str]) -> str:
    """Return `; did you mean '...'?` for the nearest known name, or nothing."""
    close = nearest(name, known)
    return f"; did you mean {close!r}?" if close else ""
