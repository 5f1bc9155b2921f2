"""The command line's exit codes, and which errors a user can cause: those get one line, no traceback."""

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from typer.exceptions import TyperException

FAILED, MISUSED, UNAVAILABLE = 1, 2, 3

EXIT_CODES = (
    "Exit codes: 0 success; 1 the operation failed; 2 invalid usage or input; 3 the service cannot start, is "
    "unreachable or is temporarily unavailable; 130 interrupted."
)


DECLARED = r"\b(scores|label|classes|ignore|labels_as)="
"""Options that say what a file holds, as errors about uploads write them."""


class UsageError(Exception):
    """The arguments of a command do not make sense together; the message says which."""


class CannotStart(Exception):
    """Something that the service needs is not there; the message says what."""


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Put the name of a file before an error about its content, and write the options as they are typed."""
    from boxcal.app.http.problems import BoxcalError  # noqa: PLC0415 - help needs neither
    from boxcal.calibrators.errors import CalibrationError  # noqa: PLC0415

    try:
        yield
    except (BoxcalError, CalibrationError) as error:
        typed = re.sub(DECLARED, lambda found: f"--{found[1].replace('_', '-')} ", str(error))
        raise UsageError(f"{path}: {typed}") from error


def failure_of(error: Exception) -> tuple[str, int] | None:
    """Return the message and exit code of an error that a user or the service causes, None for a defect.

    Only packages that are loaded already are asked, so that an error costs no imports.
    """
    if isinstance(error, TyperException):
        return str(getattr(error, "format_message", error.__str__)()), getattr(error, "exit_code", MISUSED)
    if isinstance(error, ModuleNotFoundError) and not (error.name or "").startswith("boxcal"):
        return f"this command needs the package {error.name}: pip install 'boxcal[serve]'", MISUSED
    for kind, code in _kinds():
        if isinstance(error, kind):
            return " ".join(str(error).split()), code
    return None


def _kinds() -> list[tuple[type[Exception], int]]:
    kinds: list[tuple[type[Exception], int]] = [
        (UsageError, MISUSED),
        (CannotStart, UNAVAILABLE),
        (OSError, MISUSED),
    ]
    for module, name, code in (
        ("boxcal.app.client.errors", "UnavailableError", UNAVAILABLE),
        ("boxcal.app.client.errors", "TransportError", UNAVAILABLE),
        ("boxcal.app.client.errors", "InvalidRequestError", MISUSED),
        ("boxcal.app.client.errors", "InvalidUrlError", MISUSED),
        ("boxcal.app.client.errors", "ClientError", FAILED),
        ("boxcal.app.http.problems", "BoxcalError", MISUSED),
        ("boxcal.calibrators.errors", "CalibrationError", MISUSED),
        ("boxcal.models.errors", "BackboneError", MISUSED),
    ):
        if module in sys.modules:
            kinds.append((getattr(sys.modules[module], name), code))
    return kinds
