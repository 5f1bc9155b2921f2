"""`onnx:PATH`: a model file run by onnxruntime, on CUDA if available, else on all cores.

On a CPU, passes run side by side on one thread each (`core_pool.py`), and a single sample in a session that
uses all cores. Idle threads do not spin, which would take the cores from the server.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch

from boxcal.models.core_pool import ThreadPerCorePool, padded
from boxcal.models.equivalence import random_batch, same_logits
from boxcal.models.errors import UnusableDevice, UnusableInput, UnusableWeights
from boxcal.models.inputs import ImageInputs, Inputs
from boxcal.models.onnx_file import OnnxFile
from boxcal.models.spec import read_spec
from boxcal.models.torch_backbone import resolve_device
from boxcal.models.weights import file_fingerprint, fingerprint_with

DTYPES: dict[str, type[np.floating[Any]]] = {
    "tensor(float)": np.float32,
    "tensor(float16)": np.float16,
    "tensor(double)": np.float64,
}


class OnnxBackbone:
    """An ONNX classifier.

    Parameters
    ----------
    path
        The model file.
    labels
        File with one label per line; replaces the declared labels.
    device
        `auto`, `cpu`, `cuda` or `cuda:N`.
    optimize
        Whether the graph may be rewritten to compute less (`class_token.py`); checked on a random batch.

    Raises
    ------
    BackboneError
        The file is missing, damaged, has more than one input, or does not fit its declaration.
    """

    def __init__(self, path: Path, *, labels: Path | None, device: str, optimize: bool = True) -> None:
        self.name = f"onnx:{path.name}"
        self._path = path
        self._pieces = ThreadPerCorePool()
        file = OnnxFile(path, optimize=optimize)
        self._sessions, self.device = self._open(file, device)
        session = self._sessions[0]
        spec = read_spec(path, session.get_modelmeta().custom_metadata_map)
        inputs = session.get_inputs()
        if len(inputs) != 1 or inputs[0].type not in DTYPES or len(inputs[0].shape) < 2:
            found = ", ".join(f"{entry.name} {entry.type} {entry.shape}" for entry in inputs)
            raise UnusableWeights(
                f"{path}: expected one input of floats with a batch dimension, found {found}."
            )
        self._input = inputs[0].name
        self._dtype = DTYPES[inputs[0].type]
        self._output = self._choose_output(session)
        fixed, *shape = (size if isinstance(size, int) and size > 0 else None for size in inputs[0].shape)
        self._batch_sizes = (fixed or 1, fixed)
        self.preprocessing = spec.preprocessing_for(tuple(shape), path)
        self.input_shape = self._shape_of_one(tuple(shape))
        self.inputs: Inputs = ImageInputs(self.preprocessing, self.input_shape)
        self._takes_logarithm = spec.outputs == "probabilities"
        if file.rewritten and not self._same_when_rewritten(file):
            self._sessions, self.device = self._open(file, device)
            session = self._sessions[0]
        probe = self._check_outputs(self._run(session, torch.zeros(1, *self.input_shape)))
        self.labels = spec.labels_for(probe.shape[1], path, labels)
        self.fingerprint = fingerprint_with(
            file_fingerprint(path, *file.external),
            outputs="probabilities" if self._takes_logarithm else None,
            preprocessing=self.preprocessing,
        )

    @property
    def num_classes(self) -> int:
        """K."""
        return len(self.labels)

    @property
    def passes(self) -> int:
        """Number of concurrent calls that use the whole device."""
        return self._pieces.cores if self.device == "cpu" else 1

    def __call__(self, batch: torch.Tensor, *, alone: bool = True) -> torch.Tensor:
        """Float32 logits (N, K) for a float32 batch (N, *input_shape) on the CPU; else UnusableInput."""
        if batch.shape[1:] != self.input_shape:
            raise UnusableInput(
                f"{self.name} reads inputs of shape {self.input_shape}, got {tuple(batch.shape[1:])}."
            )
        if self.device == "cpu" and alone and len(batch) > 1:
            outputs = self._pieces.run(partial(self._run, self._sessions[0]), batch, *self._batch_sizes)
        else:
            session = self._sessions[-1 if alone else 0]
            pieces = torch.split(batch, self._batch_sizes[1] or len(batch))
            outputs = torch.cat([self._run(session, piece) for piece in pieces])
        if self._takes_logarithm:
            return outputs.clamp_min(torch.finfo(torch.float32).tiny).log()
        return outputs

    def warm_up(self, batch_sizes: Sequence[int]) -> None:
        """Run once with each batch size, so that no request waits for a first pass."""
        for size in batch_sizes:
            self(torch.zeros(size, *self.input_shape))

    def _open(self, file: OnnxFile, device: str) -> tuple[list[Any], str]:
        """Open one session on CUDA, or on the CPU one for a single thread and one for all cores."""
        resolved = resolve_device(device)
        if resolved.type == "cuda":
            onnxruntime.preload_dlls()  # CUDA's libraries come with torch
            provider = ("CUDAExecutionProvider", {"device_id": str(resolved.index or 0)})
            session = file.session([provider, "CPUExecutionProvider"], threads=1)
            if "CUDAExecutionProvider" in session.get_providers():
                return [session], str(resolved)
            if device != "auto":
                raise UnusableDevice(f"onnxruntime cannot run {self._path} on {device!r}.")
        threads = {self._pieces.cores, 1}
        return [file.session(["CPUExecutionProvider"], threads=n) for n in sorted(threads)], "cpu"

    def _same_when_rewritten(self, file: OnnxFile) -> bool:
        """Compare the rewritten graph with the original on the CPU; choose which one is served."""
        batch = random_batch(2, self.input_shape)[: self._batch_sizes[1]]
        logits = []
        for file.rewritten in (True, False):
            session = file.session(["CPUExecutionProvider"], threads=self._pieces.cores)
            logits.append(self._run(session, batch, on_cpu=True))
        same = same_logits(self.name, logits[1], logits[0], float(np.finfo(self._dtype).eps))
        file.rewritten = same
        return same

    def _choose_output(self, session: Any) -> str:
        names = [entry.name for entry in session.get_outputs()]
        if len(names) == 1:
            return str(names[0])
        if "logits" in names:
            return "logits"
        raise UnusableWeights(
            f"{self._path} has the outputs {', '.join(names)}; call the one to serve 'logits'."
        )

    def _shape_of_one(self, shape: tuple[int | None, ...]) -> tuple[int, ...]:
        if self.preprocessing is not None:
            return self.preprocessing.input_shape
        if None in shape:
            raise UnusableWeights(
                f"{self._path} reads inputs of free sizes {shape}; declare a preprocessing in "
                f"{self._path.with_suffix('.json').name}, or export it with fixed ones."
            )
        return tuple(size for size in shape if size is not None)

    def _check_outputs(self, outputs: torch.Tensor) -> torch.Tensor:
        """Refuse outputs that are not logits, or not what is declared."""
        if outputs.ndim != 2 or outputs.shape[1] < 2:
            raise UnusableWeights(
                f"{self._path}: the output {self._output} has shape {tuple(outputs.shape)}, expected (N, K)."
            )
        sums_to_one = bool((outputs >= 0).all() and (outputs.sum(1) - 1).abs().max() < 1e-3)
        if sums_to_one and not self._takes_logarithm:
            raise UnusableWeights(
                f"{self._path}: the output {self._output} sums to 1: it seems to hold probabilities. Export "
                'the logits, or declare "outputs": "probabilities".'
            )
        if self._takes_logarithm and not sums_to_one:
            raise UnusableWeights(
                f"{self._path}: the output {self._output} does not sum to 1, but is declared to hold "
                "probabilities."
            )
        return outputs

    def _run(self, session: Any, piece: torch.Tensor, *, on_cpu: bool = False) -> torch.Tensor:
        """Run one piece; on CUDA its input and output are bound, so that each is copied once."""
        given = np.ascontiguousarray(padded(piece, self._batch_sizes[0]).numpy(), self._dtype)
        if on_cpu or self.device == "cpu":
            outputs = session.run([self._output], {self._input: given})
        else:
            binding = session.io_binding()
            binding.bind_cpu_input(self._input, given)
            binding.bind_output(self._output, "cpu")
            session.run_with_iobinding(binding)
            outputs = binding.copy_outputs_to_cpu()
        return torch.from_numpy(outputs[0][: len(piece)]).float()
