"""Lets the event loop run between the pieces of long work in another thread.

Python asks a thread for the interpreter only after another has waited for a whole switch interval. Each time
the thread releases it by itself, as numpy and compiled loops do, that wait begins again, and the thread takes
the interpreter back before any other wakes. So even work in small pieces can stop the event loop for 50 ms.
"""

from __future__ import annotations

import time

PAUSE_SECONDS = 1e-5
"""Linux adds some 50 microseconds; pieces take about a millisecond."""


def release_interpreter() -> None:
    """Release the interpreter for long enough that a thread that waits for it gets it."""
    time.sleep(PAUSE_SECONDS)
