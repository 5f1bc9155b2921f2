"""The backbone `digits` without torch: the same network as an ONNX graph, run by onnxruntime.

Its logits agree with those of `digits.py` within rounding, and its fingerprint is that of the same weights,
so that both serve the same calibrators. It gives neither features nor gradients.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from safetensors.numpy import load_file

from boxcal.models import BackboneError
from boxcal.models.backends.checks import read_labels
from boxcal.models.backends.onnx_backbone import OnnxBackbone
from boxcal.models.backends.onnx_file import OnnxFile, Sessions
from boxcal.models.digits_data import LABELS, DigitLevels
from boxcal.models.inputs.base import ImageInputs

GRAPH = Path(__file__).with_name("digits.onnx")
WEIGHTS = GRAPH.with_suffix(".safetensors")


def load_digits_onnx(*, labels: Path | None, device: str, precision: str) -> OnnxBackbone:
    if precision != "float32":
        raise BackboneError(f"'digits' in {precision!r} needs torch: pip install 'boxcal[serve]'.")
    file = OnnxFile(GRAPH, optimize=False)
    backbone = OnnxBackbone(GRAPH, file, Sessions(file, GRAPH, device), labels=labels)
    backbone.name = "digits"
    backbone.labels = LABELS if labels is None else read_labels(labels, len(LABELS))
    backbone.preprocessing = DigitLevels()
    backbone.inputs = ImageInputs(backbone.preprocessing, backbone.input_shape)
    backbone.fingerprint = weights_fingerprint(WEIGHTS)
    return backbone


def weights_fingerprint(path: Path) -> str:
    """Compute what `torch_backbone.tensors_fingerprint` gives for the weights of a file."""
    digest, tensors = hashlib.sha256(), load_file(path)
    for key in sorted(tensors):
        value = tensors[key]
        digest.update(f"{key} torch.{value.dtype} {value.shape}\n".encode())
        digest.update(value.tobytes())
    return digest.hexdigest()
