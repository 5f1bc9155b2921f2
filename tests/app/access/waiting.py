"""Waits for what a service does within seconds."""

from __future__ import annotations

import time
from collections.abc import Callable

SECONDS = 30.0


def until(is_so: Callable[[], bool]) -> None:
    """Return when it is so; fail after `SECONDS`."""
    end = time.monotonic() + SECONDS
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.05)
