"""What a certificate says besides numbers: parameters at the edge of their range, and remarks for users."""

from __future__ import annotations

import torch

from boxcal.calibrators.data import ValidationSet
from boxcal.calibrators.errors import InvalidDataError
from boxcal.calibrators.fitting.fitted import Fitted
from boxcal.calibrators.maps.constant_box import ConstantBounds
from boxcal.calibrators.maps.identity import IdentityMap
from boxcal.calibrators.threads import over_blocks

LARGEST_SCALE = 1e100
LARGEST_GRADIENT = 1e-4
"""Remaining gradients above this are remarked on."""
CHUNK = 1 << 20
"""Entries of the logits worked on at once."""


def mean_nll(data: ValidationSet) -> float:
    """Mean negative log-likelihood of the logits, in nats, in blocks: nothing large is copied."""

    def work(rows: slice) -> float:
        part = data.logits[rows].double()
        if data.weights is None:
            return float(torch.nn.functional.cross_entropy(part, data.labels[rows], reduction="sum"))
        losses = torch.nn.functional.cross_entropy(part, data.labels[rows], reduction="none")
        return float((losses * data.weights[rows]).sum())

    return sum(over_blocks(work, len(data), max(1, CHUNK // data.num_classes))) / len(data)


def check_scale(data: ValidationSet) -> None:
    """Refuse logits too large or too small to compute with.

    Raises
    ------
    InvalidDataError
        Naming their scale and the limit.
    """
    scale = data.scale
    if not 1.0 / LARGEST_SCALE <= scale <= LARGEST_SCALE:
        raise InvalidDataError(
            f"the largest logit of a row lies {scale:g} above the row's mean on average;"
            f" fits take {1.0 / LARGEST_SCALE:g} to {LARGEST_SCALE:g}"
        )


def remarks(found: Fitted, bounds: str, *, unchanged: bool) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Name the parameters at the edge of their range, and say in words what a user should know."""
    edges, notes = [], []
    box, minimum = found.bound_map, found.minimum
    if bounds and isinstance(box, ConstantBounds):
        lower, upper = box.pair
        if bounds != "pb-upper" and lower <= 0.0:
            edges.append("lower")
        if bounds != "pb-lower" and upper >= 1.0:
            edges.append("upper")
        if box.is_vacuous:
            notes.append("No bound lowers the validation NLL, so the learned bounds hold nothing back.")
    at_edges = found.logit_map.edges()
    edges += at_edges
    notes += at_edges.values()
    if unchanged and not isinstance(found.logit_map, IdentityMap):
        notes.append("Nothing this method can do lowers the validation NLL; the logits are unchanged.")
    elif minimum.gradient_norm > LARGEST_GRADIENT:
        reason = ""
        if minimum.epochs is not None:
            reason = f" Cross-validation stopped it after {minimum.epochs} iterations."
        if minimum.epochs == 0:
            reason = (
                " No network was better than constant answers by one standard error of the cross-validation."
            )
        notes.append(f"The fit ended with a gradient of {minimum.gradient_norm:.1e}.{reason}")
    return tuple(edges), tuple(notes)
