"""Fingerprints of model files: what identifies the backbone of a calibrator."""

from __future__ import annotations

import hashlib
from pathlib import Path


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
