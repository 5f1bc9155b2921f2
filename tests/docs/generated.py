"""The parts of the documents that are made from the code: tables that nobody should keep up by hand."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from annotated_types import Ge, Gt, Le, Lt
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from app.settings import Settings

SIGNS = {Ge: "≥", Gt: ">", Le: "≤", Lt: "<"}


def settings_table() -> str:
    """List every setting: its variable, its default and what it means."""
    rows = ["| variable | default | meaning |", "|---|---|---|"]
    for name, field in Settings.model_fields.items():
        rows.append(f"| `BOXCAL_{name.upper()}` | {_default(field)} | {_meaning(field)} |")
    return "\n".join(rows) + "\n"


def _default(field: FieldInfo) -> str:
    value = field.default
    if value is None:
        return ""
    if value is PydanticUndefined:
        return "required"
    if isinstance(value, int) and value >= 2**20 and value % 2**20 == 0:
        return f"`{value}` ({value // 2**20} MiB)"
    return f"`{value.as_posix() if isinstance(value, Path) else value}`"


def _meaning(field: FieldInfo) -> str:
    choices = getattr(field.annotation, "__args__", ())
    if choices and all(isinstance(choice, str) for choice in choices):
        listed = " or ".join(f"`{choice}`" for choice in choices)
        return f"{field.description or 'One of'} {listed}.".replace("..", ".")
    limits = ", ".join(_limit(rule) for rule in field.metadata if type(rule) in SIGNS)
    description = field.description or ""
    return f"{description} ({limits})".strip() if limits else description


def _limit(rule: Any) -> str:
    return f"{SIGNS[type(rule)]} {getattr(rule, type(rule).__name__.lower())}"


PARTS: Mapping[str, Callable[[], str]] = {"settings": settings_table}
