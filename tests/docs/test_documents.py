"""The outputs in the documents are those of a real service, links are valid, and the site builds."""

from __future__ import annotations

import ast
import difflib
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import boxcal
from boxcal.app import client
from boxcal.app.predict.options import Options
from boxcal.app.settings.service import Settings
from boxcal.calibrators import methods
from tests.deploy import processes
from tools.docs.__main__ import PLAYED
from tools.docs.conversation import GENERATED, ROOT, Conversation, normalised
from tools.docs.generated import PARTS

PACKAGES = ("app", "calibrators", "models")
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
LINK = re.compile(r"\]\((?!https?:)([^)#]+)")


@pytest.mark.long
@pytest.mark.timeout(600)
def test_the_outputs_in_the_documents_are_current(tmp_path: Path) -> None:
    if shutil.which("curl") is None:
        pytest.skip("the documents use curl, which is not installed")
    with processes.service(tmp_path) as url:
        conversation = Conversation(url, tmp_path, PARTS)
        played = {name: conversation.played((ROOT / name).read_text()) for name in PLAYED}
    for name, text in played.items():
        written, said = (normalised(t).splitlines() for t in ((ROOT / name).read_text(), text))
        difference = "\n".join(difflib.unified_diff(written, said, name, "played", lineterm="", n=2))
        assert not difference, f"run python -m tools.docs\n{difference}"


@pytest.mark.parametrize(
    "document",
    [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))],
    ids=str,
)
def test_links_are_valid(document: Path) -> None:
    missing = [link for link in LINK.findall(document.read_text()) if not (document.parent / link).exists()]
    assert not missing


def defined(folder: Path) -> set[str]:
    """Names of the functions, classes and variables of a folder, those of methods with their class."""
    names = set()
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                names |= {f"{node.name}.{one.name}" for one in node.body if isinstance(one, FUNCTIONS)}
            if isinstance(node, (ast.ClassDef, *FUNCTIONS)):
                names.add(node.name)
            if isinstance(node, ast.Assign):
                names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return names


@pytest.mark.parametrize("document", ["architecture.md", "first-change.md"])
def test_files_and_methods_that_the_guides_name_exist(document: str) -> None:
    text = (ROOT / "docs" / document).read_text()
    known = set().union(*(defined(ROOT / package) for package in PACKAGES))
    methods_named = set(re.findall(r"`([A-Z]\w+\.\w+)`", text))
    assert methods_named <= known
    assert not {name for name in re.findall(r"`((?:[A-Z][a-z0-9]+){2,})[`(\[]", text) if name not in known}
    files = set(re.findall(r"`((?:[\w-]+/)+[\w-]+\.py)`", text))
    assert files
    assert not {name for name in files if not any((ROOT / part / name).exists() for part in ("", *PACKAGES))}


def test_the_table_of_methods_is_complete() -> None:
    """docs/methods.md has every part of every method's name."""
    text = (ROOT / "docs" / "methods.md").read_text()
    parts = {part for name in methods() for part in name.split("+")}
    assert parts
    assert not {part for part in parts if f"`{part}`" not in text and f"`+{part}`" not in text}


def test_the_version_is_the_same_everywhere() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    images = re.findall(r"image: boxcal:([\d.]+)", (ROOT / "docker-compose.yml").read_text())
    assert images == [version, version]
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()
    sections = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert next(name for name in sections if name != "Unreleased") == version


def test_every_generated_part_is_in_a_document() -> None:
    """A marker that is removed or misspelt would keep a part from being updated."""
    found = [name for document in PLAYED for _, name, _ in GENERATED.findall((ROOT / document).read_text())]
    assert sorted(found) == sorted(PARTS)


def test_every_setting_has_a_line_that_says_when_to_change_it() -> None:
    text = (ROOT / "docs" / "configuration.md").read_text().partition("When to change them")[2]
    assert re.findall(r"^\| `BOXCAL_(\w+)` \| \S", text, re.MULTILINE) == [
        name.upper() for name in Settings.model_fields
    ]


def test_every_option_is_in_the_table_of_options() -> None:
    text = (ROOT / "docs" / "http.md").read_text()
    assert not {name for name in Options.model_fields if f"| `{name}` |" not in text}


def test_every_warning_is_in_the_table_of_checks() -> None:
    sources = [
        *(ROOT / "calibrators").rglob("*.py"),
        ROOT / "app" / "fitting" / "worker" / "validation_set.py",
    ]
    made = re.compile(r'DataWarning\(\s*"(\w+)"|found\.append\(\("(\w+)"')
    codes = {code for path in sources for pair in made.findall(path.read_text()) for code in pair if code}
    assert len(codes) >= 22
    text = (ROOT / "docs" / "checks.md").read_text()
    assert not {code for code in codes if f"| `{code}` |" not in text}


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    build = [sys.executable, "-W", "error", "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    # Otherwise mkdocs-material prints an advertisement that contains the word "warning".
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(build, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    assert "WARNING" not in built.stderr
    reference = "".join(page.read_text() for page in (tmp_path / "api").glob("*.html"))
    missing = {name for name in (*boxcal.__all__, *client.__all__) if f'.{name}"' not in reference}
    assert not missing
