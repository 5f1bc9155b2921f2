"""Class names from a file, one per line."""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from boxcal.models.errors import BackboneError


def read_labels(path: Path, num_classes: int) -> tuple[str, ...]:
    return check_labels(read_lines(path), num_classes, str(path))


def read_lines(path: Path) -> list[str]:
    """Read the lines of a labels file, without a byte order mark and without empty lines at the end."""
    try:
        lines = path.read_text(encoding="utf-8-sig").rstrip().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise BackboneError(f"The labels file {path} cannot be read: {error}.") from error
    return [line.strip() for line in lines]


def check_labels(labels: Sequence[str], num_classes: int, source: str) -> tuple[str, ...]:
    """Check that there is one non-empty label per class, normalise labels to NFC, and number repeated ones.

    Requests name classes by their labels, so labels must be distinct, but common lists of ImageNet's classes
    have two cranes: the second becomes `crane (2)`.
    """
    if len(labels) != num_classes:
        raise BackboneError(f"{source} has {len(labels)} labels, but the model has {num_classes} classes.")
    if "" in labels:
        raise BackboneError(f"{source}: label {labels.index('') + 1} is empty.")
    counts: Counter[str] = Counter()
    distinct = []
    for label in (unicodedata.normalize("NFC", label) for label in labels):
        counts[label] += 1
        distinct.append(label if counts[label] == 1 else f"{label} ({counts[label]})")
    if repeated := [label for label, count in Counter(distinct).items() if count > 1]:
        raise BackboneError(
            f"{source}: the label {repeated[0]!r} repeats, even with repeated names numbered."
        )
    return tuple(distinct)
