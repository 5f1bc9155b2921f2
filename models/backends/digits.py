"""The backbone `digits`: a small Vision Transformer whose weights are part of the package."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn
from torchvision.models.vision_transformer import VisionTransformer

from boxcal.models.backends.checks import read_labels
from boxcal.models.backends.torch_backbone import TorchBackbone, load_into, read_weights
from boxcal.models.digits_data import LABELS
from boxcal.models.inputs.images import DIGIT_SIDE, GREY_LEVELS, DigitLevels

WEIGHTS = Path(__file__).with_name("digits.safetensors")
PATCH = 2
WIDTH = 64


class DigitsTransformer(VisionTransformer):  # type: ignore[misc]
    """A small ViT-B/16 (https://arxiv.org/abs/2010.11929): 16 patches of 2 × 2 pixels, 2 layers of width 64.

    It maps the grey levels 0 to 16 of the data set, float (N, 1, 8, 8), to logits (N, 10).
    """

    def __init__(self) -> None:
        super().__init__(
            image_size=DIGIT_SIDE,
            patch_size=PATCH,
            num_layers=2,
            num_heads=4,
            hidden_dim=WIDTH,
            mlp_dim=2 * WIDTH,
            num_classes=len(LABELS),
        )
        self.conv_proj = nn.Conv2d(1, WIDTH, kernel_size=PATCH, stride=PATCH)  # one grey channel, not three

    def forward(self, levels: torch.Tensor) -> torch.Tensor:
        """Logits (N, 10) of levels (N, 1, 8, 8)."""
        logits: torch.Tensor = super().forward(levels / (GREY_LEVELS / 2) - 1)
        return logits


def load_digits(*, labels: Path | None, device: str, precision: str) -> TorchBackbone:
    """Build the backbone and load its weights."""
    network = DigitsTransformer()
    load_into(network, read_weights(WEIGHTS), WEIGHTS)
    preprocessing = DigitLevels()
    return TorchBackbone(
        "digits",
        network.eval(),
        labels=LABELS if labels is None else read_labels(labels, len(LABELS)),
        input_shape=preprocessing.input_shape,
        preprocessing=preprocessing,
        device=device,
        precision=precision,
    )
