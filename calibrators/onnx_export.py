"""A calibrator as an ONNX model, so that it can be deployed beside the classifier without boxcal."""

from __future__ import annotations

import io
import warnings
from typing import Any

import torch
from torch import Tensor, nn

from boxcal.calibrators.array_calibrator import TwoStages
from boxcal.calibrators.errors import ExportError
from boxcal.calibrators.operator import Bounds, box_constrained_softmax

OPSET = 17


class _Graph(nn.Module):
    """What is recorded: the logit map, the bound map and the operator."""

    def __init__(self, calibrator: TwoStages) -> None:
        super().__init__()
        self.calibrator = calibrator

    def forward(self, scores: Tensor, lower: Tensor | None = None, upper: Tensor | None = None) -> Tensor:
        mapped = self.calibrator.mapped(scores.double())
        low, high = self.calibrator.bound_map(mapped)
        if lower is not None and upper is not None:
            low, high, _ = Bounds.meet(
                (low, high), (lower.double(), upper.double()), self.calibrator.num_classes
            )
        return box_constrained_softmax(mapped, low, high)


def export(calibrator: TwoStages, *, request_bounds: bool) -> bytes:
    """Give the ONNX model's bytes; see `Calibrator.to_onnx`."""
    if calibrator.logit_map.input_shift is not None:
        raise ExportError(
            f"the method {calibrator.method!r} shifts the classifier's inputs, which an ONNX model of the"
            " calibrator alone does not see"
        )
    width, classes = calibrator.width, calibrator.num_classes
    names: list[str] = [calibrator.reads]
    examples = [torch.linspace(-1.0, 1.0, 2 * width).reshape(2, width)]
    if request_bounds:
        names += ["lower", "upper"]
        examples += [torch.zeros(2, classes), torch.ones(2, classes)]
    file: Any = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the number of classes is fixed, and torch warns about that
        try:
            torch.onnx.export(
                _Graph(calibrator),
                tuple(examples),
                file,
                dynamo=False,
                opset_version=OPSET,
                input_names=names,
                output_names=["probabilities"],
                dynamic_axes={name: {0: "N"} for name in [*names, "probabilities"]},
            )
        except torch.onnx.errors.UnsupportedOperatorError as error:
            raise ExportError(
                f"the method {calibrator.method!r} cannot be exported to ONNX: {error}"
            ) from error
    content: bytes = file.getvalue()
    return content
