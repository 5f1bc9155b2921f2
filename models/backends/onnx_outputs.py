"""From what an ONNX model returns to logits: which output is served, what it holds, and whether that is true.

Exports of scikit-learn, XGBoost and LightGBM return a label and probabilities, as a tensor or as one map for
each sample (ZipMap); support vector machines return scores in place of probabilities. A binary network may
return one number, the sigmoid of a logit.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from boxcal.models import BackboneError
from boxcal.models.backends.spec import ModelSpec

FLOATS = ("tensor(float)", "tensor(double)", "tensor(float16)")
MAPS = ("seq(map(int64,tensor(float)))", "seq(map(string,tensor(float)))")
LABELS = ("tensor(int64)", "tensor(string)")
Scores = NDArray[np.float32]
TOLERANCE = 1e-3  # of probabilities and their sums
AGREEMENT = 0.9  # of labels with scores; ties may be broken otherwise
TINY = float(np.finfo(np.float32).tiny)


class Output:
    """The output of an ONNX model that is served as its logits, and how its numbers become logits."""

    def __init__(self, entries: Sequence[Any], spec: ModelSpec, path: Path) -> None:
        self._path = path
        types = {entry.name: entry.type for entry in entries}
        self.name = spec.output if spec.output is not None else _only(types, path)
        if self.name not in types:
            raise BackboneError(f"{path} has no output {self.name!r}; it has the outputs {', '.join(types)}.")
        if types[self.name] not in (*FLOATS, *MAPS):
            raise BackboneError(
                f"{path}: the output {self.name} has the type {types[self.name]}; scores are floats."
            )
        self._is_map = types[self.name] in MAPS
        label = next((name for name, kind in types.items() if kind in LABELS), None)
        self._is_of_classifier = self._is_map or (len(types) == 2 and label is not None)
        self.read = (self.name,) if label is None or spec.output is not None else (self.name, label)
        self._spec = spec
        self._is_declared = "outputs" in spec.model_fields_set
        self._has_one_column = spec.activation == "sigmoid"
        if self._is_declared:
            self._holds_probabilities = spec.outputs == "probabilities"
        else:
            self._holds_probabilities = self._has_one_column or self._is_of_classifier
        self._keys: tuple[Any, ...] = ()

    @property
    def declared(self) -> dict[str, str | None]:
        """What changes the logits of the same file, known after `check`: None for each default."""
        return {
            "outputs": "probabilities" if self._holds_probabilities else None,
            "output": self._spec.output,
            "activation": "sigmoid" if self._has_one_column else None,
        }

    @property
    def keys(self) -> tuple[str, ...] | None:
        """Return the class names of a map, known after `check`; None for a tensor."""
        return tuple(map(str, self._keys)) or None

    def scores(self, raw: Any) -> Scores:
        """Bring what the model returned to float32 (N, K), or (N, 1)."""
        if self._is_map:
            return np.array([[row[key] for key in self._keys] for row in raw], np.float32)
        with np.errstate(over="ignore"):  # what overflows is refused as infinite
            return in_rows(raw.astype(np.float32, copy=False))

    def logits(self, raw: Any) -> Scores:
        """Turn what the model returned into float32 logits (N, K)."""
        scores = self.scores(raw)
        if self._has_one_column:
            column = scores[:, 0].astype(np.float64)
            if self._holds_probabilities:
                column = np.log(np.maximum(column, TINY)) - np.log(np.maximum(1 - column, TINY))
            return np.stack([np.zeros_like(column), column], axis=1).astype(np.float32)
        return np.log(np.maximum(scores, np.float32(TINY))) if self._holds_probabilities else scores

    def check(
        self, probes: Sequence[Any], said: Sequence[Any] = (), *, found: tuple[str, ...] | None = None
    ) -> int:
        """Check what the model returned for some random inputs, and return K."""
        if self._is_map:
            self._keys = tuple(probes[0][0])
        scores = np.concatenate([self.scores(raw) for raw in probes])
        where = f"{self._path}: the output {self.name}"
        if scores.ndim != 2:
            raise BackboneError(f"{where} has shape {tuple(scores.shape)}, expected (N, K).")
        # Trees may put NaN into the sums; then nothing is said about them.
        within = bool(((scores >= -TOLERANCE) & (scores <= 1 + TOLERANCE)).all())
        if self._is_of_classifier:
            self._has_one_column |= scores.shape[1] == 1 and not self._is_map
            if not self._is_declared:
                self._holds_probabilities = within or not bool(np.isfinite(scores).all())
        if self._is_of_classifier and not self._is_declared and not self._holds_probabilities:
            logits = np.concatenate([self.logits(raw) for raw in probes])
            self._check_labels(logits, said, self.keys or found, where)
        if self._has_one_column:
            self._check_sigmoid(scores, where)
            return 2
        if scores.shape[1] < 2:
            held = "probability" if within else "logit"
            more = "" if within else ', "outputs": "logits"'
            raise BackboneError(
                f"{where} has shape {tuple(scores.shape)}, expected (N, K). Declare "
                f'"activation": "sigmoid"{more} if it is the {held} of the second of two classes.'
            )
        sums_to_one = within and bool(np.abs(scores.sum(1) - 1).max() < TOLERANCE)
        if sums_to_one and not self._holds_probabilities:
            raise BackboneError(
                f"{where} sums to 1: it seems to hold probabilities. Export the logits, or declare "
                '"outputs": "probabilities".'
            )
        if within and not sums_to_one and len(scores) > 1:
            raise BackboneError(
                f"{where} lies between 0 and 1 for random inputs of any size and does not sum to 1 (but to "
                f"{float(scores[0].sum()):.4g}): {scores.shape[1]} independent sigmoids, each with its own "
                "question (multi-label). Classes that exclude each other are needed."
            )
        if self._holds_probabilities and not sums_to_one:
            raise BackboneError(
                f"{where} does not sum to 1, but is declared to hold probabilities. Declare "
                '"outputs": "logits" if it holds scores.'
            )
        return int(scores.shape[1])

    def _check_labels(
        self, logits: Scores, said: Sequence[Any], found: tuple[str, ...] | None, where: str
    ) -> None:
        """Check that the labels are those of the largest scores, which may be of pairs of classes instead."""
        if found is None or len(found) != logits.shape[1]:
            found = tuple(map(str, range(logits.shape[1])))
        labels = [str(label) for part in said for label in np.ravel(part)]
        agreed = [found[index] == label for index, label in zip(logits.argmax(1), labels, strict=False)]
        if not agreed or np.mean(agreed) < AGREEMENT:
            raise BackboneError(
                f"{where} has {logits.shape[1]} scores, whose largest is often not that of the label beside "
                'it. If each is of one class, declare "outputs": "logits", and "labels" in the order of '
                "the scores."
            )

    def _check_sigmoid(self, scores: Scores, where: str) -> None:
        if scores.shape[1] != 1:
            raise BackboneError(
                f"{where} has {scores.shape[1]} columns; with the activation sigmoid it has one, the "
                "probability of the second class."
            )
        if self._holds_probabilities and not bool(((scores >= -TOLERANCE) & (scores <= 1 + TOLERANCE)).all()):
            raise BackboneError(
                f"{where} is {float(scores.max()):.4g} for a random input, no sigmoid. Declare also "
                '"outputs": "logits" if the sigmoid is not part of the model.'
            )


def in_rows(values: NDArray[Any]) -> NDArray[Any]:
    """Drop dimensions of size 1: (N, K, 1, 1) and (N, 1, 1, K) become (N, K), and (N,) becomes (N, 1)."""
    width = max(values.shape[1:], default=1)
    return values.reshape(len(values), width) if values.size == len(values) * width else values


def class_labels(model: onnx.ModelProto | None) -> tuple[str, ...] | None:
    """Return the class names that the classifier of an exported pipeline carries; None without one."""
    for node in reversed(model.graph.node if model is not None else ()):
        for attribute in node.attribute:
            if attribute.name in ("classlabels_strings", "classlabels_int64s", "classlabels_ints"):
                names = [value.decode() for value in attribute.strings] or list(map(str, attribute.ints))
                if names:
                    return tuple(names)
    return None


def _only(types: dict[str, str], path: Path) -> str:
    """Choose the output that holds scores; one beside it may hold labels."""
    if "logits" in types:
        return "logits"
    scores = [name for name, kind in types.items() if kind in (*FLOATS, *MAPS)]
    others = [name for name, kind in types.items() if kind not in (*FLOATS, *MAPS, *LABELS)]
    if len(scores) == 1 and not others:
        return scores[0]
    raise BackboneError(
        f"{path} has the outputs {', '.join(types)}; call the one to serve 'logits', or declare it as "
        f'"output" in {path.with_suffix(".json").name}.'
    )
