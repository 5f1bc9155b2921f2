"""`torchvision:NAME`: every classification model of torchvision, with the preprocessing of its weights."""

from __future__ import annotations

import re
import ssl
import urllib.error
from pathlib import Path
from typing import Any

import torch
import torchvision
from PIL import Image
from torch import nn
from torchvision.models.vision_transformer import EncoderBlock, VisionTransformer

from boxcal.models import BackboneError
from boxcal.models.backends.checks import check_labels, random_batch, read_labels, same_logits
from boxcal.models.backends.torch_backbone import TorchBackbone, load_into, read_weights
from boxcal.models.inputs.images import ImageClassification

RANDOM = "random"
RANDOM_SEED = 0
# torchvision's published files still use the old names of densenet's layers, norm.1 for norm1.
DENSENET_KEY = re.compile(r"^(.*denselayer\d+\.(?:norm|relu|conv))\.((?:[12])\.\w+)$")
AUXILIARY = ("aux1.", "aux2.", "AuxLogits.")
HAS_AUXILIARY = {"googlenet", "inception_v3"}


def load_torchvision(
    name: str,
    *,
    weights: str | None,
    labels: Path | None,
    device: str,
    precision: str,
    optimize: bool = True,
) -> TorchBackbone:
    """Build `name`, load its weights, and take preprocessing and labels from the description of the weights.

    A local file is described by the published weights of the same file name, otherwise by the model's default
    ones. If its number of classes differs from theirs, `labels` or else the indices name the classes.
    """
    known = torchvision.models.list_models(module=torchvision.models)
    if name not in known:
        known = [model for model in known if model[:3] == name[:3]]
        hint = f" Did you mean one of {', '.join(known)}?" if known else ""
        raise BackboneError(f"torchvision has no classification model {name!r}.{hint}")
    # Weights without an ImageNet head are for detectors.
    published = [entry for entry in torchvision.models.get_model_weights(name) if entry.meta["categories"]]
    described = torchvision.models.get_model_weights(name).DEFAULT
    names = {entry.name: entry for entry in published} | {"DEFAULT": described}
    if weights is None:
        raise BackboneError(
            f"torchvision:{name} needs weights (BOXCAL_WEIGHTS): the path of a .pth or .safetensors file, "
            f"{', '.join(names)} (downloaded), or {RANDOM!r}."
        )
    if weights == RANDOM:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(RANDOM_SEED)
            network = build(name, num_classes=1000)
    elif weights in names:
        described = names[weights]
        network = build(name, num_classes=1000, **_architecture(described, name))
        load_into(network, _known_keys(_download(described)), Path(described.url.rpartition("/")[2]))
    else:
        path = Path(weights)
        if not path.suffix and not path.exists():
            raise BackboneError(
                f"torchvision:{name} has no weights {weights!r}: expected the path of a .pth or .safetensors "
                f"file, {', '.join(names)} or {RANDOM!r}."
            )
        described = next((e for e in published if e.url.rpartition("/")[2] == path.name), described)
        network = _load_file(name, path, described)
    num_classes = classes_of(network)
    preprocessing = preprocessing_of(described)
    if optimize:
        shorten_last_block(f"torchvision:{name}", network.eval(), preprocessing.input_shape)
    return TorchBackbone(
        f"torchvision:{name}",
        network.eval(),
        labels=_labels(labels, described, num_classes),
        input_shape=preprocessing.input_shape,
        preprocessing=preprocessing,
        device=device,
        precision=precision,
    )


def build(name: str, *, num_classes: int, **architecture: Any) -> nn.Module:
    """Build a model of torchvision with random weights and without the heads that only training uses."""
    if name in HAS_AUXILIARY:
        architecture |= {"aux_logits": False, "init_weights": False, "transform_input": True}
    network: nn.Module = torchvision.models.get_model(
        name, weights=None, num_classes=num_classes, **architecture
    )
    return network


