"""What a certificate says besides numbers: parameters at the edge of their range, and remarks for users."""

from __future__ import annotations

import torch
from torch import Tensor

from boxcal.calibrators.bound_maps.constant import ConstantBounds
from boxcal.calibrators.calibrator import Calibrator
from boxcal.calibrators.logit_maps.temperature import HIGHEST, LOWEST

CHUNK = 1 << 20
"""Entries of the logits worked on at once."""


def mean_nll(scores: Tensor, labels: Tensor) -> float:
    """Mean negative log-likelihood of softmax(scores), in nats, in chunks: nothing large is copied."""
    rows = max(1, CHUNK // scores.shape[1])
    parts = zip(torch.split(scores, rows), torch.split(labels, rows), strict=True)
    return sum(float(torch.nn.functional.cross_entropy(z, y, reduction="sum")) for z, y in parts) / len(
        labels
    )


def remarks(
    calibrator: Calibrator, bounds: str, *, unchanged: bool
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Name the parameters at the edge of their range, and say in words what a user should know."""
    edges, notes = [], []
    box = calibrator.bound_map
    if bounds and isinstance(box, ConstantBounds):
        if bounds != "pb-upper" and box.lower.item() <= 0.0:
            edges.append("lower")
        if bounds != "pb-lower" and box.upper.item() >= 1.0:
            edges.append("upper")
        if box.is_vacuous:
            notes.append("No bound lowers the validation NLL, so the learned bounds hold nothing back.")
    temperature = calibrator.spec["parameters"].get("temperature")
    if temperature is not None and not LOWEST * 1.001 < temperature < HIGHEST * 0.999:
        edges.append("temperature")
        notes.append(f"The temperature ended at the edge of its range, {temperature:g}.")
    if unchanged and calibrator.method != "uncalibrated":
        notes.append("Nothing this method can do lowers the validation NLL; the logits are unchanged.")
    return tuple(edges), tuple(notes)
