"""What the monitor must know about the active calibrator, from the registry and the report of its fit."""

from __future__ import annotations

from typing import Any

import numpy as np

from boxcal.app.activation.activator import Activator
from boxcal.app.monitoring.fold import ActiveVersion
from boxcal.app.registry.errors import CalibratorPruned, NoReport
from boxcal.app.registry.records import Activation
from boxcal.app.registry.store import Registry


def active_version_of(registry: Registry, activator: Activator, activation: Activation) -> ActiveVersion:
    """Describe the calibrator of an activation; blocks."""
    report = report_of(registry, activation.version)
    return ActiveVersion(
        version=activation.version,
        method=activation.method,
        activation=activation.id,
        class_frequencies=class_frequencies(report),
        validation_gap=validation_gap(report),
        reads_logits=activator.load(activation.version).reads == "logits",
    )


def report_of(registry: Registry, version: int) -> dict[str, Any]:
    """Return the report of a version; {} if it has none or was pruned. Blocks."""
    try:
        return registry.report(version)
    except (CalibratorPruned, NoReport):
        return {}


def class_frequencies(report: dict[str, Any]) -> np.ndarray[Any, np.dtype[np.float64]] | None:
    """Return the class frequencies (K,) for which a calibrator was fitted; None where they are not known."""
    if "refit" in report:
        return np.array(report["refit"]["class_frequencies"], np.float64)
    counts = np.array(report.get("fit", {}).get("class_counts", ()), np.float64)
    return counts / counts.sum() if len(counts) else None


def validation_gap(report: dict[str, Any]) -> float:
    """Return accuracy less mean confidence on the validation data, by cross-fitting."""
    after = report.get("reliability", {}).get("after")
    return float(after["accuracy"] - after["mean_confidence"]) if after else 0.0