def shorten_last_block(name: str, network: nn.Module, input_shape: tuple[int, ...]) -> None:
    """Replace the last block of a vision transformer by `LastBlock`, unless that changes the logits."""
    if not isinstance(network, VisionTransformer):
        return
    batch, whole = torch.from_numpy(random_batch(2, input_shape)), network.encoder.layers[-1]
    with torch.inference_mode():
        original = network(batch)
        network.encoder.layers[-1] = LastBlock(whole)
        if not same_logits(name, original, network(batch)):
            network.encoder.layers[-1] = whole


class LastBlock(nn.Module):
    """The last block of a vision transformer, computed for the class token only: the head reads no other.

    The attention reads keys and values of all tokens. The names of the weights stay the same.
    """

    def __init__(self, whole: EncoderBlock) -> None:
        super().__init__()
        self.ln_1, self.self_attention = whole.ln_1, whole.self_attention
        self.ln_2, self.mlp = whole.ln_2, whole.mlp

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Map tokens (N, L, D) to the class token (N, 1, D)."""
        normal = self.ln_1(tokens)
        attended, _ = self.self_attention(normal[:, :1], normal, normal, need_weights=False)
        first = tokens[:, :1] + attended
        result: torch.Tensor = first + self.mlp(self.ln_2(first))
        return result


def preprocessing_of(entry: Any) -> ImageClassification:
    """Convert the transforms of published weights."""
    preset = entry.transforms()
    return ImageClassification(
        resize=preset.resize_size[0],
        crop=preset.crop_size[0],
        mean=tuple(preset.mean),
        std=tuple(preset.std),
        interpolation=Image.Resampling[preset.interpolation.name],
    )


def head_of(network: nn.Module) -> tuple[str, nn.Linear | nn.Conv2d]:
    """Find the layer that returns the logits: the last linear or convolutional one."""
    layers = [(key, part) for key, part in network.named_modules() if isinstance(part, nn.Linear | nn.Conv2d)]
    return layers[-1]


def classes_of(network: nn.Module) -> int:
    """K, from the layer that returns the logits."""
    return int(head_of(network)[1].weight.shape[0])


def _load_file(name: str, path: Path, described: Any) -> nn.Module:
    weights = _known_keys(read_weights(path))
    architecture = _architecture(described, name)
    network = build(name, num_classes=1000, **architecture)
    head = weights.get(f"{head_of(network)[0]}.weight")
    if head is not None and head.ndim and head.shape[0] not in {0, 1000}:
        network = build(name, num_classes=head.shape[0], **architecture)
    load_into(network, weights, path)
    return network


def _architecture(entry: Any, name: str) -> dict[str, Any]:
    """Vision Transformers are built for one image size; other models read any."""
    return {"image_size": entry.transforms().crop_size[0]} if name.startswith("vit_") else {}


def _known_keys(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {
        DENSENET_KEY.sub(r"\1\2", key): value
        for key, value in weights.items()
        if not key.startswith(AUXILIARY)
    }


def _download(entry: Any) -> dict[str, torch.Tensor]:
    try:
        weights: dict[str, torch.Tensor] = entry.get_state_dict(
            progress=True, check_hash=True, map_location="cpu", weights_only=True
        )
    except (urllib.error.URLError, ssl.SSLError, TimeoutError, RuntimeError, OSError) as error:
        raise BackboneError(
            f"{entry} could not be downloaded from {entry.url}: {error}. Fetch it elsewhere and set "
            "BOXCAL_WEIGHTS to the file."
        ) from error
    return weights


def _labels(labels: Path | None, described: Any, num_classes: int) -> tuple[str, ...]:
    if labels is not None:
        return read_labels(labels, num_classes)
    categories = described.meta["categories"] or []
    if len(categories) == num_classes:
        return check_labels(categories, num_classes, str(described))
    return tuple(map(str, range(num_classes)))
