"""The documents keep their word: every command and example is played against a real service."""

import difflib
import re
import shutil
from pathlib import Path

import pytest

from boxcal.calibrators import methods
from tests.deploy import processes
from tests.docs.__main__ import PLAYED
from tests.docs.conversation import ROOT, Conversation, normalised
from tests.docs.generated import PARTS

SHELL = re.compile(r"^```sh\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!https?:)([^)#]+)")


@pytest.mark.timeout(600)
def test_the_documents_say_what_happens(tmp_path: Path) -> None:
    if shutil.which("curl") is None:
        pytest.skip("the documents speak curl, which is not installed")
    with processes.service(tmp_path) as url:
        conversation = Conversation(url, tmp_path, PARTS)
        played = {name: conversation.played((ROOT / name).read_text()) for name in PLAYED}
    for name, text in played.items():
        written, said = (normalised(t).splitlines() for t in ((ROOT / name).read_text(), text))
        difference = "\n".join(difflib.unified_diff(written, said, name, "played", lineterm="", n=2))
        assert not difference, f"play it anew: python -m tests.docs\n{difference}"


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
