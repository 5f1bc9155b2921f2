"""The validation file of a command: its labels beside it, if they are in another, read and checked here."""

# ruff: noqa: PLC0415 - help needs none of what is imported late

from __future__ import annotations

import tempfile
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from boxcal.app.cli.output import Advance, UsageError, escape, messages, naming

if TYPE_CHECKING:
    from boxcal.app.tables.labels import Declared
    from boxcal.calibrators.array_calibrator import ArrayCalibrator
    from boxcal.calibrators.data import ValidationSet


def saved_calibrator(path: str | Path) -> ArrayCalibrator:
    """Read a calibrator that `boxcal fit --output` has saved; an error names the file."""
    from boxcal.calibrators.array_calibrator import ArrayCalibrator

    with naming(Path(path)):
        return ArrayCalibrator.from_bytes(Path(path).read_bytes())


@contextmanager
def joined(file: Path, labels: Path | None) -> Iterator[Path]:
    """Give the file itself, or one `.npz` of a `.npy` of scores and a `.npy` of labels."""
    if file.is_fifo():
        raise UsageError(f"{file} is a pipe, which cannot be read twice: save it as a file, and name that")
    if labels is None:
        yield file
        return
    import numpy as np

    try:
        arrays = {"logits": np.load(file), "labels": np.load(labels)}
    except (ValueError, EOFError) as error:
        raise UsageError(f"{file} and {labels} must be .npy arrays of numbers: {error}") from error
    if unlike := next((name for name, array in arrays.items() if not isinstance(array, np.ndarray)), None):
        raise UsageError(
            f"{labels if unlike == 'labels' else file} is an .npz; --labels joins two .npy files"
        )
    with tempfile.TemporaryDirectory(prefix="boxcal-") as folder:
        packed = Path(folder) / "validation.npz"
        np.savez(packed, **arrays)
        yield packed


@contextmanager
def unpacked(path: Path) -> Iterator[Path]:
    """Give a file, or what one that is compressed with gzip unpacks to, to be opened before this ends."""
    from boxcal.app.tables.kinds import GZIP_MAGIC, unpack

    with path.open("rb") as file:
        is_packed = file.read(2) == GZIP_MAGIC
    if not is_packed:
        yield path
        return
    # Windows does not delete a file that is still open: that of a table whose rows are read later.
    with tempfile.TemporaryDirectory(prefix="boxcal-", ignore_cleanup_errors=True) as folder:
        plain = Path(folder) / "unpacked"
        with path.open("rb") as file:
            unpack(file, plain)
        yield plain


@dataclass(frozen=True)
class CheckedFile:
    """What a command reads of a validation file."""

    data: ValidationSet
    classes: list[str] | None  # The names of the classes; None where the file and the model give none
    columns: str | None  # What the columns of a table were taken for; None where nothing is to be said
    warnings: list[dict[str, Any]]


def read_checked(
    file: Path,
    labels: Path | None,
    advance: Advance,
    wanted: Collection[str],
    *,
    declared: Declared,
    classes: Sequence[str] | None = None,
) -> CheckedFile:
    """Read a file, its columns in the order of `classes`, with what is `wanted` of features and inputs.

    Says on stderr which of these it holds for another model than that of the settings.
    """
    from boxcal.app.cli.settings import read_settings
    from boxcal.app.fitting.worker.reading import extras_of, read_validation_data
    from boxcal.calibrators.checks import check_data
    from boxcal.calibrators.data import check_validation_set

    settings = read_settings()
    with (
        naming(file),
        joined(file, labels) as source,
        tempfile.TemporaryDirectory(prefix="boxcal-") as folder,
    ):
        stored = read_validation_data(
            source, Path(folder), settings, advance, reads=wanted, declared=declared, classes=classes
        )
        extras, notes = extras_of(stored, wanted, settings)
        logits, own = stored.arrays()
        data = check_validation_set(logits, own, **extras, **stored.grouping, classes=stored.classes)
        warnings = stored.notes + [one.to_dict() for one in check_data(data)]
        found = CheckedFile(data, stored.classes, stored.columns, warnings)
    for note in notes:
        messages().print(f"[dim]{escape(file.name)}: {escape(note)}", soft_wrap=True)
    return found
