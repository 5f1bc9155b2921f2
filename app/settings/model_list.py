"""Several models in one service, as `BOXCAL_MODEL` lists them.

The list is `NAME=MODEL,...`, or a `.toml` file with a table for each model, which may also set what is
its own: its labels, its queue, its share of the device and its bounds. In a config file these are the tables
`[models.NAME]`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from boxcal.app.settings import config_file

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
RESERVED = ".calibrator"
"""Ends the name of a model's calibrator in the Open Inference Protocol."""
STATISTICS = "stats"
"""In its paths, the statistics of all models."""


class ModelTable(BaseModel):
    """What may be set for each model; the other settings are those of the service."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str
    weights: str | None = None
    labels: Path | None = None
    device: str | None = None
    precision: Literal["float32", "bfloat16", "float16"] | None = None
    max_batch_size: int | None = Field(None, ge=1)
    # Of the device while several models have work, in proportion to those of the others
    share: float = Field(1.0, gt=0, allow_inf_nan=False)
    lower: Any = 0.0  # Bounds of requests that set none, in the form of `options.bounds`
    upper: Any = 1.0


def is_list(text: str) -> bool:
    """Whether `BOXCAL_MODEL` lists models, and is not one: a model may have `=` only behind its `:`."""
    return text.endswith(".toml") or ("=" in text and ":" not in text.partition("=")[0])


def read(text: str) -> Mapping[str, ModelTable]:
    """Read a list of models."""
    sent = _file(Path(text)) if text.endswith(".toml") else _listed(text)
    if not sent:
        raise ValueError("it names no model")
    for name in sent:
        if not NAME.fullmatch(name) or name.endswith(RESERVED) or name == STATISTICS:
            raise ValueError(
                f"{name!r:.100} cannot name a model: a name has up to 64 letters, digits, '_', '.' and '-', "
                f"begins with a letter or digit, does not end with '{RESERVED}' and is not '{STATISTICS}'"
            )
    return {name: _table(name, content) for name, content in sent.items()}


def _listed(text: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for part in filter(None, (one.strip() for one in text.split(","))):
        name, equals, spec = part.partition("=")
        if not equals or not spec:
            raise ValueError(f"{part!r:.100} is not NAME=MODEL, such as digits=digits")
        if name in found:
            raise ValueError(f"{name!r} names two models")
        found[name] = {"model": spec}
    return found


def _file(path: Path) -> dict[str, Any]:
    found = config_file.load(path)
    tables = found.get("models")
    is_config_file = isinstance(tables, dict) and all(isinstance(one, dict) for one in tables.values())
    return cast("dict[str, Any]", tables) if is_config_file else found


def _table(name: str, content: Any) -> ModelTable:
    if not isinstance(content, dict):
        raise ValueError(
            f"{name} = {content!r:.100} is not a table; write [{name}] and below it model = '...'"
        )
    try:
        return ModelTable.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, (name, *first["loc"])))
        raise ValueError(f"{place}: {first['msg']}, got {first['input']!r:.100}") from error
