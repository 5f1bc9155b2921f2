"""What the checks of validation data ask of every row, found in one pass over the logits in blocks of rows.

A block is converted to float64 where the logits are float32, so that no copy of all the logits is made. Rows
that occur more than once, in one validation set or in two, are found by their hashes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from boxcal.calibrators.array_ops import row_max, row_sum
from boxcal.calibrators.threads import block_rows, over_blocks

SKETCHED = 256
_ENTRIES = 1 << 16  # hashed at a time

Hashes = NDArray[np.uint64]
Labels = NDArray[np.int64]


def row_groups(hashes: Hashes, labels: Labels, predicted: Labels) -> Labels:
    """Give copies, rows with equal hashes (N,), one number: (N,).

    Rows of rounded or discrete scores are equal by chance: they are different samples, and every row has its
    own number. Labels tell the two apart: copies are predicted wrongly about as often as other rows, and then
    all have the same label. Of rows equal by chance, few are predicted wrongly where scores are sure, and the
    labels of the others mostly differ.
    """
    _, first, groups, sizes = np.unique(hashes, return_index=True, return_inverse=True, return_counts=True)
    least, greatest = labels[first], labels[first]
    np.minimum.at(least, groups, labels)
    np.maximum.at(greatest, groups, labels)
    repeated, wrong = sizes > 1, predicted != labels
    holds_wrong = repeated & (np.bincount(groups, weights=wrong) > 0)
    agreeing = int((holds_wrong & (least == greatest)).sum())
    by_chance = 2 * agreeing < int(holds_wrong.sum()) or 2 * agreeing + 1 < wrong.mean() * repeated.sum()
    return np.arange(len(labels)) if by_chance else first[groups]


@dataclass(frozen=True)
class Sketch:
    """The `SKETCHED` smallest hashes of a set's distinct rows, and N; tells how much two sets share."""

    hashes: tuple[int, ...]
    count: int

    @classmethod
    def of(cls, logits: NDArray[Any]) -> Self:
        """Sketch a validation set; values are compared in single precision."""
        parts = np.array_split(logits, -(-logits.size // _ENTRIES))
        hashes = [row_hashes(rows.astype(np.float32).astype(np.float64)) for rows in parts]
        return cls.of_hashes(np.concatenate(hashes))

    @classmethod
    def of_hashes(cls, hashes: Hashes) -> Self:
        """Sketch a validation set by the hashes of its rows in single precision."""
        return cls(tuple(int(one) for one in np.unique(hashes)[:SKETCHED]), len(hashes))

    @property
    def repeated(self) -> float:
        """Estimate the share of rows that are not the first of their kind; 0 where all differ."""
        distinct: float = len(self.hashes)
        if distinct == SKETCHED:  # of as many random numbers, so many are up to the largest
            distinct = (SKETCHED - 1) * 2**64 / (self.hashes[-1] + 1)
        return max(0.0, 1.0 - distinct / max(1, self.count))

    @classmethod
    def read(cls, document: dict[str, Any]) -> Self:
        """Read what `to_dict` wrote."""
        hashes, count = tuple(int(one, 16) for one in document["hashes"]), document["count"]
        if hashes != tuple(sorted({one for one in hashes if 0 <= one < 2**64})) or count < len(hashes):
            raise ValueError("hashes rise, and there are no more than rows")
        return cls(hashes, count)

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-ready document; hashes are hexadecimal, as JSON numbers are not exact at 64 bits."""
        return {"hashes": [f"{one:016x}" for one in self.hashes], "count": self.count}


def overlap(rows: Sketch, known: Sketch) -> float:
    """Estimate the share of the first set's distinct rows that occur in the second (bottom-k sketches).

    Among hashes up to the limit that both sketches reach, each set's rows are complete.
    """
    limit = min(sketch.hashes[-1] if len(sketch.hashes) == SKETCHED else 2**64 for sketch in (rows, known))
    own = {one for one in rows.hashes if one <= limit}
    return len(own & set(known.hashes)) / max(1, len(own))


def row_hashes(logits: Floats) -> Hashes:
    """Hash the bits of each row (N, K) to one number: a random linear form modulo 2^64, then mixed."""
    bits = np.ascontiguousarray(logits + 0.0).view(np.uint64)  # + 0.0: -0.0 equals 0.0
    factors = np.random.default_rng(0).integers(0, 2**63, logits.shape[1], dtype=np.uint64) * 2 + 1
    hashes: Hashes = _mixed(bits) @ factors.astype(np.uint64)
    return _mixed(hashes)


def _mixed(values: Hashes) -> Hashes:
    """Spread bits evenly (the finaliser of SplitMix64)."""
    mixed = values ^ (values >> np.uint64(30))
    mixed = mixed * np.uint64(0xBF58476D1CE4E5B9)
    mixed = mixed ^ (mixed >> np.uint64(27))
    mixed = mixed * np.uint64(0x94D049BB133111EB)
    result: Hashes = mixed ^ (mixed >> np.uint64(31))
    return result


Floats = NDArray[np.float64]


def effective_samples(weights: NDArray[np.float64]) -> float:
    """Return (sum of weights)^2 / (sum of their squares), which is N for equal weights (Kish 1965)."""
    return float(weights.sum() ** 2 / (weights**2).sum())


@dataclass(frozen=True, eq=False)
class RowStatistics:
    """Facts about the rows of logits (N, K), float64 (N,) unless it says otherwise."""

    sums: Floats  # Of the row: its sum, its Euclidean norm, and its smallest and largest logit
    norms: Floats
    smallest: Floats
    largest: Floats
    own: Floats  # The logit of the label
    predicted: NDArray[np.int64]  # int64 (N,), the first class of the largest logit
    at_smallest: NDArray[np.int64]  # int64 (N,), how many logits are equal to the smallest
    hashes: NDArray[np.uint64]  # uint64 (N,), equal for equal rows
    copies: NDArray[np.int64]  # int64 (N,), one number for all copies of a row

    @classmethod
    def of(cls, logits: NDArray[Any], labels: NDArray[np.int64]) -> Self:
        """Look at finite logits (N, K), float32 or float64, and labels (N,)."""

        def work(part: slice) -> tuple[NDArray[Any], ...]:
            rows = logits[part].astype(np.float64)
            smallest = -row_max(-rows)[:, 0]
            return (
                row_sum(rows)[:, 0],
                np.sqrt(row_sum(rows * rows))[:, 0],
                smallest,
                row_max(rows)[:, 0],
                rows[np.arange(len(rows)), labels[part]],
                rows.argmax(axis=1),
                (rows == smallest[:, None]).sum(axis=1),
                row_hashes(rows),
            )

        parts = over_blocks(work, len(logits), block_rows(logits.shape[1]))
        sums, norms, smallest, largest, own, predicted, at_smallest, hashes = (
            np.concatenate(column) for column in zip(*parts, strict=True)
        )
        copies = row_groups(hashes, labels, predicted)
        return cls(sums, norms, smallest, largest, own, predicted, at_smallest, hashes, copies)
