"""A comparison in the worker: versions of the registry, and methods, on one uploaded validation set.

Versions answer every sample as they are; methods are cross-fitted. So all differences are paired by sample.
"""

from __future__ import annotations

from collections.abc import Callable

from boxcal.app.fitting.messages import Compared, CompareTask, StoredVersion
from boxcal.app.fitting.worker.fit import SEED, read_besides_logits
from boxcal.app.fitting.worker.validation_set import StoredSet
from boxcal.calibrators.array_calibrator import ArrayCalibrator
from boxcal.calibrators.checks import check_known
from boxcal.calibrators.data import check_validation_set
from boxcal.calibrators.evaluation.comparison import BASELINE, MethodComparison, MetricScore, compare_methods
from boxcal.calibrators.evaluation.verdict import NAMES
from boxcal.calibrators.method import reads_of_methods
from boxcal.calibrators.row_statistics import Sketch

UNCLEAR = "not clearly different"


def compare(task: CompareTask, progress: Callable[[float, str], None]) -> Compared:
    """Evaluate the versions and the methods, and say how the versions differ."""
    data = StoredSet(task.folder)
    calibrators = {
        name_of(one): ArrayCalibrator.from_bytes(one.artifact)
        for one in task.versions
        if one.artifact is not None
    }
    required_by = {reads_of_methods()[method]: f"the method {method!r}" for method in task.methods}
    for name, calibrator in calibrators.items():
        required_by.setdefault(calibrator.reads, name)
    required_by.setdefault("logits", BASELINE)
    extras = read_besides_logits(task, data, required_by, progress)
    logits, labels = data.arrays()
    comparison = compare_methods(
        task.methods,
        check_validation_set(logits, labels, **extras, **data.grouping),
        calibrators=calibrators,
        reference=name_of(task.versions[0]) if task.versions else BASELINE,
        seed=SEED,
        progress=progress,
    )
    sketch = Sketch.of(logits)
    warnings = [
        warning.to_dict()
        for one in task.versions
        if one.known is not None
        for warning in check_known(
            sketch,
            Sketch.read(one.known),
            f"{name_of(one)} was",
            "it does worse on new data",
            "warning",
        )
    ]
    return Compared(
        {
            **comparison.to_dict(),
            "sentences": sentences(comparison, list(calibrators)),
            "warnings": warnings + data.notes,
        }
    )


def name_of(stored: StoredVersion) -> str:
    """Name a version as a row of the table."""
    return BASELINE if stored.artifact is None else f"version {stored.version} ({stored.method})"


def sentences(comparison: MethodComparison, versions: list[str]) -> list[str]:
    """Say for each version whether it is better than the one it is compared with, and by how much."""
    return [_sentence(row.method, row.base, row.scores) for row in comparison.rows if row.method in versions]


def _sentence(name: str, base: str, scores: dict[str, MetricScore]) -> str:
    found: dict[str, list[str]] = {word: [] for word in ("clearly lower", "clearly higher", UNCLEAR)}
    for metric, title in NAMES.items():
        score = scores[metric]
        if score.change is None or not score.is_clear:
            found[UNCLEAR].append(title)
        else:
            one = score.change
            span = f"{one.value:+.4f}, 95 % interval {one.low:+.4f} to {one.high:+.4f}"
            found["clearly lower" if score.improves else "clearly higher"].append(f"{title} ({span})")
    parts = [
        f"{_listed(titles)} {'is' if len(titles) == 1 else 'are'} {word}"
        for word, titles in found.items()
        if titles
    ]
    return f"{name[0].upper()}{name[1:]}, compared with {base}: {'; '.join(parts)}."


def _listed(words: list[str]) -> str:
    return " and ".join(filter(None, [", ".join(words[:-1]), words[-1]]))
