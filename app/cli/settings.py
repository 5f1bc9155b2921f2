"""The settings of a command: its options come before the environment, which comes before the config file."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from boxcal.app.cli.failures import UsageError
from boxcal.app.settings.config_file import VARIABLE, ConfigFileError
from boxcal.app.settings.service import Settings, unknown_variable


def read_settings(config: Path | None = None, **given: Any) -> Settings:
    """Read the settings; those that are not given come from the environment and the config file."""
    if config is not None:
        os.environ[VARIABLE] = str(config.absolute())
    if (wrong := unknown_variable(os.environ)) is not None:
        raise UsageError(wrong)
    try:
        return Settings(**given)
    except ConfigFileError as error:
        raise UsageError(str(error)) from error
    except ValidationError as error:
        first = error.errors()[0]
        if not first["loc"]:  # several settings that do not fit together, perhaps a secret among them
            raise UsageError(first["msg"].removeprefix("Value error, ")) from error
        name = ".".join(str(part) for part in first["loc"])
        raise UsageError(f"{_source(name, given)}: {first['msg']}, got {first['input']!r}") from error


def _source(name: str, given: Mapping[str, Any]) -> str:
    """Name a setting as the user did."""
    if name in given:
        return f"--{name.replace('_', '-')}"
    variable, file = f"BOXCAL_{name.upper()}", os.environ.get(VARIABLE)
    return variable if not file or variable in os.environ else f"{file}: {name}"
