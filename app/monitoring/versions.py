"""Calibrators of the registry as the monitor needs them: what their fit said, and their answers to logits."""

from __future__ import annotations

import math
from collections import OrderedDict
from typing import Any

import numpy as np

from boxcal.app.http.problems import UnusableCalibrator
from boxcal.app.monitoring.fold import ActiveVersion, Matrix
from boxcal.app.registry.activator import Activator
from boxcal.app.registry.records import Activation
from boxcal.app.registry.store import Registry

KEPT_ROWS = 4096
"""A row is asked for when it is predicted, when it is labelled, and by each part of the fold."""


def active_version_of(registry: Registry, activator: Activator, activation: Activation) -> ActiveVersion:
    """Describe the calibrator of an activation; blocks."""
    report = _report(registry, activation.version)
    after = report.get("reliability", {}).get("after")
    return ActiveVersion(
        version=activation.version,
        method=activation.method,
        activation=activation.id,
        class_prior=_class_prior(report),
        validation_gap=float(after["accuracy"] - after["mean_confidence"]) if after else 0.0,
        reads_logits=activator.load(activation.version).reads == "logits",
    )


def class_prior_of(registry: Registry, version: int) -> tuple[Matrix | None, float]:
    """Return the mean answer (K,) of a version to the data of its fit, and the effective number of samples.

    None and infinity if the data are not known. Blocks.
    """
    report = _report(registry, version)
    return _class_prior(report), report.get("effective_samples", report.get("samples", math.inf))


def _class_prior(report: dict[str, Any]) -> Matrix | None:
    return np.array(report["class_prior"], np.float64) if "class_prior" in report else None


def _report(registry: Registry, version: int) -> dict[str, Any]:
    """Return the report of a version; {} if it has none or was pruned."""
    try:
        return registry.report(version)
    except UnusableCalibrator:
        return {}


class VersionAnswers:
    """Gives the probabilities of any version of the registry, without request bounds; blocks.

    The answer to a row is the same to the last bit whatever the other rows are, so that a log may be folded
    in parts of any size. The compiled loops go row by row; a product of matrices may not.
    """

    def __init__(self, activator: Activator) -> None:
        self._activator = activator
        self._kept: OrderedDict[tuple[int, bytes], Matrix] = OrderedDict()

    def __call__(self, version: int, logits: Matrix) -> Matrix:
        """Return the probabilities (N, K) of a version for logits (N, K)."""
        calibrator, rows = self._activator.load(version).calibrator, np.ascontiguousarray(logits)
        if calibrator.plain is not None:
            return calibrator.plain(rows)[0]
        answers = []
        for row in rows:
            key = version, row.tobytes()
            if key not in self._kept:
                self._kept[key] = calibrator(row[None])[0]
            answers.append(self._kept[key])
            if len(self._kept) > KEPT_ROWS:
                self._kept.popitem(last=False)
        return np.stack(answers)
