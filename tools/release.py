"""Writes the notes of a release: the section of its version in CHANGELOG.md. `python -m tools.release`."""

from __future__ import annotations

import argparse
import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
HEADING = re.compile(r"^## (\S+).*$\n", re.MULTILINE)


def section(changelog: str, version: str) -> str:
    """Return what the changelog says about a version, without its heading."""
    headings = list(HEADING.finditer(changelog))
    for heading, after in zip(headings, [*headings[1:], None], strict=True):
        if heading[1] == version:
            return changelog[heading.end() : after.start() if after else None].strip()
    raise ValueError(f"CHANGELOG.md has no section {version}.")


def notes(changelog: str, version: str, tag: str) -> str:
    """Return the notes; refuse a tag of another version, and changes that are in no version."""
    if tag and tag != f"v{version}":
        raise ValueError(
            f"The tag is {tag}, and the version of pyproject.toml is {version}: name it v{version}."
        )
    found = section(changelog, version)
    if not found:
        raise ValueError(f"The section {version} of CHANGELOG.md is empty.")
    if tag and re.search(r"^## Unreleased$", changelog, re.MULTILINE) and section(changelog, "Unreleased"):
        raise ValueError(f'CHANGELOG.md has changes under "Unreleased": move them to {version}.')
    return f"{found}\n"


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the notes of a release.")
    parser.add_argument("--tag", default="", help="the tag of the release; must be that of the version")
    tag = parser.parse_args().tag
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    try:
        sys.stdout.write(notes((ROOT / "CHANGELOG.md").read_text(), version, tag))
    except ValueError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
