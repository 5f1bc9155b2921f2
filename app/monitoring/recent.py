"""Blocks of predictions that this process stored and has not folded yet: it need not read them again."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence

import numpy as np

from boxcal.app.monitoring.records import Array, Block

Columns = tuple[Array, Array, Array]


class RecentBlocks:
    """The newest blocks that fit into some memory; each is given once. Any thread may call.

    Parameters
    ----------
    most_bytes
        What they may take; the oldest are forgotten.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most = most_bytes
        self._bytes = 0
        self._blocks: dict[str, Block] = {}
        self._lock = threading.Lock()

    def add(self, blocks: Iterable[Block]) -> None:
        """Remember blocks that were stored."""
        if not self._most:
            return
        with self._lock:
            for block in blocks:
                self._blocks[block.id] = block
                self._bytes += block.nbytes
            while self._bytes > self._most:
                self._forget(next(iter(self._blocks)))

    def take(self, ids: Sequence[str]) -> Columns | None:
        """Return versions, times and logits of the predictions of some blocks; None if one is not known."""
        with self._lock:
            if not all(own in self._blocks for own in ids):
                return None
            blocks = [self._forget(own) for own in ids]
        versions, moments, logits = zip(*(block.columns() for block in blocks), strict=True)
        return np.concatenate(versions), np.concatenate(moments), np.concatenate(logits)

    def _forget(self, own: str) -> Block:
        block = self._blocks.pop(own)
        self._bytes -= block.nbytes
        return block
