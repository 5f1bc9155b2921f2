"""Owners of fits that are paused, and peers whose clocks are wrong: `fencing [--count 20] [--seconds 90]`.

Paused owners: every fit must be interrupted, none may be recorded or activated by its owner afterwards. Wrong
clocks (libfaketime, half of them ahead and half behind): no fit may be interrupted, all are recorded.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence

import psutil

from benchmarks.scaling.peer import DIGITS
from benchmarks.scaling.servers import postgresql, require
from boxcal.app.registry.store import Registry

Peer = subprocess.Popen[str]


def started(url: str, name: str, *prefix: str) -> Peer:
    """Start a peer."""
    return subprocess.Popen(
        [*prefix, sys.executable, "-m", "benchmarks.scaling.peer", url, name],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def line(peer: Peer) -> str:
    """Read what a peer says next."""
    require(peer.stdout is not None, peer)
    return (peer.stdout.readline() if peer.stdout else "").strip()


def ended(peers: Sequence[Peer]) -> Counter[str]:
    """Tell the peers to record their fits, and count what they say."""
    return Counter(peer.communicate("\n")[0].strip() for peer in peers)


def paused(url: str, count: int, seconds: float) -> Counter[str]:
    """Pause owners while a replica looks after the fits."""
    registry = Registry(url, DIGITS, owner="watcher")
    registry.list()
    peers = [started(url, f"paused-{number}") for number in range(count)]
    require({line(peer) for peer in peers} == {"started"}, "a peer did not start")
    for peer in peers:
        psutil.Process(peer.pid).suspend()
    until, interrupted = time.monotonic() + seconds, 0
    while time.monotonic() < until:
        registry.glances.look()
        interrupted += registry.fits.interrupt_abandoned(set())
        time.sleep(1)
    require(interrupted == count, f"{interrupted} of {count} fits were interrupted")
    for peer in peers:
        psutil.Process(peer.pid).resume()
    found = ended(peers)
    require(registry.activations.active().version == 0, registry.activations.active())
    require([record.version for record in registry.list()] == [0], "a calibrator was recorded")
    registry.close()
    return found


def skewed(url: str, count: int, seconds: float, skew: int) -> Counter[str]:
    """Let owners run with wrong clocks for a while."""
    signs = ["+", "-"]
    peers = [
        started(url, f"skewed-{number}", "faketime", "-f", f"{signs[number % 2]}{skew}s")
        for number in range(count)
    ]
    require({line(peer) for peer in peers} == {"started"}, "a peer did not start")
    time.sleep(seconds)
    return ended(peers)


def main(arguments: Sequence[str]) -> None:
    """Run both, and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scaling fencing", description=__doc__)
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=90.0)
    parser.add_argument("--skew", type=int, default=90)
    options = parser.parse_args(arguments)
    with postgresql() as (server, _):
        found = paused(server.new_database(), options.count, options.seconds)
        print("| owners | times | recorded after it was interrupted | refused | interrupted others |")
        print("| --- | ---: | ---: | ---: | ---: |")
        lost = sum(times for said, times in found.items() if said.startswith("lost"))
        print(f"| paused {options.seconds:.0f} s | {options.count} | {options.count - lost} | {lost} | - |")
        found = skewed(server.new_database(), options.count, options.seconds, options.skew)
        recorded = sum(times for said, times in found.items() if said.startswith("recorded"))
        others = sum(int(said.split()[1]) * times for said, times in found.items())
        print(
            f"| clock ± {options.skew} s for {options.seconds:.0f} s | {options.count} | - | "
            f"{options.count - recorded} | {others} |"
        )
