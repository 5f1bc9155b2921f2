"""One sentence about the state of the monitor, for people."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from boxcal.calibrators.monitoring.decisions import SENTENCES, DecisionKind

FEW_LABELS = 50
"""Below, a calm test means little."""


def sentence(document: Mapping[str, Any]) -> str:
    """Say what the document of the monitor means: an alarm, calm, or not enough labels."""
    labels = document.get("labels", 0)
    if not labels:
        return "No label has arrived since the test began: nothing is known about the calibration."
    version, diagnosis = document["calibrator"]["version"], document["diagnosis"]
    for test, kind in (("material", DecisionKind.MATERIAL_ALARM), ("strict", DecisionKind.ALARM)):
        alarm = document["alarms"][test]
        if alarm["alarm"]:
            evidence = {
                "diagnosis": diagnosis["kind"],
                "labels_since_change": diagnosis["since"],
                "recoverable_nll": diagnosis["recoverable_nll"],
                "log_evidence": alarm["largest_log_evidence"],
            }
            return SENTENCES[kind](version, evidence)
    if labels < FEW_LABELS:
        return f"There are not enough labels: {labels} show no change of version {version}."
    return f"Version {version} is calibrated as far as {labels:,} labels show."
