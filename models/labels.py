"""Class names from a file, one a line, for backbones that bring none."""

from __future__ import annotations

from pathlib import Path

from models.errors import UnusableLabels


def read_labels(path: Path, num_classes: int) -> tuple[str, ...]:
    """Read one label a line, exactly as many as there are classes.

    Raises
    ------
    UnusableLabels
        If the file cannot be read, a line is empty or appears twice, or the number of lines is not K.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UnusableLabels(f"The labels file {path} cannot be read: {error}.") from error
    return check_labels([line.strip() for line in lines], num_classes, str(path))


def check_labels(labels: list[str], num_classes: int, source: str) -> tuple[str, ...]:
    """Hold the labels to one distinct, non-empty name for each class.

    Raises
    ------
    UnusableLabels
        Naming the line or the counts that do not fit.
    """
    if len(labels) != num_classes:
        raise UnusableLabels(f"{source} has {len(labels)} labels, but the model has {num_classes} classes.")
    first: dict[str, int] = {}
    for number, label in enumerate(labels, start=1):
        if not label:
            raise UnusableLabels(f"{source}: label {number} is empty.")
        if label in first:
            raise UnusableLabels(f"{source}: label {number}, {label!r}, is already label {first[label]}.")
        first[label] = number
    return tuple(labels)


def distinct(labels: list[str]) -> tuple[str, ...]:
    """Make repeated names distinct: torchvision's ImageNet labels have two cranes and two maillots."""
    counts: dict[str, int] = {}
    result = []
    for label in labels:
        counts[label] = counts.get(label, 0) + 1
        result.append(label if counts[label] == 1 else f"{label} ({counts[label]})")
    return tuple(result)
