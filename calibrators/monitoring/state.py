"""What every monitor shares: its state as arrays by name, from which it can be restored to the last bit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

Array = np.ndarray[Any, Any]


class Fold:
    """A fold over rows whose state is the arrays named in `STATE`, and that of the folds it consists of."""

    STATE: ClassVar[tuple[str, ...]] = ()

    def _parts(self) -> Mapping[str, Fold]:
        """Return the folds that it consists of, by name."""
        return {}

    def state_dict(self) -> dict[str, Array]:
        """Copy the state: float64 or int64 arrays by name, those of a part by `part.name`."""
        return {name: np.array(getattr(self, name)) for name in self.STATE} | states(self._parts())

    def load_state_dict(self, state: Mapping[str, Array]) -> None:
        """Restore a state; what follows gives the same numbers as without the interruption.

        Raises
        ------
        ValueError
            A name is missing or unknown, or an array has another shape.
        """
        parts = self._parts()
        own = {
            name: np.asarray(value) for name, value in state.items() if name.partition(".")[0] not in parts
        }
        if set(own) != set(self.STATE):
            raise ValueError(f"the state needs {', '.join(self.STATE)}; it has {', '.join(sorted(own))}")
        for name in self.STATE:
            mine, theirs = getattr(self, name), own[name]
            if mine.shape != theirs.shape:
                raise ValueError(f"`{name}` of the state has shape {theirs.shape}, not {mine.shape}")
        load_states(parts, state)
        for name in self.STATE:
            getattr(self, name)[...] = own[name]


def states(parts: Mapping[str, Fold]) -> dict[str, Array]:
    """Copy the states of several folds: each array by `part.name`."""
    return {
        f"{part}.{name}": value for part, fold in parts.items() for name, value in fold.state_dict().items()
    }


def load_states(parts: Mapping[str, Fold], state: Mapping[str, Array]) -> None:
    """Restore what `states` returned; other names are left alone.

    Raises
    ------
    ValueError
        As for `Fold.load_state_dict`.
    """
    for part, fold in parts.items():
        start = f"{part}."
        fold.load_state_dict(
            {name.removeprefix(start): value for name, value in state.items() if name.startswith(start)}
        )


def check_rows(probabilities: Array, labels: Array, num_classes: int) -> tuple[Array, Array]:
    """Check N rows of probabilities and their labels, and bring them to float64 and int64.

    Raises
    ------
    ValueError
        A shape does not fit, a row is no distribution (to 1e-3), or a label is no class.
    """
    rows = np.ascontiguousarray(probabilities, dtype=np.float64)
    own = np.ascontiguousarray(labels)
    if rows.ndim != 2 or rows.shape[1] != num_classes or own.shape != rows.shape[:1]:
        raise ValueError(
            f"rows of shape {rows.shape} with labels of shape {own.shape} are not (N, {num_classes}) and (N,)"
        )
    if own.dtype.kind not in "iu":
        raise ValueError(f"labels are integers, not {own.dtype}")
    wrong = ~(np.abs(rows.sum(1) - 1.0) <= 1e-3)
    if rows.min(initial=0.0) < 0.0:
        wrong |= (rows < 0.0).any(1)
    if wrong.any():
        wrong = np.flatnonzero(wrong)
        raise ValueError(f"row {wrong[0]} is no distribution: it sums to {rows[wrong[0]].sum():g}")
    wrong = np.flatnonzero((own < 0) | (own >= num_classes))
    if wrong.size:
        raise ValueError(f"label {own[wrong[0]]} of row {wrong[0]} is not one of {num_classes} classes")
    return rows, own.astype(np.int64)
