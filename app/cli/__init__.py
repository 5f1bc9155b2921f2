"""The `boxcal` command: both paths through the house from a terminal, on this machine or through a service.

Importing this package costs no more than typer; each command imports what it needs when it runs.
"""

from boxcal.app.cli import running as running
from boxcal.app.cli.commands import main

__all__ = ["main"]
