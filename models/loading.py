"""From a specification such as `digits` or `torchvision:vit_b_16` to a backbone: what start-up calls once."""

from __future__ import annotations

from pathlib import Path

from boxcal.models.backbone import Backbone
from boxcal.models.errors import UnknownBackbone, UnusableDevice, UnusableWeights
from boxcal.models.torch_backbone import PRECISIONS

SPECIFICATIONS = "'digits', 'torchvision:NAME', 'onnx:PATH' or 'pt2:PATH'"


def load_backbone(
    spec: str,
    *,
    weights: str | None = None,
    labels: Path | None = None,
    device: str = "auto",
    precision: str = "float32",
) -> Backbone:
    """Build the backbone that `spec` names and load its weights.

    Parameters
    ----------
    spec
        `digits`, which brings its weights along; `torchvision:NAME` for any classification model of
        torchvision; `onnx:PATH` or `pt2:PATH` for a model file (`models/spec.py` says what is declared
        beside it).
    weights
        For `torchvision:NAME`: path of a `.pth` or `.safetensors` file of the network's parameters, `DEFAULT`
        or the name of one of torchvision's weights (downloaded once), or `random`.
    labels
        File with one class name a line, for weights that bring none or other ones.
    device
        `auto` (CUDA where there is one), `cpu`, `cuda` or `cuda:N`.
    precision
        `float32`, `bfloat16` or `float16`, of the forward pass; model files carry their own.

    Raises
    ------
    BackboneError
        If anything does not fit; the message names the file, shape, key or value.
    """
    if precision not in PRECISIONS:
        raise UnusableDevice(f"Unknown precision {precision!r}: expected one of {', '.join(PRECISIONS)}.")
    family, _, rest = spec.partition(":")
    if spec == "digits":
        if weights is not None:
            raise UnusableWeights(f"'digits' brings its own weights; {weights!r} cannot be used with it.")
        return _load_digits(labels, device, precision)
    if family == "torchvision" and rest:
        from boxcal.models.torchvision_models import load_torchvision  # noqa: PLC0415 - each family imports its own needs

        return load_torchvision(rest, weights=weights, labels=labels, device=device, precision=precision)
    if family in {"onnx", "pt2"} and rest:
        if weights is not None:
            raise UnusableWeights(f"{spec!r} holds its own weights; {weights!r} cannot be used with it.")
        if precision != "float32":
            raise UnusableDevice(f"{spec!r} carries its own precision; {precision!r} cannot be asked of it.")
        return _load_file(family, Path(rest), labels, device)
    raise UnknownBackbone(f"Unknown model {spec!r}: expected {SPECIFICATIONS}.")


def _load_file(family: str, path: Path, labels: Path | None, device: str) -> Backbone:
    if family == "onnx":
        from boxcal.models.onnx_backbone import OnnxBackbone  # noqa: PLC0415

        return OnnxBackbone(path, labels=labels, device=device)
    from boxcal.models.exported_programs import load_exported_program  # noqa: PLC0415

    return load_exported_program(path, labels=labels, device=device)


def _load_digits(labels: Path | None, device: str, precision: str) -> Backbone:
    from boxcal.models import digits  # noqa: PLC0415
    from boxcal.models.labels import read_labels  # noqa: PLC0415
    from boxcal.models.preprocessing import DigitLevels  # noqa: PLC0415
    from boxcal.models.torch_backbone import TorchBackbone  # noqa: PLC0415
    from boxcal.models.weights import load_into, read_weights  # noqa: PLC0415

    network = digits.DigitsTransformer()
    load_into(network, read_weights(digits.WEIGHTS), digits.WEIGHTS)
    network.eval()
    preprocessing = DigitLevels()
    return TorchBackbone(
        "digits",
        network,
        labels=digits.LABELS if labels is None else read_labels(labels, len(digits.LABELS)),
        input_shape=preprocessing.input_shape,
        preprocessing=preprocessing,
        device=device,
        precision=precision,
    )
