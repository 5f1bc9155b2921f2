"""A calibrator as an ONNX model, so that it can be deployed beside the classifier without boxcal."""

from __future__ import annotations

import io
import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from boxcal.calibrators.errors import ExportError
from boxcal.calibrators.operator import Bounds, box_constrained_softmax

if TYPE_CHECKING:
    from boxcal.calibrators.calibrator import Calibrator

OPSET = 17


class _Graph(nn.Module):
    """What is recorded: the logit map, the bound map and the operator."""

    def __init__(self, calibrator: Calibrator) -> None:
        super().__init__()
        self.calibrator = calibrator
        self.logit_map, self.bound_map = calibrator.logit_map, calibrator.bound_map
        self.num_classes = calibrator.num_classes

    def forward(self, scores: Tensor, lower: Tensor | None = None, upper: Tensor | None = None) -> Tensor:
        mapped = self.calibrator.mapped(scores.double())
        low, high = self.bound_map.box(mapped)
        if lower is not None and upper is not None:
            low, high, _ = Bounds.meet((low, high), (lower.double(), upper.double()), self.num_classes)
        return box_constrained_softmax(mapped, low, high)


def export(calibrator: Calibrator, *, request_bounds: bool) -> bytes:
    """Give the ONNX model's bytes; see `Calibrator.to_onnx`."""
    if calibrator.input_shift is not None:
        raise ExportError(
            f"the method {calibrator.method!r} shifts the classifier's inputs, which an ONNX model of the"
            " calibrator alone does not see"
        )
    width, classes = calibrator.logit_map.width, calibrator.num_classes
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
