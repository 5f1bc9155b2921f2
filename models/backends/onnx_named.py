"""ONNX models of rows of features and of tokens: several named inputs of any type, and of any length."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from boxcal.models import BackboneError, UnusableInput
from boxcal.models.backends.checks import file_fingerprint, fingerprint_with
from boxcal.models.backends.core_pool import usable_cores
from boxcal.models.backends.onnx_file import (
    CPU,
    OnnxFile,
    Output,
    Sessions,
    batch_size_of,
    pieces,
)
from boxcal.models.backends.spec import ModelSpec, beside, read_spec
from boxcal.models.inputs.base import Inputs
from boxcal.models.inputs.rows import INTEGERS, Column, RowInputs, positions
from boxcal.models.inputs.texts import IDS, MASK, TextInputs

DTYPES = {
    "tensor(float)": "float32",
    "tensor(double)": "float64",
    "tensor(float16)": "float16",
    "tensor(int64)": "int64",
    "tensor(int32)": "int32",
    "tensor(bool)": "bool",
    "tensor(string)": "str",
}
MAX_TOKENS = 512
ENCODED = ("cats_strings", "cats_int64s", "keys_strings", "keys_int64s")
KEEPING = {
    "ArrayFeatureExtractor",
    "FeatureVectorizer",
    "Gather",
    "GatherElements",
    "Slice",
    "Split",
    "Where",
}
KEEPING |= {"Cast", "Concat", "Flatten", "Identity", "Reshape", "Squeeze", "Unsqueeze"}
KEEPING |= {"Imputer", "StringNormalizer"}
"""Operators behind which the values of an input may still be read by an encoder."""
PROBES = 4
SCALES = (1.0, 30.0, 1000.0)


class NamedOnnxBackbone:
    """An ONNX classifier whose inputs have names."""

    preprocessing = None

    def __init__(self, path: Path, file: OnnxFile, sessions: Sessions, *, labels: Path | None) -> None:
        self.name = f"onnx:{path.name}"
        self._sessions = sessions
        self.device = sessions.device
        session = sessions.alone
        spec = read_spec(path, session.get_modelmeta().custom_metadata_map)
        self.inputs: Inputs = inputs_of(session.get_inputs(), file.model, spec, path)
        self.input_shape = self.inputs.shape
        self._batch_size = batch_size_of(session.get_inputs())
        self._output = Output(session.get_outputs(), spec, path)
        try:
            probed = [
                [raw for batch in self._probes() for raw in self._raw(session, batch, name)]
                for name in self._output.read
            ]
        except Exception as error:  # onnxruntime's errors have no common base class
            raise BackboneError(f"{path}: the trial run failed: {error}"[:1000]) from error
        declared = spec.declared_labels(path, labels)
        num_classes = self._output.check(*probed, model=file.model, declared=declared)
        tokens = self.inputs if isinstance(self.inputs, TextInputs) else None
        if tokens is not None:
            on_cpu = sessions.alone if self.device == "cpu" else file.session([CPU], threads=usable_cores())
            tokens.limit_length(self.name, lambda batch: list(self._raw(on_cpu, batch, self._output.name)))
        self.labels = spec.labels_for(num_classes, path, labels, self._output.names)
        self.fingerprint = fingerprint_with(
            file_fingerprint(path, *file.external),
            **self._output.declared,
            pad=tokens and tokens.pad,
            max_length=tokens and tokens.max_length,
        )

    @property
    def num_classes(self) -> int:
        return len(self.labels)

    @property
    def passes(self) -> int:
        """Number of concurrent calls that use the whole device."""
        return self._sessions.passes

    def __call__(self, batch: dict[str, NDArray[Any]], *, alone: bool = True) -> NDArray[np.float32]:
        """Float32 logits (N, K) for what `inputs.batch` makes of N samples; else UnusableInput."""
        if not isinstance(batch, dict):
            raise UnusableInput(f"{self.name} reads its inputs by name.")
        session = self._sessions.alone if alone else self._sessions.beside
        return np.concatenate(
            [self._output.logits(raw) for raw in self._raw(session, batch, self._output.name)]
        )

    def warm_up(self, batch_sizes: Sequence[int]) -> None:
        """Run once with each batch size, so that no request waits for a first pass."""
        for size in batch_sizes:
            self(self.inputs.batch(self.inputs.blank(size)))

    def _raw(self, session: Any, batch: dict[str, NDArray[Any]], output: str) -> Iterator[Any]:
        """Run a batch in pieces, for one output."""
        for count, piece in pieces(batch, self._batch_size):
            yield session.run([output], piece)[0][:count]

    def _probes(self) -> list[dict[str, NDArray[Any]]]:
        """Give batches of random inputs, of several sizes, to see what the outputs are."""
        probes = [self.inputs.blank(1)]
        if isinstance(self.inputs, RowInputs):
            probes += np.split(random_rows(self.inputs, len(SCALES) * PROBES), len(SCALES))
        else:
            probes.append(self.inputs.blank(PROBES))
        return [self.inputs.batch(rows) for rows in probes]


def random_rows(inputs: RowInputs, count: int) -> NDArray[Any]:
    """Give rows of features, large ones first, to see what a model returns; the same with each call."""
    rows = inputs.blank(count)
    scales = np.resize(np.repeat(SCALES[::-1], PROBES), count)[:, None]
    noise = np.round(np.random.default_rng(0).normal(size=rows.shape) * scales)
    rows[:, inputs.is_free] = noise[:, inputs.is_free]
    return rows


def is_named(entries: Sequence[Any]) -> bool:
    """Whether the inputs of a model are rows of features or tokens, by their types and ranks."""
    return all(entry.type in DTYPES and len(entry.shape) == 2 for entry in entries) and bool(entries)


def inputs_of(entries: Sequence[Any], model: onnx.ModelProto | None, spec: ModelSpec, path: Path) -> Inputs:
    """Tell rows of features from tokens, by names, types and the declaration."""
    dtypes = [DTYPES[entry.type] for entry in entries]
    names = [entry.name for entry in entries]
    default = path.with_name("tokenizer.json")
    integers = all(dtype in INTEGERS for dtype in dtypes)
    if integers and (spec.tokenizer or spec.pad or IDS in names or MASK in names):
        tokenizer = beside(path, "tokenizer", spec.tokenizer) if spec.tokenizer else default
        lengths = [size for entry in entries if isinstance(size := entry.shape[1], int)]
        if unknown := next((name for name in spec.pad or {} if name not in names), None):
            raise BackboneError(f"{path}: pad names {unknown!r}, which is no input of the model.")
        return TextInputs(
            dict(zip(names, dtypes, strict=True)),
            pad=spec.pad or {},
            max_length=spec.max_length or MAX_TOKENS,
            fixed_length=lengths[0] if lengths else None,
            tokenizer=tokenizer if spec.tokenizer or default.is_file() else None,
        )
    columns = []
    for entry, dtype in zip(entries, dtypes, strict=True):
        width = entry.shape[1]
        if not isinstance(width, int):
            if len(entries) > 1 or not spec.features:
                raise BackboneError(
                    f"{path}: the input {entry.name} takes any number of features; declare their names as "
                    f'"features" in {path.with_suffix(".json").name}.'
                )
            width = len(spec.features)
        columns.append(Column(entry.name, dtype, width))
    return RowInputs(
        columns,
        _feature_names(columns, spec, path),
        has_missing=_has_missing(model),
        categories={
            column.name: known
            for column in columns
            if (known := _category(model, column.name)) is not None or column.is_text
        },
    )


def _category(model: onnx.ModelProto | None, name: str) -> str | float | None:
    """Find a value that the encoder of an input knows: encoders refuse others."""
    reached = {name}
    for node in model.graph.node if model is not None else ():
        if reached.isdisjoint(node.input):
            continue
        for attribute in node.attribute:
            if attribute.name in ENCODED and (attribute.strings or attribute.ints):
                return attribute.strings[0].decode() if attribute.strings else float(attribute.ints[0])
        if node.op_type in KEEPING:
            reached.update(node.output)
    return None


def _feature_names(columns: Sequence[Column], spec: ModelSpec, path: Path) -> list[str]:
    count = sum(column.width for column in columns)
    if spec.features is not None:
        if len(set(spec.features)) != count or len(spec.features) != count:
            raise BackboneError(
                f"{path}: features has {len(spec.features)} names, of which {len(set(spec.features))} are "
                f"different; the model reads {count} features."
            )
        return list(spec.features)
    if len(columns) == 1:
        return positions(count)
    return [
        column.name if column.width == 1 else f"{column.name}[{index}]"
        for column in columns
        for index in range(column.width)
    ]


def _has_missing(model: onnx.ModelProto | None) -> bool:
    """Whether a model decides by trees, which send a missing value to one side."""
    return model is not None and any(node.op_type.startswith("TreeEnsemble") for node in model.graph.node)
