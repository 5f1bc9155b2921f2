"""`timm:NAME`: a classification model of timm with weights from a file and its own preprocessing."""

from __future__ import annotations

import difflib
import math
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from boxcal.models import BackboneError
from boxcal.models.backends.checks import check_labels, read_labels
from boxcal.models.backends.torch_backbone import TorchBackbone, load_into, read_weights
from boxcal.models.inputs.images import ImageClassification

RANDOM = "random"
RANDOM_SEED = 0
TIMM_PACKAGE = "models of timm need the package timm: pip install 'boxcal[timm]'"


def load_timm(
    name: str, *, weights: str | None, labels: Path | None, device: str, precision: str
) -> TorchBackbone:
    """Build a model, load its weights, and take the preprocessing and the labels from its configuration."""
    try:
        import timm  # noqa: PLC0415 - an optional package
    except ImportError as error:
        raise BackboneError(f"timm:{name}: {TIMM_PACKAGE}.") from error
    name, weights = _checkpoint(name, weights)
    if not timm.is_model(name):
        near = ", ".join(difflib.get_close_matches(name, timm.list_models(), n=3))
        raise BackboneError(f"timm has no model {name!r}.{f' Did you mean {near}?' if near else ''}")
    if weights is None:
        raise BackboneError(
            f"timm:{name} needs weights: timm:{name}?checkpoint=PATH or BOXCAL_WEIGHTS, the path of a .pth "
            f"or .safetensors file, or {RANDOM!r}."
        )
    if weights == RANDOM:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(RANDOM_SEED)
            network: Any = timm.create_model(name)
    else:
        network = _with_weights(timm, name, Path(weights))
    preprocessing = _preprocessing(timm, name, network)
    num_classes = int(getattr(network, "num_classes", 0))
    return TorchBackbone(
        f"timm:{name}",
        network.eval(),
        labels=_labels(timm, network, labels, num_classes),
        input_shape=preprocessing.input_shape,
        preprocessing=preprocessing,
        device=device,
        precision=precision,
    )


def _checkpoint(name: str, weights: str | None) -> tuple[str, str | None]:
    name, _, query = name.partition("?")
    key, _, path = query.partition("=")
    if not query:
        return name, weights
    if key != "checkpoint" or not path:
        raise BackboneError(f"timm:{name}?{query}: expected `?checkpoint=PATH`.")
    if weights is not None:
        raise BackboneError(f"Weights are given twice: checkpoint={path} and {weights}.")
    return name, path


def _with_weights(timm: Any, name: str, path: Path) -> Any:
    """Build the network with as many classes as the file has, and load it."""
    weights = read_weights(path)
    network = timm.create_model(name)
    heads = network.pretrained_cfg.get("classifier") or ""  # of a distilled model two, with the same classes
    weight = weights.get(f"{heads if isinstance(heads, str) else heads[0]}.weight")
    if weight is not None and weight.ndim and weight.shape[0] not in {0, network.num_classes}:
        network = timm.create_model(name, num_classes=int(weight.shape[0]))
    load_into(network, weights, path)
    return network


def _preprocessing(timm: Any, name: str, network: Any) -> ImageClassification:
    """Convert the configuration of a model; what cannot be converted is refused."""
    found = timm.data.resolve_data_config({}, model=network)
    channels, height, width = found["input_size"]
    mode, share = found["crop_mode"], found["crop_pct"]
    mean, std = tuple(map(float, found["mean"])), tuple(map(float, found["std"]))
    if channels not in {1, 3} or len(mean) != channels or len(std) != channels:
        raise BackboneError(f"timm:{name} reads {channels} channels; images have 1 or 3.")
    interpolation = Image.Resampling[found["interpolation"].upper()]
    if mode == "squash" and share == 1:
        return ImageClassification((height, width), None, mean, std, interpolation)
    if mode != "center" or height != width:
        raise BackboneError(
            f"timm:{name} is preprocessed with crop_mode {mode!r}, crop_pct {share} and input_size "
            f"{found['input_size']}; export it to ONNX and declare its preprocessing."
        )
    return ImageClassification(math.floor(height / share), height, mean, std, interpolation)


def _labels(timm: Any, network: Any, labels: Path | None, num_classes: int) -> tuple[str, ...]:
    """Take the labels from a file, or from the configuration if it describes the same classes."""
    if labels is not None:
        return read_labels(labels, num_classes)
    configuration = network.pretrained_cfg
    if names := configuration.get("label_names"):
        return check_labels(list(names), num_classes, "The configuration of the model")
    subset = (
        timm.data.infer_imagenet_subset(network) if configuration.get("num_classes") == num_classes else None
    )
    if subset is not None:
        info = timm.data.ImageNetInfo(subset)
        return check_labels(
            [info.index_to_description(index) for index in range(num_classes)], num_classes, subset
        )
    return tuple(map(str, range(num_classes)))
