"""What every monitor shares: its state as arrays by name, from which it can be restored to the last bit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

Array = np.ndarray[Any, Any]


class StatefulFold:
    """A fold over rows whose state is the arrays named in `STATE`, and that of the folds it consists of."""

    STATE: ClassVar[tuple[str, ...]] = ()

    def _parts(self) -> Mapping[str, StatefulFold]:
        """Return the folds that it consists of, by name."""
        return {}

    def state_dict(self) -> dict[str, Array]:
        """Copy the state: float64 or int64 arrays by name, those of a part by `part.name`."""
        state = {name: np.array(getattr(self, name)) for name in self.STATE}
        for part, fold in self._parts().items():
            state |= {f"{part}.{name}": value for name, value in fold.state_dict().items()}
        return state

    def load_state_dict(self, state: Mapping[str, Array]) -> None:
        """Restore a state; what follows gives the same numbers as without the interruption.

        Raises
        ------
        ValueError
            A name is missing or unknown, or an array has another shape.
        """
        parts = self._parts()
        mine = {name: array for name, array in state.items() if name.partition(".")[0] not in parts}
        if set(mine) != set(self.STATE):
            raise ValueError(f"the state needs {', '.join(self.STATE)}; it has {', '.join(sorted(mine))}")
        for name, array in mine.items():
            kept = getattr(self, name)
            if kept.shape != np.shape(array):
                raise ValueError(f"`{name}` of the state has shape {np.shape(array)}, not {kept.shape}")
        for part, fold in parts.items():
            start = f"{part}."
            fold.load_state_dict(
                {name.removeprefix(start): array for name, array in state.items() if name.startswith(start)}
            )
        for name, array in mine.items():
            getattr(self, name)[...] = array


def check_rows(probabilities: Array, labels: Array, num_classes: int) -> tuple[Array, Array]:
    """Check N rows of probabilities and their labels, and bring them to float64 and int64.

    Raises
    ------
    ValueError
        A shape does not fit, a row is no distribution (to 1e-3), or a label is no class.
    """
    rows, truth = np.ascontiguousarray(probabilities, dtype=np.float64), np.ascontiguousarray(labels)
    if rows.ndim != 2 or rows.shape[1] != num_classes or truth.shape != rows.shape[:1]:
        raise ValueError(
            f"rows of shape {rows.shape} with labels of shape {truth.shape}"
            f" are not (N, {num_classes}) and (N,)"
        )
    if truth.dtype.kind not in "iu":
        raise ValueError(f"labels are integers, not {truth.dtype}")
    wrong = ~(np.abs(rows.sum(1) - 1.0) <= 1e-3)
    if rows.min(initial=0.0) < 0.0:
        wrong |= (rows < 0.0).any(1)
    if wrong.any():
        row = int(np.argmax(wrong))
        raise ValueError(f"row {row} is no distribution: it sums to {rows[row].sum():g}")
    wrong = (truth < 0) | (truth >= num_classes)
    if wrong.any():
        row = int(np.argmax(wrong))
        raise ValueError(f"label {truth[row]} of row {row} is not one of {num_classes} classes")
    return rows, truth.astype(np.int64)
