"""Weights from files, read as data and never as code, and copied into a network that they fit exactly."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import nn

from boxcal.models.errors import BackboneError

SHOWN = 3


def read_weights(path: Path) -> dict[str, torch.Tensor]:
    """Read a `.safetensors` file, or a `.pth` or `.pt` one that holds tensors only."""
    if not path.is_file():
        raise BackboneError(f"The weights file {path} does not exist.")
    if path.suffix == ".safetensors":
        from safetensors import SafetensorError  # noqa: PLC0415
        from safetensors.torch import load_file  # noqa: PLC0415

        try:
            return load_file(path)
        except (SafetensorError, OSError) as error:
            raise BackboneError(f"{path} is not a readable safetensors file: {error}") from error
    if path.suffix not in {".pth", ".pt"}:
        raise BackboneError(f"{path}: weights are read from .safetensors, .pth or .pt, not {path.suffix!r}.")
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        raise BackboneError(
            f"{path} holds more than tensors or is damaged; it was not unpickled. Save the state_dict()."
        ) from error
    except (RuntimeError, OSError, EOFError, ValueError) as error:
        raise BackboneError(f"{path} is not a readable PyTorch file: {error}") from error
    if isinstance(content, dict) and isinstance(content.get("state_dict"), dict):
        content = content["state_dict"]
    if not isinstance(content, dict) or not all(
        isinstance(key, str) and isinstance(value, torch.Tensor) for key, value in content.items()
    ):
        raise BackboneError(f"{path} holds no state_dict: expected a dictionary of named tensors.")
    return content


def load_into(network: nn.Module, weights: Mapping[str, torch.Tensor], path: Path) -> None:
    """Copy weights into a network."""
    expected = network.state_dict()
    wrong = {
        "misses": [key for key in expected if key not in weights],
        "has unknown": [key for key in weights if key not in expected],
    }
    parts = [f"{what} {_some(keys)}" for what, keys in wrong.items() if keys]
    if parts:
        raise BackboneError(f"{path} does not fit the network: it {' and '.join(parts)}.")
    for key, value in expected.items():
        if weights[key].shape != value.shape:
            raise BackboneError(
                f"{path} does not fit the network: {key} has shape {tuple(weights[key].shape)}, "
                f"expected {tuple(value.shape)}."
            )
        if value.is_floating_point() and not weights[key].is_floating_point():
            raise BackboneError(f"{path}: {key} has dtype {weights[key].dtype}, expected {value.dtype}.")
    network.load_state_dict(weights)


def _some(keys: list[str]) -> str:
    more = f" and {len(keys) - SHOWN} more" if len(keys) > SHOWN else ""
    return ", ".join(keys[:SHOWN]) + more
