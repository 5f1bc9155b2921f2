"""Benchmarks. Each is run manually with one command and is not part of the test suite."""

import argparse


def command_line(description: str | None) -> argparse.ArgumentParser:
    """Give a parser that shows the description of a module as it is written."""
    return argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
