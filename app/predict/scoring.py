"""From samples to what calibrators read: logits, and behind them features while a request needs those.

Most calibrators read logits. Those of `fc` and `ta` read what the backbone's last layer takes, and that of
`nc` wants its samples shifted before the backbone sees them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from boxcal.app.activation.active import ServedCalibrator
from boxcal.app.errors import InvalidParameter
from boxcal.models.backbone import Backbone, OpenBackbone

Samples = NDArray[np.float32]


class Scoring:
    """The backbone as the batcher calls it.

    Batches hold samples of many requests. While one is under way whose calibrator reads features, every pass
    gives features too, and the logits that the last layer makes of them.
    """

    def __init__(self, backbone: Backbone) -> None:
        self._backbone = backbone
        self._features_wanted = 0

    @contextmanager
    def requested_by(self, served: ServedCalibrator) -> Iterator[None]:
        """Keep in mind, on the event loop, what a request under way needs."""
        needed = served.calibrator.reads == "features"
        self._features_wanted += needed
        try:
            yield
        finally:
            self._features_wanted -= needed

    def __call__(self, samples: Samples, alone: bool) -> Tensor:
        """Give logits (N, K), or (N, K + D) with the features behind them."""
        batch = torch.from_numpy(samples)
        if not self._features_wanted:
            return self._backbone(batch, alone=alone)
        if not isinstance(self._backbone, OpenBackbone) or self._backbone.head is None:
            raise InvalidParameter(
                f"{self._backbone.name} gives no features, which the active calibrator reads."
            )
        features = self._backbone.features(batch)
        weight, bias = self._backbone.head
        return torch.cat([features @ weight.T + bias, features], dim=1)


def shifted(samples: Samples, served: ServedCalibrator) -> Samples:
    """Add what the calibrator wants added to the backbone's inputs."""
    shift = served.calibrator.input_shift
    return samples if shift is None else (samples + shift.numpy()).astype(np.float32)


def check_reads_logits(served: ServedCalibrator) -> None:
    """Refuse a calibrator that logits alone do not serve.

    Raises
    ------
    InvalidParameter
        It reads features, or wants the inputs shifted.
    """
    reads = served.calibrator.reads
    if reads != "logits":
        raise InvalidParameter(
            f"The calibrator {served.version} (`{served.method}`) reads {reads}, which come with inputs to "
            "/predict alone; for logits name another one as `calibrator`, such as 0."
        )
