"""The documents keep their word: every command and example is played against a real service."""

import difflib
import re
import shutil
from pathlib import Path

import pytest

from calibrators import methods
from tests.deploy import processes
from tests.docs.conversation import ROOT, Conversation, normalised
from tests.docs.generated import PARTS

PLAYED = ["README.md"]
SHELL = re.compile(r"^```sh\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!https?:)([^)#]+)")


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", PLAYED)
def test_the_document_says_what_happens(name: str, tmp_path: Path) -> None:
    if shutil.which("curl") is None:
        pytest.skip("the documents speak curl, which is not installed")
    written = (ROOT / name).read_text()
    with processes.service(tmp_path) as url:
        played = Conversation(url, tmp_path, PARTS).played(written)
    difference = difflib.unified_diff(
        normalised(written).splitlines(), normalised(played).splitlines(), name, "played", lineterm="", n=2
    )
    assert not "\n".join(difference), f"play it anew: python -m tests.docs {name}"


def test_every_command_that_is_not_played_exists() -> None:
    """`sh` blocks start what runs for ever or needs a container engine; what they name must be there."""
    typed = [line for block in SHELL.findall((ROOT / "README.md").read_text()) for line in block.splitlines()]
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    profiles = re.findall(r"profiles: \[(\w+)\]", (ROOT / "docker-compose.yml").read_text())
    assert typed
    for line in typed:
        words = line.partition("#")[0].split()
        if words[0] == "make":
            assert words[1] in targets
        else:
            assert words[:2] == ["docker", "compose"]
            assert set(words[3:4] if words[2] == "--profile" else []) <= set(profiles)


@pytest.mark.parametrize(
    "document", [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))], ids=str
)
def test_links_lead_somewhere(document: Path) -> None:
    missing = [link for link in LINK.findall(document.read_text()) if not (document.parent / link).exists()]
    assert not missing


def test_the_table_of_methods_is_whole() -> None:
    """Every part of every method's name stands in the README's table."""
    text = (ROOT / "README.md").read_text()
    section = text.partition("## Methods\n")[2].partition("\n## ")[0]
    parts = {part for name in methods() for part in name.split("+")}
    assert parts
    assert not {part for part in parts if f"`{part}`" not in section and f"`+{part}`" not in section}
