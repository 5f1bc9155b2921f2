"""`nc`: neural clamping, a shift of the backbone's inputs and a temperature (Tang et al. 2024)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any, ClassVar

import numpy as np

from boxcal.calibrators.data import ValidationSet
from boxcal.calibrators.errors import MissingDataError
from boxcal.calibrators.maps.base import LogitMap
from boxcal.calibrators.maps.parameters import Array, Gradients, Limits, Parameters, Shapes, Values, Vjp
from boxcal.calibrators.maps.temperature import HIGHEST, LOWEST

WEIGHT = 0.1
"""Of the squared size of the shift, as in the paper."""
BATCH = 256


class NeuralClamping(LogitMap):
    """`T(x) = backbone(x + shift) / temperature`.

    A calibrator holds the shift and the temperature, not the backbone: whoever predicts adds `input_shift` to
    the inputs and hands over the logits that come of it. While it is fitted the map runs the backbone itself.
    """

    name = "nc"
    shapes: ClassVar[Shapes] = {"temperature": (), "input_shift": None}
    reads = "inputs"
    positive = ("temperature",)
    combines = True

    def __init__(self, num_classes: int, parameters: Mapping[str, Any] | None = None) -> None:
        super().__init__(num_classes, parameters)
        self.backbone: Callable[[Any], Any] | None = None

    def fresh(self) -> dict[str, Any]:
        """Shift nothing, at the temperature 1."""
        return {"temperature": 1.0, "input_shift": np.zeros(1)}

    def formula(self, ops: ModuleType, p: Parameters, scores: Values) -> Values:
        """Divide (N, K) logits of shifted inputs by the temperature."""
        del ops
        return scores / p["temperature"]

    def __call__(self, scores: Values) -> Values:
        """Map logits of shifted inputs; while fitting, take inputs and run the backbone first."""
        if self.backbone is None:
            return super().__call__(scores)
        mapped, _ = self.vjp(self.parameters, scores)
        return mapped

    def vjp(self, p: Parameters, scores: Array, precomputed: Any = None) -> tuple[Array, Vjp]:
        """Divide, and go back through the backbone: dT = (dg - T dt) / t, g = backbone(x + s)."""
        temperature = p["temperature"]
        if self.backbone is None:
            return scores / temperature, lambda by_mapped, through: (
                {
                    "temperature": -float(np.vdot(by_mapped, scores)) / temperature**2,
                    "input_shift": np.zeros_like(p["input_shift"]),
                },
                by_mapped / temperature if through else None,
            )
        import torch  # noqa: PLC0415 - the backbone is one of torch

        shift = torch.tensor(p["input_shift"], requires_grad=True)
        with torch.enable_grad():
            parts = [
                self.backbone((batch + shift).to(batch.dtype)).double()
                for batch in torch.split(torch.from_numpy(scores), BATCH)
            ]
            logits = torch.cat(parts)
            logits = logits - logits.mean(dim=1, keepdim=True)
        mapped = logits.detach().numpy() / temperature

        def back(by_mapped: Array, through: bool) -> tuple[Gradients, None]:
            del through
            torch.autograd.backward(logits, torch.from_numpy(by_mapped / temperature))
            by_shift = shift.grad if shift.grad is not None else torch.zeros_like(shift)
            by_temperature = -np.vdot(by_mapped, mapped) / temperature
            return {"temperature": by_temperature, "input_shift": by_shift.numpy()}, None

        return mapped, back

    def at(self, coordinates: Array) -> dict[str, Array]:
        """Read the log of the temperature, then the shift."""
        shift = coordinates[1:].reshape(self.parameters["input_shift"].shape)
        return {"temperature": np.exp(coordinates[0]), "input_shift": shift}

    def slopes(self, coordinates: Array, gradients: Mapping[str, Array]) -> Array:
        """Multiply the derivative in the temperature by it."""
        by_log = np.exp(coordinates[0]) * gradients["temperature"]
        return np.concatenate([[by_log], gradients["input_shift"].ravel()])

    def coordinates(self) -> Array:
        """Give the log of the temperature, then the shift."""
        temperature = self.parameters["temperature"].reshape(1)
        return np.concatenate([np.log(temperature), self.parameters["input_shift"].ravel()])

    def prepare(self, data: ValidationSet, tick: Callable[[float], None] = lambda fraction: None) -> None:
        """Take the inputs' shape, and check that the backbone can be differentiated in them."""
        if data.inputs is None or data.backbone is None:
            return
        import torch  # noqa: PLC0415 - the backbone is one of torch

        self.parameters = self.parameters | {"input_shift": np.zeros(data.inputs.shape[1:])}
        probe = torch.tensor(data.inputs[:1], requires_grad=True)
        with torch.enable_grad():
            if not data.backbone(probe).requires_grad:
                raise MissingDataError(
                    "the method 'nc' needs a backbone that can be differentiated in its inputs"
                )
        self.backbone = data.backbone

    @property
    def input_shift(self) -> Array | None:
        return self.parameters["input_shift"]

    def release(self) -> None:
        """Let go of the backbone: from here on the map takes logits."""
        self.backbone = None

    def starts(self) -> Sequence[Array]:
        """No shift, at the temperatures 1 and 2."""
        still = np.zeros(self.parameters["input_shift"].size)
        return [np.concatenate([[math.log(temperature)], still]) for temperature in (1.0, 2.0)]

    def limits(self) -> Limits:
        """Temperatures as for `ts`; any shift."""
        size = self.parameters["input_shift"].size
        return [(math.log(LOWEST), math.log(HIGHEST)), *[(None, None)] * size]

    def penalty(self, p: Parameters) -> tuple[float, Gradients]:
        """Weigh the squared size of the shift."""
        shift = p["input_shift"]
        gradients = {"temperature": np.zeros(()), "input_shift": 2.0 * WEIGHT * shift}
        return WEIGHT * float(np.vdot(shift, shift)), gradients

    def describe(self) -> dict[str, Any]:
        """Return the temperature, and how large the shift is."""
        size = float(np.linalg.norm(self.parameters["input_shift"]))
        return {"temperature": self.parameters["temperature"].item(), "input_shift_norm": size}
