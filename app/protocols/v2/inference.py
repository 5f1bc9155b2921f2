"""From a request of the Open Inference Protocol to the pipeline, and from its rows to output tensors.

REST and gRPC use this. The model `NAME` takes what `/predict` takes, the model `NAME.calibrator` takes logits
or probabilities, as `/calibrate` does. The version of a model is the version of its calibrator.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from boxcal.app.http.problems import (
    BoxcalError,
    CalibratorNotFound,
    InvalidBounds,
    InvalidInput,
    InvalidParameter,
    ModelNotFound,
    RequestTooLarge,
)
from boxcal.app.predict import options as request_options
from boxcal.app.predict.answers import CalibratedAnswer, Rows, rank
from boxcal.app.predict.bodies import COPIED, SCORES
from boxcal.app.predict.inputs import Input, from_base64
from boxcal.app.predict.options import SIDES, Options
from boxcal.app.predict.pipeline import Pipeline
from boxcal.app.protocols.v2.tensors import BYTES, Array
from boxcal.app.tables.arrays import as_logits, check_scores
from boxcal.calibrators.errors import hint, nearest
from boxcal.calibrators.scores import LOGITS
from boxcal.models.backends.backbone import Backbone
from boxcal.models.inputs.rows import RowInputs
from boxcal.models.inputs.texts import TextInputs

CALIBRATOR = ".calibrator"
OUTPUTS = ("probabilities", "label", "index", "bound", "logits")
DEFAULT_OUTPUTS = ("probabilities", "label", "index")
IGNORED = ("sequence_id", "sequence_start", "sequence_end", "priority", "binary_data_output")
"""Parameters that clients send by themselves and that change nothing here."""
PARAMETERS = (*SIDES, "timeout", "timeout_ms", "calibrator")
NUMBERS_PER_ROW = NUMBERS_PER_OBJECT = 64
"""The outputs of a row, and an object of `BYTES`, take as long as so many numbers."""
LISTED_BYTES = 256
"""Of one class in the form of the classification extension, as text and written."""
MAX_PARAMETERS = 64
LONGEST_VERSION = 9
"""Digits of a version that options can have."""
MOST_BOUNDED_ROWS, MOST_BOUNDED_NUMBERS, BOUNDED_ROWS_AT_ONCE = 1024, 2**16, 32
"""Rows with bounds of their own in one request, and classes times rows: each row is a request of its own."""


@dataclass(slots=True)
class InferenceRequest:
    model: str  # As the client names them; an empty version is the active calibrator
    version: str
    inputs: Mapping[str, Array]
    # Names of the outputs, and how many classes each lists in the form of the classification extension; 0 for
    # the tensor itself
    outputs: Sequence[tuple[str, int]] = ()
    parameters: Mapping[str, Any] = field(default_factory=dict)


def class_count(sent: Any) -> int:
    """Check the parameter `classification` of an output."""
    if type(sent) is not int or sent < 0:
        raise InvalidParameter(f"classification is {sent!r:.50}; it is the number of classes to list.")
    return sent


def check_input_parameters(name: str, parameters: Collection[str]) -> None:
    """Refuse a parameter of an input that is one of its request; others belong to the client."""
    if misplaced := next((one for one in PARAMETERS if one in parameters), None):
        raise InvalidParameter(
            f"The input {name!r:.100} has the parameter {misplaced}; it is one of the request."
        )


def check_query(names: Collection[str]) -> None:
    """Refuse a parameter in the query string that is one of a request, or probably meant as one."""
    if len(names) > MAX_PARAMETERS:
        raise InvalidParameter(f"A query string has at most {MAX_PARAMETERS} parameters.")
    for name in names:
        if meant := name if name in PARAMETERS else nearest(name, PARAMETERS):
            raise InvalidParameter(
                f"The query string has {name!r:.100}; {meant} belongs in the `parameters` of the request."
            )


@dataclass(frozen=True, slots=True)
class Answered:
    """A response: tensors by name, with the version of the calibrator."""

    model: str
    version: str
    outputs: list[tuple[str, Array]]
    relaxed: bool


@dataclass(frozen=True, slots=True)
class TensorDescription:
    """An input or output of a model; -1 is a free size."""

    name: str
    datatype: str
    shape: tuple[int, ...]


class Models:
    """The two models that this protocol sees in one: with its backbone, and its calibrators alone.

    `backbone`: its inputs are those of the model; without a model there is `NAME.calibrator` alone. `counts`:
    requests, samples and nanoseconds by model, and by outcome for the requests.
    """

    def __init__(self, backbone: Backbone, pipeline: Pipeline) -> None:
        self._backbone = backbone
        self._pipeline = pipeline
        self.counts: Counter[tuple[str, str]] = Counter()
        self.names = [pipeline.model] if backbone.inputs.kind != "none" else []
        self.names.append(pipeline.model + CALIBRATOR)

    def inputs(self, model: str) -> list[TensorDescription]:
        """Describe what a model takes; of several forms of the same inputs a request has one."""
        classes = self._backbone.num_classes
        if model.endswith(CALIBRATOR):
            return [TensorDescription("logits", "FP64", (-1, classes))]
        inputs = self._backbone.inputs
        if isinstance(inputs, RowInputs):
            return [
                TensorDescription(one.name, _datatype(one.dtype), (-1, one.width)) for one in inputs.columns
            ]
        if isinstance(inputs, TextInputs):
            if "text" in inputs.members:
                return [TensorDescription("text", BYTES, (-1,))]
            return [TensorDescription(name, "INT64", (-1, -1)) for name in inputs.names]
        if inputs.kind == "images":
            return [TensorDescription("image", BYTES, (-1,))]
        return [TensorDescription("tensor", "FP32", (-1, *inputs.shape))]

    def outputs(self) -> list[TensorDescription]:
        """Describe what both models return."""
        classes = self._backbone.num_classes
        numbers, texts = ("probabilities", "logits"), ("label", "bound")
        return [
            *(TensorDescription(name, "FP64", (-1, classes)) for name in numbers),
            *(TensorDescription(name, BYTES, (-1,)) for name in texts),
            TensorDescription("index", "INT64", (-1,)),
        ]

    async def infer(self, asked: InferenceRequest) -> Answered:
        began = time.perf_counter_ns()
        try:
            wanted = _wanted(asked)
            answer = await self._answer(asked)
        except BaseException as error:
            self.counts[asked.model, "fail"] += 1
            if asked.version and isinstance(error, BoxcalError) and error.kind is CalibratorNotFound:
                raise CalibratorNotFound(f"{asked.model} has no version {asked.version!r:.50}.") from error
            raise
        self.counts[asked.model, "success"] += 1
        self.counts[asked.model, "samples"] += len(answer.rows)
        self.counts[asked.model, "ns"] += time.perf_counter_ns() - began
        outputs = await self._pipeline.computed(
            max(answer.rows.probabilities.size, NUMBERS_PER_ROW * len(answer.rows)),
            lambda: [(name, _output(answer, name, top)) for name, top in wanted],
        )
        relaxed = bool(answer.rows.relaxed.any())
        return Answered(asked.model, str(answer.served.version), outputs, relaxed)

    async def _answer(self, asked: InferenceRequest) -> CalibratedAnswer:
        document = _options(asked)
        bounds = {side: asked.inputs[side] for side in SIDES if side in asked.inputs}
        given = {name: array for name, array in asked.inputs.items() if name not in bounds}
        rows = _rows(given)
        listed = rows * sum([min(top, self._backbone.num_classes) for _, top in asked.outputs if top])
        if listed * LISTED_BYTES > self._pipeline.memory.limit:
            raise RequestTooLarge(
                f"`classification` lists {listed:,} classes, which need about {listed * LISTED_BYTES:,} "
                f"bytes; the limit is {self._pipeline.memory.limit:,}."
            )
        per_row = _bounds(bounds, document, rows, self._backbone.num_classes) if bounds else None
        if per_row is None:
            return await self._run(asked.model, rows, given, request_options.from_json(document or None))
        if rows > MOST_BOUNDED_ROWS or rows * self._backbone.num_classes > MOST_BOUNDED_NUMBERS:
            raise InvalidBounds(
                f"The request has bounds for each of {rows:,} rows of {self._backbone.num_classes:,} "
                f"classes; at most {MOST_BOUNDED_ROWS:,} rows and {MOST_BOUNDED_NUMBERS:,} numbers may have "
                "their own."
            )
        # One calibrator for all rows, also if another one is activated meanwhile.
        version = document.get("calibrator", "active")
        document["calibrator"] = self._pipeline.active_version if version == "active" else version
        runs = (
            self._run(
                asked.model,
                1,
                {name: array[row : row + 1] for name, array in given.items()},
                request_options.from_json({**document, "bounds": one}),
            )
            for row, one in enumerate(per_row)
        )
        answers: list[CalibratedAnswer] = []
        while some := list(islice(runs, BOUNDED_ROWS_AT_ONCE)):
            answers += await asyncio.gather(*some)
        joined = Rows.join([answer.rows for answer in answers])
        first = answers[0]
        return CalibratedAnswer(first.model, first.labels, first.served, joined, first.options, first.seconds)

    async def _run(
        self, model: str, rows: int, given: Mapping[str, Array], options: Options
    ) -> CalibratedAnswer:
        pipeline = self._pipeline
        with pipeline.memory_for(rows, options, as_json=False), request_options.timeout_of(options):
            if model.endswith(CALIBRATOR):
                classes = self._backbone.num_classes
                numbers = sum(array.size for array in given.values())
                answer = await pipeline.calibrate(
                    lambda check: _logits(given, classes, check), numbers, options, is_array=True
                )
            else:
                pipeline.check_room(options, rows)
                size = sum(array.size if array.dtype.kind == "O" else 0 for array in given.values())
                samples = await pipeline.computed(NUMBERS_PER_OBJECT * size, lambda: self._samples(given))
                answer = await pipeline.predict(samples, options)
            if answer.rows.probabilities.nbytes <= COPIED:
                pipeline.count(answer)
            else:
                await pipeline.write(answer, lambda _: [])
            return answer

    def _samples(self, given: Mapping[str, Array]) -> Any:
        """Bring the inputs of a request to what the pipeline decodes."""
        inputs = self._backbone.inputs
        if isinstance(inputs, RowInputs):
            return _features(given, inputs)
        if len(given) == 1:
            ((name, array),) = given.items()
            if name == "image" and "image" in inputs.members:
                return [Input("image", _image(one, f"image[{n}]")) for n, one in enumerate(array.ravel())]
            if name == "text" and "text" in inputs.members:
                return [Input("text", _text(one)) for one in array.ravel()]
            if name == "tensor" and "tensor" in inputs.members:
                return _numbers(array, name)
        if isinstance(inputs, TextInputs):
            _known(given, inputs.names)
            lists = {name: _numbers(array, name).tolist() for name, array in given.items()}
            return [
                Input("tokens", {name: rows[row] for name, rows in lists.items()})
                for row in range(_rows(given))
            ]
        raise InvalidInput(_unknown(given, [one for one in inputs.members if one != "cells"]))


def _wanted(asked: InferenceRequest) -> Sequence[tuple[str, int]]:
    seen: set[str] = set()
    for name, _ in asked.outputs:
        if name in seen:
            raise InvalidParameter(f"The request has two outputs {name!r:.100}; it may name each once.")
        seen.add(name)
        if name not in OUTPUTS:
            outputs = f"the outputs are {', '.join(OUTPUTS)}."
            raise InvalidParameter(f"There is no output {name!r:.100}{hint(name, OUTPUTS, outputs)}")
    return asked.outputs or [(name, 0) for name in DEFAULT_OUTPUTS]


def _options(asked: InferenceRequest) -> dict[str, Any]:
    """Turn the parameters of a request into options of the pipeline."""
    if len(asked.parameters) > MAX_PARAMETERS:  # an unknown one is compared with all that there are
        raise InvalidParameter(f"A request has at most {MAX_PARAMETERS} parameters.")
    document: dict[str, Any] = {}
    for name, value in asked.parameters.items():
        if name in IGNORED:
            continue
        if name in SIDES:
            document.setdefault("bounds", {})[name] = value
        elif name == "timeout":  # microseconds, as for Triton
            if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**63:
                raise InvalidParameter(f"timeout is {value!r:.100}; it is a number of microseconds.")
            if value:
                document["timeout_ms"] = value / 1e3
        elif name in PARAMETERS:
            document[name] = value
        elif meant := hint(name, PARAMETERS):  # others belong to the client: `content_type`, `headers`
            raise InvalidParameter(
                f"There is no parameter {name!r:.100}{meant} The parameters are {', '.join(PARAMETERS)}."
            )
    if asked.version:
        version = _version(asked)
        if document.get("calibrator") not in (None, version):
            given = document["calibrator"]
            raise InvalidParameter(
                f"The version is {version} and calibrator is {given!r:.50}; give one of them."
            )
        document["calibrator"] = version
    return document


def _version(asked: InferenceRequest) -> int:
    if not (asked.version.isascii() and asked.version.isdecimal()):
        raise ModelNotFound(f"The version {asked.version!r:.50} of {asked.model} is no number.")
    if len(asked.version) > LONGEST_VERSION:
        raise ModelNotFound(f"{asked.model} has no version {asked.version!r:.50}.")
    return int(asked.version)


def _rows(given: Mapping[str, Array]) -> int:
    """Return N, which all inputs have."""
    counts = {array.shape[0] if array.ndim else 0 for array in given.values()}
    if len(counts) != 1 or counts == {0}:
        shapes = ", ".join(f"{name!r:.50} {list(array.shape)}" for name, array in given.items()) or "none"
        raise InvalidInput(f"The inputs must have the same number of rows, at least one; got {shapes}.")
    return counts.pop()


def _bounds(
    bounds: Mapping[str, Array], document: dict[str, Any], rows: int, classes: int
) -> Iterator[dict[str, Any]] | None:
    """Put bounds (K) into the options; return the bounds of each row if some are (N, K)."""
    several: dict[str, NDArray[np.float64]] = {}
    for side, array in bounds.items():
        if array.dtype.kind not in "fiu" or array.shape not in {(classes,), (rows, classes), (1, classes)}:
            raise InvalidBounds(
                f"The input {side!r} has the shape {list(array.shape)}; bounds are numbers ({classes}) or "
                f"({rows}, {classes})."
            )
        if side in document.get("bounds", {}):
            raise InvalidBounds(f"Give the {side} bounds once, as an input or as a parameter.")
        values = array.astype(np.float64)
        if values.ndim == 2 and len(values) > 1:
            several[side] = values
        else:
            document.setdefault("bounds", {})[side] = values.reshape(-1).tolist()
    if not several:
        return None
    shared = document.pop("bounds", {})
    return (
        {**shared, **{side: values[row].tolist() for side, values in several.items()}} for row in range(rows)
    )


def _logits(given: Mapping[str, Array], classes: int, check_finite: bool) -> NDArray[np.float64]:
    if len(given) > 1 and given.keys() <= set(SCORES):
        raise InvalidInput(f"The request has the inputs {' and '.join(given)}; give one of them.")
    if len(given) != 1 or next(iter(given)) not in SCORES:
        raise InvalidInput(_unknown(given, SCORES))
    ((name, array),) = given.items()
    check_finite |= name != LOGITS
    return as_logits(
        check_scores(_numbers(array, name), classes, name, check_finite=check_finite), name, array.dtype
    )


def _numbers(array: Array, name: str) -> Array:
    """Refuse an array of strings."""
    if array.dtype.kind not in "fiub":
        raise InvalidInput(f"The input {name!r} has the type {BYTES}; it must have numbers.")
    return array


def _features(given: Mapping[str, Array], inputs: RowInputs) -> Any:
    """Bring features, in one array or one for each input of the model, to one array or to rows."""
    arrays = [given["features"]] if set(given) == {"features"} else []
    if not arrays:
        _known(given, [column.name for column in inputs.columns])
        if missing := next((one.name for one in inputs.columns if one.name not in given), None):
            raise InvalidInput(f"The input {missing!r} is missing.")
        arrays = [given[column.name] for column in inputs.columns]
    flat = [array.reshape(len(array), -1) for array in arrays]
    if all(array.dtype.kind in "fiub" for array in flat):
        return np.concatenate([array.astype(np.float64) for array in flat], axis=1)
    rows = np.concatenate([array.astype(object) for array in flat], axis=1)
    return [Input("features", [_text(v) if isinstance(v, bytes) else v for v in row]) for row in rows]


def _output(answer: CalibratedAnswer, name: str, top: int) -> Array:
    rows = answer.rows
    if top:
        if name not in ("probabilities", "logits"):
            raise InvalidParameter(
                f"The output {name!r} has no classes; `classification` is for probabilities."
            )
        values = rows.probabilities if name == "probabilities" else rows.logits
        listed = [
            [
                f"{values[row, index].item()!r}:{index}:{answer.labels[index]}"
                for index in rank(values[row], rows.mapped[row], top)
            ]
            for row in range(len(rows))
        ]
        return np.array(listed, object)
    if name in ("probabilities", "logits"):
        return rows.probabilities if name == "probabilities" else rows.logits
    first = [rank(rows.probabilities[row], rows.mapped[row], 1)[0] for row in range(len(rows))]
    if name == "index":
        return np.array(first, np.int64)
    if name == "label":
        return np.array([answer.labels[index] for index in first], object)
    return np.array([answer.bound_hit(row, index) or "" for row, index in enumerate(first)], object)


def _image(one: Any, name: str) -> bytes:
    """Take the bytes of an image; JSON holds them in base64."""
    return one if isinstance(one, bytes) else from_base64(str(one), name)


def _text(one: Any) -> str:
    try:
        return one.decode() if isinstance(one, bytes) else str(one)
    except UnicodeDecodeError as error:
        raise InvalidInput(f"The text is not UTF-8: {error}.") from error


def _known(given: Mapping[str, Array], names: Sequence[str]) -> None:
    if any(name not in names for name in given):
        raise InvalidInput(_unknown(given, names))


def _unknown(given: Mapping[str, Array], names: Sequence[str]) -> str:
    other = next((name for name in given if name not in names), ", ".join(given))
    return f"The model has no input {other!r:.100}{hint(other, names)}; it takes {' or '.join(names)}."


def _datatype(dtype: str) -> str:
    kinds = {"float": "FP", "int": "INT", "bool": "BOOL", "str": BYTES}
    name = dtype.rstrip("0123456789")
    return kinds[name] + (dtype[len(name) :] if name in ("float", "int") else "")
