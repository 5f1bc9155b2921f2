"""The backbone as fits see it: how a worker loads it, and what the check of an upload compares with."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

import numpy as np

from boxcal.app.tables.sample_schema import ModelInputs

if TYPE_CHECKING:
    from boxcal.app.settings.service import Settings
    from boxcal.models.backends.backbone import Backbone

HEAD = "head.npy"


@dataclass(frozen=True, slots=True)
class BackboneSource:
    """The settings that load the backbone of the service; small enough to be sent to another process."""

    model: str
    weights: str | None
    labels: Path | None
    device: str
    precision: str

    @classmethod
    def of(cls, settings: Settings) -> Self:
        """Take it from the service's settings; of several models, the first."""
        settings = settings.entries()[0].settings
        return cls(
            settings.model,
            settings.weights,
            settings.labels,
            settings.device,
            settings.precision,
        )

    def load(self) -> Backbone:
        from boxcal.models.loading.specifications import load_backbone  # noqa: PLC0415 - imports torch; a check does not need it

        return load_backbone(
            self.model,
            weights=self.weights,
            labels=self.labels,
            device=self.device,
            precision=self.precision,
        )


@dataclass(frozen=True, slots=True)
class BackboneSummary:
    """What a worker needs to know of a backbone to check an upload, without loading it."""

    name: str
    labels: tuple[str, ...]  # The K class names
    input_shape: tuple[int, ...]
    # Whether it gives features, and gradients; see `boxcal.models.backends.backbone`
    gives_features: bool
    is_open: bool
    head: Path | None  # File with the (K, D + 1) weight and bias of its last layer; None where it has none
    inputs: str = "images"  # Kind of its inputs; see `boxcal.models.inputs.base.Inputs`
    samples: ModelInputs | None = None  # What it reads if that is features or texts

    @classmethod
    def of(cls, backbone: Backbone, folder: Path) -> Self:
        """Summarise a loaded backbone; its head is written into `folder`."""
        from boxcal.models.backends.backbone import (  # noqa: PLC0415 - a check needs no backbone
            FeatureBackbone,
            OpenBackbone,
        )

        path, gives_features = None, isinstance(backbone, FeatureBackbone)
        is_open = isinstance(backbone, OpenBackbone)
        if isinstance(backbone, FeatureBackbone) and backbone.head is not None:
            path = folder / HEAD
            weight, bias = (np.asarray(part, np.float64) for part in backbone.head)
            np.save(path, np.column_stack([weight, bias]), allow_pickle=False)
        shape, kind = tuple(backbone.input_shape), backbone.inputs.kind
        labels, samples = tuple(backbone.labels), ModelInputs.of(backbone)
        return cls(backbone.name, labels, shape, gives_features, is_open, path, kind, samples)
