"""The settings of a command: its options take precedence over the environment."""

import os
from typing import Any

from pydantic import ValidationError

from boxcal.app.cli.failures import UsageError
from boxcal.app.settings import Settings, unknown_variable


def read_settings(**given: Any) -> Settings:
    """Read the settings; options that are None come from the environment.

    Raises
    ------
    UsageError
        If a value is invalid, or a variable is unknown; the message names it.
    """
    if (wrong := unknown_variable(os.environ)) is not None:
        raise UsageError(wrong)
    try:
        return Settings(**{name: value for name, value in given.items() if value is not None})
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"])
        raise UsageError(f"BOXCAL_{name.upper()}: {first['msg']}, got {first['input']!r}") from error
