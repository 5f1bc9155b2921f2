"""Checks of a model: its class names, its fingerprint, and whether a rewritten one has the same logits."""

from __future__ import annotations

import hashlib
import logging
import unicodedata
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from boxcal.models import BackboneError


def read_labels(path: Path, num_classes: int) -> tuple[str, ...]:
    return check_labels(read_lines(path), num_classes, str(path))


def read_lines(path: Path) -> list[str]:
    """Read the lines of a labels file, without a byte order mark and without empty lines at the end."""
    try:
        lines = path.read_text(encoding="utf-8-sig").rstrip().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise BackboneError(f"The labels file {path} cannot be read: {error}.") from error
    return [line.strip() for line in lines]


def check_labels(labels: Sequence[str], num_classes: int, source: str) -> tuple[str, ...]:
    """Check that there is one non-empty label per class, normalise labels to NFC, and number repeated ones.

    Requests name classes by their labels, so labels must be distinct, but common lists of ImageNet's classes
    have two cranes: the second becomes `crane (2)`.
    """
    if len(labels) != num_classes:
        raise BackboneError(f"{source} has {len(labels)} labels, but the model has {num_classes} classes.")
    if "" in labels:
        raise BackboneError(f"{source}: label {labels.index('') + 1} is empty.")
    counts: Counter[str] = Counter()
    distinct = []
    for label in (unicodedata.normalize("NFC", label) for label in labels):
        counts[label] += 1
        distinct.append(label if counts[label] == 1 else f"{label} ({counts[label]})")
    if repeated := [label for label, count in Counter(distinct).items() if count > 1]:
        raise BackboneError(
            f"{source}: the label {repeated[0]!r} repeats, even with repeated names numbered."
        )
    return tuple(distinct)


def file_fingerprint(*paths: Path) -> str:
    """Compute sha256 over model files, one after the other."""
    digest = hashlib.sha256()
    for path in paths:
        with path.open("rb") as stream:
            hashlib.file_digest(stream, lambda: digest)
    return digest.hexdigest()


def fingerprint_with(fingerprint: str, **declared: object) -> str:
    """Extend the fingerprint of the weights by what else changes the logits; None stands for the default.

    Where everything is default, the fingerprint is that of the weights.
    """
    deviating = sorted((name, repr(value)) for name, value in declared.items() if value is not None)
    return hashlib.sha256(f"{fingerprint} {deviating}".encode()).hexdigest() if deviating else fingerprint


logger = logging.getLogger("boxcal")
TOLERANCE = 1e-4  # of the largest logit
SEED = 0
PROBES = 2
LARGE = np.float32(30.0)


def random_batch(count: int, input_shape: tuple[int, ...]) -> NDArray[np.float32]:
    """Draw standard normal inputs, float32 (count, *input_shape); the same ones each time."""
    return np.random.default_rng(SEED).standard_normal((count, *input_shape), dtype=np.float32)


def probes(input_shape: tuple[int, ...]) -> list[NDArray[np.float32]]:
    """Give batches of zeros and of random inputs of several sizes, to see what the outputs of a model are.

    The large ones have a mean: of noise alone, a network that averages over its inputs sees next to nothing.
    """
    small = random_batch(PROBES, input_shape)
    large = LARGE * (small + np.array([1, -1], np.float32).reshape(-1, *[1] * (small.ndim - 1)))
    return [np.zeros((1, *input_shape), np.float32), *small[:, None], *large[:, None]]


def same_logits(name: str, original: Any, rewritten: Any, eps: float = 0.0) -> bool:
    """Whether a rewritten model gives the logits (N, K) of the original; where not, log a warning."""
    original, rewritten = np.asarray(original), np.asarray(rewritten)
    scale = np.abs(original).max()
    difference = float(np.abs(rewritten - original).max() / scale) if scale > 0 else float(rewritten.any())
    if difference <= (limit := max(TOLERANCE, 8 * eps)):
        return True
    logger.warning(
        "%s is served as it is: rewritten to compute less, its logits differ by %.2g of the largest, "
        "more than %.2g.",
        name, difference, limit,
    )  # fmt: skip
    return False


def tensors_fingerprint(tensors: Mapping[str, Any]) -> str:
    """Compute sha256 over names, dtypes, shapes and values: independent of the file format.

    Arrays and torch's tensors of the same values have the same fingerprint.
    """
    digest = hashlib.sha256()
    for key in sorted(tensors):
        value = tensors[key]
        kind = f"torch.{value.dtype}" if isinstance(value, np.ndarray) else value.dtype
        digest.update(f"{key} {kind} {tuple(value.shape)}\n".encode())
        digest.update(value.tobytes() if isinstance(value, np.ndarray) else _bytes_of(value))
    return digest.hexdigest()


def _bytes_of(tensor: Any) -> memoryview:
    import torch  # noqa: PLC0415 - whoever has a tensor has loaded it

    content: memoryview = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
    return content
