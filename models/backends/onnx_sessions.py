"""The onnxruntime sessions of one ONNX file, on CUDA if available, else on the CPU."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import onnxruntime

from boxcal.models.backends.core_pool import usable_cores
from boxcal.models.backends.onnx_file import OnnxFile
from boxcal.models.errors import BackboneError

CUDA = "CUDAExecutionProvider"


class Sessions:
    """One session on CUDA; on the CPU one for a single thread and one for all cores.

    Parameters
    ----------
    file
        The opened file.
    path
        Its path, for messages.
    device
        `auto`, `cpu`, `cuda` or `cuda:N`.

    Attributes
    ----------
    beside, alone
        The session of a pass beside others, and of a pass that may use the whole device.
    device
        Where they run.
    """

    def __init__(self, file: OnnxFile, path: Path, device: str) -> None:
        self.device = "cpu"
        resolved = None if _is_cpu(device) else _cuda(device)
        if resolved is not None:
            onnxruntime.preload_dlls()  # CUDA's libraries come with torch
            provider = (CUDA, {"device_id": str(resolved.index or 0)})
            session = file.session([provider, "CPUExecutionProvider"], threads=1)
            if CUDA in session.get_providers():
                self.beside = self.alone = session
                self.device = str(resolved)
                return
            if device != "auto":
                raise BackboneError(f"onnxruntime cannot run {path} on {device!r}.")
        threads = sorted({usable_cores(), 1})
        opened: list[Any] = [file.session(["CPUExecutionProvider"], threads=n) for n in threads]
        self.beside, self.alone = opened[0], opened[-1]

    @property
    def passes(self) -> int:
        """Number of concurrent calls that use the whole device."""
        return usable_cores() if self.device == "cpu" else 1


def _is_cpu(device: str) -> bool:
    """Whether passes run on the CPU, as far as that is known without torch."""
    if device != "auto":
        return device == "cpu"
    return CUDA not in onnxruntime.get_available_providers() or not _has_driver()


def _has_driver() -> bool:
    """Whether this machine has the driver of an NVIDIA GPU."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def _cuda(device: str) -> Any:
    """Return the CUDA device, as torch names it; None where there is none."""
    from boxcal.models.backends.torch_backbone import resolve_device  # noqa: PLC0415 - only GPUs need torch

    resolved = resolve_device(device)
    return resolved if resolved.type == "cuda" else None
