"""What holds for every test."""

from __future__ import annotations


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """Name bytes by their argument: a gzip stream holds the time, and workers must agree on names."""
    return argname if isinstance(val, bytes) else None
