"""What the monitor must know about the active calibrator, from the registry and the report of its fit."""

from __future__ import annotations

from typing import Any

import numpy as np

from boxcal.app.http.problems import UnusableCalibrator
from boxcal.app.monitoring.fold import ActiveVersion
from boxcal.app.registry.activator import Activator
from boxcal.app.registry.records import Activation
from boxcal.app.registry.store import Registry


def active_version_of(registry: Registry, activator: Activator, activation: Activation) -> ActiveVersion:
    """Describe the calibrator of an activation; blocks."""
    report = report_of(registry, activation.version)
    return ActiveVersion(
        version=activation.version,
        method=activation.method,
        activation=activation.id,
        class_prior=class_prior(report),
        validation_gap=validation_gap(report),
        reads_logits=activator.load(activation.version).reads == "logits",
    )


def report_of(registry: Registry, version: int) -> dict[str, Any]:
    """Return the report of a version; {} if it has none or was pruned. Blocks."""
    try:
        return registry.report(version)
    except UnusableCalibrator:
        return {}


def class_prior(report: dict[str, Any]) -> np.ndarray[Any, np.dtype[np.float64]] | None:
    """Return the mean answer (K,) of a calibrator to the data of its fit; None where it is not known."""
    return np.array(report["class_prior"], np.float64) if "class_prior" in report else None


def validation_gap(report: dict[str, Any]) -> float:
    """Return accuracy less mean confidence on the validation data, by cross-fitting."""
    after = report.get("reliability", {}).get("after")
    return float(after["accuracy"] - after["mean_confidence"]) if after else 0.0
