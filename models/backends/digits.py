"""The backbone `digits`: a small Vision Transformer whose weights are part of the package."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from boxcal.models.backends.checks import read_labels
from boxcal.models.backends.torch_backbone import TorchBackbone, load_into, read_weights
from boxcal.models.digits_data import DIGIT_SIDE, GREY_LEVELS, LABELS, DigitLevels

WEIGHTS = Path(__file__).with_name("digits.safetensors")
PATCH = 2
WIDTH = 64
LAYERS = 2
HEADS = 4


class Block(nn.Module):
    """One layer: attention, then two linear maps, each after a layer norm and with a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(WIDTH, eps=1e-6)
        self.self_attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.ln_2 = nn.LayerNorm(WIDTH, eps=1e-6)
        # "3" is the name of the second map in the file of weights, as in torchvision.
        self.mlp = nn.Sequential()
        for name, module in (
            ("0", nn.Linear(WIDTH, 2 * WIDTH)),
            ("1", nn.GELU()),
            ("3", nn.Linear(2 * WIDTH, WIDTH)),
        ):
            self.mlp.add_module(name, module)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Map tokens (N, L, D) to tokens of the same shape."""
        normal = self.ln_1(tokens)
        attended, _ = self.self_attention(normal, normal, normal, need_weights=False)
        tokens = attended + tokens
        result: torch.Tensor = tokens + self.mlp(self.ln_2(tokens))
        return result


class Encoder(nn.Module):
    """The layers of the transformer between the patches and the head."""

    def __init__(self) -> None:
        super().__init__()
        self.pos_embedding = nn.Parameter(torch.zeros(1, 1 + (DIGIT_SIDE // PATCH) ** 2, WIDTH))
        self.layers = nn.Sequential()
        for layer in range(LAYERS):
            self.layers.add_module(f"encoder_layer_{layer}", Block())
        self.ln = nn.LayerNorm(WIDTH, eps=1e-6)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Map tokens (N, L, D) to tokens of the same shape."""
        result: torch.Tensor = self.ln(self.layers(tokens + self.pos_embedding))
        return result


class DigitsTransformer(nn.Module):
    """A small ViT-B/16 (https://arxiv.org/abs/2010.11929): 16 patches of 2 × 2 pixels, 2 layers of width 64.

    It maps the grey levels 0 to 16 of the data set, float (N, 1, 8, 8), to logits (N, 10). The names of the
    weights and the arithmetic are those of torchvision's `VisionTransformer`, whose import costs the start of
    the service 1.5 s of processor time and 155 MiB (`python -X importtime -c "import torch, torchvision"`).
    """

    def __init__(self) -> None:
        super().__init__()
        self.class_token = nn.Parameter(torch.zeros(1, 1, WIDTH))
        self.conv_proj = nn.Conv2d(1, WIDTH, kernel_size=PATCH, stride=PATCH)
        self.encoder = Encoder()
        self.heads = nn.Sequential()
        self.heads.add_module("head", nn.Linear(WIDTH, len(LABELS)))

    def features(self, levels: torch.Tensor) -> torch.Tensor:
        """Features (N, D) of levels (N, 1, 8, 8): what the head reads."""
        patches = self.conv_proj(levels / (GREY_LEVELS / 2) - 1).flatten(2).permute(0, 2, 1)
        tokens = torch.cat([self.class_token.expand(patches.shape[0], -1, -1), patches], dim=1)
        first: torch.Tensor = self.encoder(tokens)[:, 0]
        return first

    def forward(self, levels: torch.Tensor) -> torch.Tensor:
        """Logits (N, 10) of levels (N, 1, 8, 8)."""
        logits: torch.Tensor = self.heads(self.features(levels))
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
