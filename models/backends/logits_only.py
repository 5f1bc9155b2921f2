"""`logits:K` and `logits`: no model. Clients send logits or probabilities of a model that runs elsewhere."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from boxcal.models.backends.checks import check_labels, read_lines
from boxcal.models.errors import BackboneError, UnusableInput
from boxcal.models.inputs.base import Inputs, NoInputs

MAX_CLASSES = 1_000_000


class LogitsOnly:
    """The labels of a model that runs elsewhere.

    `size`: K in decimal digits; empty to take it from the labels.
    """

    device = "cpu"
    preprocessing = None
    input_shape: tuple[int, ...] = ()
    passes = 1

    def __init__(self, size: str, *, labels: Path | None) -> None:
        if not size and labels is None:
            raise BackboneError(
                "BOXCAL_MODEL=logits needs the labels of the classes (BOXCAL_LABELS) or their number, as in "
                "logits:1000."
            )
        found = None if labels is None else read_lines(labels)
        digits = size or str(len(found or ()))
        if not (digits.isascii() and digits.isdecimal() and 2 <= int(digits[:9]) <= MAX_CLASSES):
            raise BackboneError(
                f"A model of {digits!r:.50} classes: K in logits:K is a number from 2 to {MAX_CLASSES:,}."
            )
        num_classes = int(digits[:9])
        self.labels = (
            tuple(map(str, range(num_classes)))
            if found is None
            else check_labels(found, num_classes, str(labels))
        )
        self.name = f"logits:{num_classes}"
        self.fingerprint = hashlib.sha256(self.name.encode()).hexdigest()
        self.inputs: Inputs = NoInputs()

    @property
    def num_classes(self) -> int:
        return len(self.labels)

    def __call__(self, batch: Any, *, alone: bool = True) -> Any:
        raise UnusableInput(NoInputs.refused)

    def warm_up(self, batch_sizes: Sequence[int]) -> None: ...
