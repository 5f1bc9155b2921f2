"""A process that runs a fit in the registry, and follows the others: `peer URL NAME`, ended by a line."""

from __future__ import annotations

import sys
import threading

from boxcal.app.http.problems import FitLost
from boxcal.app.registry.records import ActivatePolicy, BackboneIdentity, Decision, FittedCalibrator
from boxcal.app.registry.store import Registry

DIGITS = BackboneIdentity("digits", "ab" * 32, tuple("0123456789"))
FITTED = FittedCalibrator("ts", b"bytes", {"method": "ts"}, {"warnings": []}, b"<svg/>", b"png", 7)
TURN_SECONDS = 1.0


def wait_for_line(told: threading.Event) -> None:
    """Set an event once a line comes."""
    input()
    told.set()


def main(url: str, name: str) -> None:
    """Start a fit, stay alive until a line comes, then record its success and activate it."""
    registry = Registry(url, DIGITS, owner=name)
    fit = registry.fits.start(registry.fits.add(name, "ts", ActivatePolicy.ALWAYS, 7))
    print("started", flush=True)
    told = threading.Event()
    threading.Thread(target=wait_for_line, args=(told,), daemon=True).start()
    interrupted = 0
    while not told.wait(TURN_SECONDS):
        registry.fits.keep_alive()
        registry.glances.look()
        interrupted += registry.fits.interrupt_abandoned(set())
    try:
        registry.record_fit(fit, FITTED, lambda _: Decision(True, "so"))
        print(f"recorded {interrupted}", flush=True)
    except FitLost:
        print(f"lost {interrupted}", flush=True)
    registry.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
