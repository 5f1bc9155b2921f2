"""What a map may take from validation data, and what it says of its own fit."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

from boxcal.calibrators.maps.parameters import Array


class FitData(Protocol):
    """What a map may take from validation data; `boxcal.calibrators.data.ValidationSet`."""

    @property
    def features(self) -> Any:
        """Input of the last layer of the backbone, a tensor (N, D)."""
        ...

    @property
    def head(self) -> Any:
        """Weight (K, D) and bias (K,) of that layer, tensors."""
        ...

    @property
    def inputs(self) -> Any:
        """Input of the backbone, a tensor (N, ...)."""
        ...

    @property
    def backbone(self) -> Any:
        """From inputs to logits, differentiable."""
        ...

    def __len__(self) -> int: ...

    @property
    def num_classes(self) -> int: ...

    @property
    def scale(self) -> float:
        """Mean distance of the largest logit to the mean of its row."""
        ...

    @property
    def effective(self) -> float:
        """The effective number of samples."""
        ...

    @property
    def row_weights(self) -> Array | None:
        """How much each sample counts (N,), of mean 1."""
        ...

    @property
    def rows_of_logits(self) -> Array:
        """The logits (N, K) as they are stored, float32 or float64."""
        ...

    @property
    def centred(self) -> Array:
        """The logits (N, K) less the mean of their row, float64."""
        ...

    @property
    def classes(self) -> Array:
        """The labels (N,), int64."""
        ...


class Solution(NamedTuple):
    """How a map's own solver did, for the certificate; the gradient norm is nan where there is none."""

    gradient_norm: float
    starts: int
    starts_agreeing: int
    evaluations: int
