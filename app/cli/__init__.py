"""The `boxcal` command: predicts, fits and compares, here or through a service, and runs the service.

Importing this package costs nothing; each command imports what it needs when it runs.
"""

# ruff: noqa: PLC0415 - see there

import gc
import io
import sys


def main() -> None:
    """Run the command line; an expected error ends it with a message of one line and an exit code."""
    if sys.argv[1:2] == ["serve"]:
        from boxcal.app.cli.quick_start import hold_hangup, set_up_allocator

        hold_hangup()
        set_up_allocator()  # starts the process anew, so before anything that takes long to import
        gc.disable()  # as `prepare` does, for these imports too
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # for what its encoding does not have
    try:
        from boxcal.app.cli.commands import main as run

        run()
    finally:
        gc.enable()
