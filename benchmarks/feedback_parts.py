"""What keeping a prediction for feedback is made of: `python -m benchmarks.feedback_parts [CLASSES ...]`.

Requests of 64 rows fill the log, 50,000 rows at a time. Measured is the processor time of one thread, in µs a
row: rounding and naming the predictions, storing and deleting as many, reading and folding all of them, and
SQLite alone, which inserts and deletes blobs of the same sizes. Each figure is the mean of the lower half.
"""

from __future__ import annotations

import os
import sqlite3
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

from boxcal.app.monitoring.fold import ActiveVersion, MonitorFold
from boxcal.app.monitoring.log import FeedbackLog
from boxcal.app.monitoring.records import BLOCK_ROWS, Block
from boxcal.app.registry.database import PAGE_BYTES
from boxcal.app.registry.records import BackboneIdentity
from boxcal.app.registry.store import Registry
from boxcal.calibrators.monitoring.state import Array
from boxcal.calibrators.monitoring.traffic_sample import TrafficSample
from boxcal.calibrators.plain_rows import PlainRows

ROWS, BLOCKS, ROUNDS = 64, 49, 12
ALL = BLOCKS * BLOCK_ROWS
BYTES_OF_PLACE = 12
"""A prediction's version and time."""


def seconds(work: Callable[[], object]) -> float:
    """Return the processor time of this thread that some work takes."""
    began = time.thread_time()
    work()
    return time.thread_time() - began


class EveryRow(TrafficSample):
    """Reads all predictions, however fast they come."""

    def choose(self, seq: Array, moments: Array) -> Array:
        """Choose all."""
        return np.ones(len(seq), np.bool_)


def fill(blocks: list[Block], requests: list[Array]) -> None:
    """Make predictions."""
    blocks += [Block(requests[0].shape[1]) for _ in range(BLOCKS)]
    for block in blocks:
        for place in range(BLOCK_ROWS // ROWS):
            block.add(0, requests[place], time.time())


def parts(classes: int, folder: Path) -> dict[str, list[float]]:
    """Return the times of each part, in s for `ALL` rows."""
    rng = np.random.default_rng(0)
    requests = [rng.normal(0, 3, (ROWS, classes)) for _ in range(BLOCK_ROWS // ROWS)]
    identity = BackboneIdentity("bench", "ab" * 32, tuple(map(str, range(classes))))
    registry = Registry(f"sqlite:///{folder / 'registry.sqlite3'}", identity, owner="bench")
    log = FeedbackLog(registry.database, registry.backbone_id, ALL, folds=True)
    plain = PlainRows(1.3, 0.0, 1.0, classes)
    active = ActiveVersion(0, "ts", 1, None, 0.0, reads_logits=True)
    fold = MonitorFold(classes, lambda _, rows: plain(rows)[0], active, refits=True)
    found: dict[str, list[float]] = {"round and name": [], "store": [], "fold every row": []}

    def folded() -> None:
        with registry.database.read() as connection:
            fold.fold(log.after(connection, fold.seq, 1000, ALL).entries)

    for _ in range(ROUNDS):
        blocks: list[Block] = []
        found["round and name"].append(seconds(partial(fill, blocks, requests)))
        found["store"].append(seconds(partial(log.write, blocks, [])))
        fold.sample = EveryRow()
        found["fold every row"].append(seconds(folded))
    registry.close()
    return found


def bare(classes: int, folder: Path) -> list[float]:
    """Return the times of SQLite alone."""
    connection = sqlite3.connect(folder / "bare.sqlite3", isolation_level=None)
    connection.executescript(
        f"PRAGMA page_size = {PAGE_BYTES}; PRAGMA journal_mode = WAL; PRAGMA synchronous = FULL; "
        "PRAGMA secure_delete = OFF; CREATE TABLE blocks (seq INTEGER PRIMARY KEY, logits BLOB)"
    )
    blobs = [(os.urandom(BLOCK_ROWS * (2 * classes + BYTES_OF_PLACE)),) for _ in range(BLOCKS)]

    def store() -> None:
        connection.execute("BEGIN IMMEDIATE")
        connection.executemany("INSERT INTO blocks (logits) VALUES (?)", blobs)
        connection.execute("DELETE FROM blocks WHERE seq <= (SELECT max(seq) FROM blocks) - ?", (BLOCKS,))
        connection.execute("COMMIT")

    found = [seconds(store) for _ in range(ROUNDS)]
    connection.close()
    return found


def main() -> None:
    """Measure, and print."""
    for classes in map(int, sys.argv[1:] or ("10", "100")):
        with tempfile.TemporaryDirectory() as folder:
            found = parts(classes, Path(folder)) | {"SQLite alone": bare(classes, Path(folder))}
        # The first rounds load compiled loops and enlarge the file; a checkpoint comes every other round.
        shown = (f"{name} {np.mean(sorted(times[2:])[:5]) / ALL * 1e6:.2f}" for name, times in found.items())
        print(f"K = {classes}, µs a row: {', '.join(shown)}", flush=True)


if __name__ == "__main__":
    main()
