"""Validation sets for the tests: overconfident logits, and the files that an upload may bring."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import numpy.typing as npt

from boxcal.app.registry.records import BackboneIdentity

CONTENT_TYPE = "multipart/form-data; boundary=boundary"
DIGITS = BackboneIdentity("digits", "ab" * 32, tuple("0123456789"))

Floats = npt.NDArray[Any]
Labels = npt.NDArray[np.int64]


def overconfident(samples: int = 400, classes: int = 10, *, seed: int = 0) -> tuple[Floats, Labels]:
    """Logits (N, K) of a classifier that is four times as sure as it should be, and labels (N,)."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, classes, samples)
    logits = rng.normal(size=(samples, classes))
    logits[np.arange(samples), labels] += 1.5
    return (4 * logits).astype(np.float32), labels


def npz(**arrays: Any) -> bytes:
    file = io.BytesIO()
    np.savez(file, **arrays)
    return file.getvalue()


def validation_npz(samples: int = 400, classes: int = 10, *, seed: int = 0) -> bytes:
    logits, labels = overconfident(samples, classes, seed=seed)
    return npz(logits=logits, labels=labels)


def form(data: bytes, **fields: str) -> bytes:
    """The body of `/fit` with a file and fields, of the type `CONTENT_TYPE`."""
    parts = [('name="file"; filename="v"', data)]
    parts += [(f'name="{name}"', value.encode()) for name, value in fields.items()]
    return multipart(*parts)


def multipart(*parts: tuple[str, bytes]) -> bytes:
    """A hand-made body of parts, each the end of its header and its content."""
    pieces = [
        f"--boundary\r\nContent-Disposition: form-data; {head}\r\n\r\n".encode() + content + b"\r\n"
        for head, content in parts
    ]
    return b"".join(pieces) + b"--boundary--\r\n"
