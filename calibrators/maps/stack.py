"""A stack: the calibrated probabilities of several methods, mixed by weights on the simplex (Wolpert 1992).

What `auto` answers where no single method is as good. Its logits are the logarithm of the mixture, and a box
is applied to them: the answer is the projection of the mixture onto the box, as for any other calibrator.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from boxcal.calibrators.maps.base import LogitMap
from boxcal.calibrators.maps.parameters import Array, Parameters, Values

WEIGHTS, FLOOR = "stack_weights", "stack_floor"
OPENING, CLOSING, BETWEEN = "stack(", ")", ","


class Component(NamedTuple):
    """One of the mixed methods."""

    method: str
    logit_map: LogitMap


class Stack(LogitMap):
    """`T(g) = log((1 - e) sum_m w_m softmax(T_m(g)) + e / K)`, w on the simplex.

    e, the `floor`, keeps the loss of a sample that no component expects finite.
    """

    is_listed = False
    normalises = True

    def __init__(
        self, components: Sequence[Component], weights: Sequence[float] | Array, floor: float
    ) -> None:
        self.num_classes, self.components = components[0].logit_map.num_classes, tuple(components)
        self.name = self.method  # type: ignore[misc]
        self.has_onnx_form = all(one.logit_map.has_onnx_form for one in components)
        self._own = {WEIGHTS: np.array(weights, np.float64), FLOOR: np.array(floor, np.float64)}

    @property
    def method(self) -> str:
        """The stack as the name of a method: `stack(ts,mix+sms)`."""
        return OPENING + BETWEEN.join(component.method for component in self.components) + CLOSING

    @property
    def parameters(self) -> dict[str, Array]:  # type: ignore[override]
        """The weights, the floor e, and what each component has, by its place."""
        found = dict(self._own)
        for place, component in enumerate(self.components):
            found |= {f"{place}.{name}": value for name, value in component.logit_map.parameters.items()}
        return found

    def formula(self, ops: ModuleType, p: Parameters, scores: Values) -> Values:
        """Mix what the components make of (N, K) logits, and return the log."""
        parts = []
        for place, component in enumerate(self.components):
            own = {
                name.removeprefix(f"{place}."): value
                for name, value in p.items()
                if name.startswith(f"{place}.")
            }
            parts.append(ops.softmax(component.logit_map.formula(ops, own, scores)))
        mixed = (p[WEIGHTS][:, None, None] * ops.stack(parts)).sum(0)
        return ops.log((1.0 - p[FLOOR]) * mixed + p[FLOOR] / self.num_classes)

    def invalid_reason(self) -> str | None:
        """Say so if the weights do not add up to 1, the floor is none, or a component is invalid."""
        weights, floor = self._own[WEIGHTS], self._own[FLOOR].item()
        if weights.min() < 0.0 or not math.isclose(weights.sum(), 1.0, abs_tol=1e-9):
            return f"the stack's weights must be non-negative and sum to 1; they are {weights.tolist()}"
        if not 0.0 < floor < 1.0:
            return f"the stack's floor is {floor!r}"
        return next((why for one in self.components if (why := one.logit_map.invalid_reason())), None)

    def describe(self) -> dict[str, Any]:
        """Give each component with its weight and its parameters."""
        parts = [
            {"method": one.method, "weight": weight, **one.logit_map.describe()}
            for one, weight in zip(self.components, self._own[WEIGHTS].tolist(), strict=True)
        ]
        return {"components": parts, "floor": self._own[FLOOR].item()}


def component_names(method: str) -> list[str]:
    """Give the names in that of a stack, whatever follows it; none where it is no stack's."""
    inner, closing, _ = method.removeprefix(OPENING).partition(CLOSING)
    return inner.split(BETWEEN) if closing and method.startswith(OPENING) else []
