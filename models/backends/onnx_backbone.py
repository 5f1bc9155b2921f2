"""`onnx:PATH`: a model file run by onnxruntime, on CUDA if available, else on all cores.

On a CPU, passes run side by side on one thread each (`core_pool.py`), and a single sample in a session that
uses all cores. Idle threads do not spin, which would take the cores from the server.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property, partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file

from boxcal.models import BackboneError, UnusableInput
from boxcal.models.backends.checks import (
    file_fingerprint,
    fingerprint_with,
    probes,
    random_batch,
    read_labels,
    same_logits,
    tensors_fingerprint,
)
from boxcal.models.backends.core_pool import CorePool
from boxcal.models.backends.onnx_file import CPU, OnnxFile, Output, Sessions, batch_size_of, pieces
from boxcal.models.backends.onnx_named import NamedOnnxBackbone, is_named
from boxcal.models.backends.spec import PreprocessingSpec, read_spec
from boxcal.models.digits_data import LABELS
from boxcal.models.inputs.base import Inputs
from boxcal.models.inputs.images import DigitLevels, ImageInputs, Preprocessing

if TYPE_CHECKING:
    import torch

    from boxcal.models.backends.torch_backbone import TorchBackbone

DIGITS = Path(__file__).with_name("digits.onnx")
FEATURES = "features"
"""The output of that file beside its logits."""
DTYPES: dict[str, type[np.floating[Any] | np.uint8]] = {
    "tensor(float)": np.float32,
    "tensor(float16)": np.float16,
    "tensor(double)": np.float64,
    "tensor(uint8)": np.uint8,
}

Scores = NDArray[np.float32]


def load_onnx(
    path: Path, *, labels: Path | None, device: str, optimize: bool = True
) -> OnnxBackbone | NamedOnnxBackbone:
    """Open an ONNX classifier of images or tensors, of rows of features or of tokens, by its inputs.

    `optimize`: whether the graph may be rewritten to compute less (`class_token.py`); checked on a random
    batch.
    """
    file = OnnxFile(path, optimize=optimize)
    sessions = Sessions(file, path, device)
    if is_named(sessions.beside.get_inputs()):
        return NamedOnnxBackbone(path, file, sessions, labels=labels)
    return OnnxBackbone(path, file, sessions, labels=labels)


def load_digits_onnx(*, labels: Path | None, device: str) -> DigitsOnnxBackbone:
    """Open the backbone `digits` as an ONNX graph, which needs no torch and half of its time to start.

    Its logits and features agree with those of `digits.py` within rounding, and its fingerprint is that of
    the same weights, so that both serve the same calibrators. Gradients are those of `digits.py`, where torch
    is installed.
    """
    kind = DigitsOnnxBackbone if find_spec("torch") is None else OpenDigitsBackbone
    file = OnnxFile(DIGITS, optimize=False)
    return kind(file, Sessions(file, DIGITS, device), labels=labels)


class OnnxBackbone:
    """An ONNX classifier of images or tensors."""

    def __init__(self, path: Path, file: OnnxFile, sessions: Sessions, *, labels: Path | None) -> None:
        self.name = f"onnx:{path.name}"
        self._path = path
        self._pool: CorePool[Scores] = CorePool(np.concatenate)
        self._sessions = sessions
        self.device = sessions.device
        session = self._sessions.beside
        spec = read_spec(path, session.get_modelmeta().custom_metadata_map)
        inputs = session.get_inputs()
        if len(inputs) != 1 or inputs[0].type not in DTYPES or len(inputs[0].shape) < 2:
            found = ", ".join(f"{entry.name} {entry.type} {entry.shape}" for entry in inputs)
            raise BackboneError(
                f"{path}: expected one input of floats or uint8 with a batch dimension, found {found}."
            )
        self._input = inputs[0].name
        self._dtype = DTYPES[inputs[0].type]
        self._output = Output(session.get_outputs(), spec, path)
        self._batch_size = batch_size_of(inputs)
        shape = [size if isinstance(size, int) and size > 0 else None for size in inputs[0].shape[1:]]
        self.preprocessing: Preprocessing | None = spec.preprocessing_for(tuple(shape), path)
        self.input_shape = self._shape_of_one(tuple(shape))
        holds_bytes = self._dtype is np.uint8
        if holds_bytes and spec.preprocessing is not None:
            check_keeps_pixels(spec.preprocessing, path)
        self.inputs: Inputs = ImageInputs(self.preprocessing, self.input_shape, holds_bytes=holds_bytes)
        if file.rewritten and not self._same_when_rewritten(file):
            self._sessions = Sessions(file, path, self.device)
            session = self._sessions.beside
        try:
            probed = [
                [raw for batch in probes(self.input_shape) for raw in self._raw(session, batch, name)]
                for name in self._output.read
            ]
        except Exception as error:  # onnxruntime's errors have no common base class
            raise BackboneError(f"{path}: the trial run failed: {error}"[:1000]) from error
        declared = spec.declared_labels(path, labels)
        num_classes = self._output.check(*probed, model=file.model, declared=declared)
        self.labels = spec.labels_for(num_classes, path, labels, self._output.names)
        self.fingerprint = fingerprint_with(
            file_fingerprint(path, *file.external),
            **self._output.declared,
            preprocessing=self.preprocessing,
        )

    @property
    def num_classes(self) -> int:
        return len(self.labels)

    @property
    def passes(self) -> int:
        """Number of concurrent calls that use the whole device."""
        return self._sessions.passes

    def __call__(self, batch: Any, *, alone: bool = True) -> Scores:
        """Float32 logits (N, K) for a float32 batch (N, *input_shape) on the CPU; else UnusableInput."""
        batch = np.asarray(batch)
        if batch.shape[1:] != self.input_shape:
            raise UnusableInput(
                f"{self.name} reads inputs of shape {self.input_shape}, got {tuple(batch.shape[1:])}."
            )
        if self.device == "cpu" and alone and len(batch) > 1:
            run = partial(self._run, self._sessions.beside)
            return self._pool.run(run, batch, self._batch_size or 1, self._batch_size)
        return self._run(self._sessions.alone if alone else self._sessions.beside, batch)

    def warm_up(self, batch_sizes: Sequence[int]) -> None:
        """Run once with each batch size, so that no request waits for a first pass."""
        for size in batch_sizes:
            self(np.zeros((size, *self.input_shape), np.float32))

    def _same_when_rewritten(self, file: OnnxFile) -> bool:
        """Compare the rewritten graph with the original on the CPU; choose which one is served."""
        batch = random_batch(2, self.input_shape)
        logits = []
        for file.rewritten in (True, False):
            session = file.session([CPU], threads=self._pool.cores)
            logits.append(self._run(session, batch, on_cpu=True))
        eps = float(np.finfo(self._dtype).eps) if issubclass(self._dtype, np.floating) else 0.0
        same = same_logits(self.name, logits[1], logits[0], eps)
        file.rewritten = same
        return same

    def _shape_of_one(self, shape: tuple[int | None, ...]) -> tuple[int, ...]:
        if self.preprocessing is not None:
            return self.preprocessing.input_shape
        if None in shape:
            raise BackboneError(
                f"{self._path} reads inputs of free sizes {shape}; declare a preprocessing in "
                f"{self._path.with_suffix('.json').name}, or export it with fixed ones."
            )
        return tuple(size for size in shape if size is not None)

    def _run(self, session: Any, batch: Scores, *, on_cpu: bool = False) -> Scores:
        """Run a batch, and turn its outputs into float32 logits."""
        return np.concatenate(
            [self._output.logits(raw) for raw in self._raw(session, batch, self._output.name, on_cpu=on_cpu)]
        )

    def _raw(self, session: Any, batch: Scores, output: str, *, on_cpu: bool = False) -> Iterator[Any]:
        """Run a batch in pieces, for one output; on CUDA both ends are bound, so that each is copied once."""
        if self._dtype is np.uint8:
            batch = np.clip(np.rint(batch), 0, 255)
        given = {self._input: np.ascontiguousarray(batch, self._dtype)}
        for count, piece in pieces(given, self._batch_size):
            if on_cpu or self.device == "cpu":
                outputs = session.run([output], piece)
            else:
                binding = session.io_binding()
                binding.bind_cpu_input(self._input, piece[self._input])
                binding.bind_output(output, "cpu")
                session.run_with_iobinding(binding)
                outputs = binding.copy_outputs_to_cpu()
            yield outputs[0][:count]


class DigitsOnnxBackbone(OnnxBackbone):
    """The graph of `digits`, which returns features beside the logits."""

    def __init__(self, file: OnnxFile, sessions: Sessions, *, labels: Path | None) -> None:
        super().__init__(DIGITS, file, sessions, labels=labels)
        self.name = "digits"
        self.labels = LABELS if labels is None else read_labels(labels, len(LABELS))
        self.preprocessing = DigitLevels()
        self.inputs = ImageInputs(self.preprocessing, self.input_shape)
        weights = load_file(DIGITS.with_suffix(".safetensors"))
        self.fingerprint = tensors_fingerprint(weights)
        self.head: tuple[Scores, Scores] | None = weights["heads.head.weight"], weights["heads.head.bias"]

    def features(self, batch: Any) -> Scores:
        """Float32 features (N, D), the input of the head."""
        given = np.asarray(batch, np.float32)
        return np.concatenate(list(self._raw(self._sessions.alone, given, FEATURES)))


class OpenDigitsBackbone(DigitsOnnxBackbone):
    """The digits model with gradients, for fits that read inputs."""

    @cached_property
    def _with_torch(self) -> TorchBackbone:
        from boxcal.models.backends.digits import load_digits  # noqa: PLC0415 - only these fits need torch

        return load_digits(labels=None, device="cpu", precision="float32")

    def differentiable(self, batch: Any) -> torch.Tensor:
        """Float32 logits (N, K) on the CPU, differentiable with respect to the inputs."""
        return self._with_torch.differentiable(batch)


def check_keeps_pixels(declared: PreprocessingSpec, path: Path) -> None:
    """Check that a preprocessing for an input of uint8 keeps the pixels as they are, 0 to 255."""
    mean, std = [0.0] * len(declared.mean), [1 / 255] * len(declared.std)
    if not np.allclose([*declared.mean, *declared.std], [*mean, *std], rtol=1e-4):
        raise BackboneError(
            f'{path} reads pixels as uint8; declare "mean": {mean} and "std": {std}, which keep them.'
        )
