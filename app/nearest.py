"""Which known name an unknown one probably means, for error messages."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def hint(name: str, known: Iterable[str]) -> str:
    """Return `; did you mean '...'?` for the nearest known name, or nothing."""
    close = difflib.get_close_matches(name[:100], list(known)[:10_000], n=1)
    return f"; did you mean {close[0]!r}?" if close else ""
