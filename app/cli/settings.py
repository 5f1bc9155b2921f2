"""The settings of a command: its options come before the environment, which comes before the config file.

The options of settings are made when the command runs or shows its help.
"""

# ruff: noqa: PLC0415 - the settings take a tenth of a second to import, which few commands need

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union, get_args, get_origin

import typer
from typer.core import TyperCommand

from boxcal.app.cli.output import UsageError, escape
from boxcal.app.settings.config_file import VARIABLE, ConfigFileError

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo

    from boxcal.app.settings.service import Settings


def read_settings(config: Path | None = None, **given: Any) -> Settings:
    """Read the settings; those that are not given come from the environment and the config file."""
    from pydantic import ValidationError

    from boxcal.app.settings.service import Settings, unknown_variable

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
        # Our own messages name what is wrong of the value; the value may be a secret.
        own = first["type"] == "value_error"
        found = (
            first["msg"].removeprefix("Value error, ") if own else f"{first['msg']}, got {first['input']!r}"
        )
        raise UsageError(f"{_source(name, given)}: {found}") from error


def _source(name: str, given: Mapping[str, Any]) -> str:
    """Name a setting as the user did."""
    if name in given:
        return f"--{name.replace('_', '-')}"
    variable, file = f"BOXCAL_{name.upper()}", os.environ.get(VARIABLE)
    return variable if not file or variable in os.environ else f"{file}: {name}"


PANEL = "Settings (also BOXCAL_NAME and the config file)"

METAVARS = {int: "N", float: "N", Path: "PATH", str: "TEXT"}


class SettingsCommand(TyperCommand):
    """A command with an option for each setting; `ctx.obj` has those that were given, by name."""

    def get_params(self, ctx: Any) -> list[Any]:
        """List the options of the command, of the settings, and `--help`."""
        own = super().get_params(ctx)
        return [*self.params, *setting_options(), *own[len(self.params) :]]

    def invoke(self, ctx: Any) -> Any:
        """Run the command, which does not take the settings as arguments."""
        given = {option.name: ctx.params.pop(option.name) for option in setting_options()}
        ctx.obj = {name: value for name, value in given.items() if value is not None}
        return super().invoke(ctx)


@cache
def setting_options() -> list[Any]:
    """Let typer make an option of each setting."""
    from boxcal.app.settings.service import Settings

    def command(**_: Any) -> None: ...

    options = {name: option_of(name, field) for name, field in Settings.model_fields.items()}
    command.__annotations__ = options
    command.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
            for name, annotation in options.items()
        ]
    )
    app = typer.Typer(add_completion=False)
    app.command()(command)
    return list(typer.main.get_command(app).params)


def option_of(name: str, field: FieldInfo) -> Any:
    """Describe the option of a setting; its value is checked with all settings, whichever way they came."""
    kind, text = kind_of(field.annotation), escape(field.description or "")
    if get_origin(kind) is Literal:
        text += f" One of {', '.join(get_args(kind))}."
    if field.default not in (None, "", False):
        text += f" Default: {escape(str(field.default))}."
    return Annotated[
        Union[kind, None],  # noqa: UP007 - the kind is a value
        typer.Option(
            f"--{name.replace('_', '-')}",  # for a bool, without its negative
            help=text,
            metavar=METAVARS.get(kind, "CHOICE" if get_origin(kind) is Literal else None),
            show_default=False,
            rich_help_panel=PANEL,
        ),
    ]


def kind_of(annotation: Any) -> Any:
    """Return the type of an option's value, which is text where the setting has a type of its own."""
    if get_origin(annotation) in (Union, UnionType):
        (annotation,) = (one for one in get_args(annotation) if one is not NoneType)
    if get_origin(annotation) is Literal or annotation in (bool, int, float, Path):
        return annotation
    return str
