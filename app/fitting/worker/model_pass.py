"""Runs the model on the images, rows or texts of a validation set, and keeps the logits beside the labels.

This happens in the worker that fits, with a backbone of its own, so predictions never wait for it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import numpy as np

from boxcal.app.fitting.worker.images import decoded_images
from boxcal.app.fitting.worker.validation_set import ArrayWriter, StoredSet, kept_samples
from boxcal.app.tables.sample_schema import FEATURES, ModelInputs

if TYPE_CHECKING:
    from boxcal.models.backends.backbone import Backbone

BATCH = 32
BATCH_ON_CPU = 8
"""Images or texts of a batch; so few that even a slow model reports progress every few seconds."""
ROWS = 256
"""Rows of features in a batch."""


def run_backbone(
    data: StoredSet,
    backbone: Backbone,
    max_pixels: int,
    progress: Callable[[float, str], None],
    reads: Collection[str] = (),
) -> None:
    """Run the backbone over the samples of a set, and keep the logits beside the labels."""
    from boxcal.models.backends.backbone import OpenBackbone  # noqa: PLC0415

    samples, what = _batches(data, backbone, max_pixels)
    steps: dict[str, Callable[[Any], Any]] = {"logits": backbone}
    if "inputs" in reads:
        steps["inputs"] = lambda batch: batch
    if "features" in reads and isinstance(backbone, OpenBackbone) and backbone.head is not None:
        steps["features"] = backbone.features
    count, done = data.samples, 0
    stage = f"running {backbone.name} on {count} {what}"
    writers: dict[str, ArrayWriter] = {}
    with ExitStack() as stack:
        for batch in samples:
            given = backbone.inputs.batch(batch)
            for kept, step in steps.items():
                try:
                    block = np.asarray(step(given))
                except Exception as error:
                    if (named := _named(backbone, batch, done, what)) is not None:
                        raise named from error
                    raise
                if kept not in writers:
                    writer = ArrayWriter(data.folder, kept, block.shape[1:], block.dtype)
                    writers[kept] = stack.enter_context(writer)
                writers[kept].append(block)
            done += len(batch)
            progress(done / count, stage)


def _batches(data: StoredSet, backbone: Backbone, max_pixels: int) -> tuple[Iterator[Any], str]:
    """Give the samples of a set in batches, and what they are called."""
    size = BATCH_ON_CPU if backbone.device == "cpu" else BATCH
    if data.holds_images:
        if backbone.preprocessing is None:
            raise ValueError(f"{backbone.name} reads tensors, not images; upload its logits.")
        return decoded_images(data.folder, backbone.preprocessing, max_pixels, size), "images"
    inputs = ModelInputs.of(backbone)
    if inputs is None:
        raise ValueError(f"{backbone.name} reads neither features nor texts; upload its logits.")
    is_rows = inputs.member == FEATURES
    kept = kept_samples(data.folder, backbone.inputs, ROWS if is_rows else size)
    return kept, "rows" if is_rows else "texts"


def _named(backbone: Backbone, batch: Any, first: int, what: str) -> ValueError | None:
    """Find the sample of a batch on which the model fails; None if it fails on none alone."""
    for row in range(len(batch)):
        try:
            backbone(backbone.inputs.batch(batch[row : row + 1]))
        except Exception as error:
            return ValueError(f"{what}[{first + row}]: the model fails on it: {error}"[:1000])
    return None
