"""The config file of a command: TOML with a value for any setting, named by `--config` or `BOXCAL_CONFIG`."""

from __future__ import annotations

import tomllib
from collections.abc import Collection
from pathlib import Path
from typing import Any

from boxcal.calibrators.errors import hint

VARIABLE = "BOXCAL_CONFIG"


class ConfigFileError(Exception):
    """The file cannot be read, or has a member that is no setting; the message names both."""


def read(path: Path, known: Collection[str]) -> dict[str, Any]:
    """Read the settings of a config file.

    A table `models` stands for a file of models: `model_list` reads it in this one.
    """
    if path.suffix != ".toml":
        raise ConfigFileError(f"{path} is not a `.toml` file")
    try:
        found = load(path)
    except ValueError as error:
        raise ConfigFileError(str(error)) from error
    if isinstance(found.get("models"), dict) and "model" not in found:
        del found["models"]
        found["model"] = str(path)
    for name in sorted(set(found) - set(known)):
        raise ConfigFileError(f"{path}: {name} is not a setting{hint(name, known)}")
    return found


def load(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"{path} is not TOML: {error}") from error
