"""Every code block of the documentation is executed, or checked by the parser of the tool that reads it.

`console` and `pycon` blocks run against a service in `test_documents.py`, the examples of CONTRIBUTING.md in
`tests/calibrators/test_contributing.py`. This file checks the other blocks, and that there are no others.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from prometheus_client import generate_latest

from boxcal.app.observability.telemetry import Telemetry
from boxcal.app.settings import model_list
from boxcal.app.settings.service import Settings
from boxcal.calibrators.checks import check_data
from boxcal.calibrators.data import check_validation_set
from boxcal.models.backends.spec import ModelSpec
from tools.docs.__main__ import PLAYED
from tools.docs.conversation import ROOT

BLOCK = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
DOCUMENTS = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    ROOT / "deploy" / "models" / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
CONTRIBUTING = re.compile(r'(python|text) title="calibrators/[\w/]+\.py"')
ASSIGNMENT = re.compile(r"([A-Z][A-Z_]*)=(\S+)")


@pytest.mark.parametrize(
    "document", [path for path in DOCUMENTS if path.name != "CHANGELOG.md"], ids=lambda path: path.name
)
def test_what_to_install_is_installed_from_a_checkout(document: Path) -> None:
    """No package index has it, so `pip install boxcal` installs nothing, or what a stranger has written."""
    assert not re.search(r"pip install '?boxcal", document.read_text())


@dataclass(frozen=True)
class Block:
    document: str
    language: str
    text: str


def blocks() -> list[Block]:
    return [
        Block(str(path.relative_to(ROOT)), language, text)
        for path in DOCUMENTS
        for language, text in BLOCK.findall(path.read_text())
    ]


def run(*command: str) -> str:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def check_settings(variables: Mapping[str, str]) -> None:
    """Check that the settings accept the variables with the prefix BOXCAL_."""
    given = {name: value for name, value in variables.items() if name != "BOXCAL_CONFIG"}
    fields = {name.removeprefix("BOXCAL_").lower(): value for name, value in given.items()}
    assert fields.keys() <= Settings.model_fields.keys()
    Settings(**fields)  # type: ignore[arg-type]  # text, as from the environment


def check_make(words: list[str]) -> None:
    """Check that make knows the target; `-n` prints the recipe and does not run it."""
    (target,) = words
    assert run("make", "-n", target)


def check_docker(words: list[str]) -> None:
    """Check the arguments of `docker compose up`; `tests/deploy/test_compose.py` checks the file."""
    assert words[0] == "compose"
    assert words[-1] == "up"
    profiles = {
        profile
        for service in yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"].values()
        for profile in service.get("profiles", [])
    }
    options = words[1:-1]
    assert options in ([], *(["--profile", profile] for profile in profiles))


def check_python(words: list[str]) -> None:
    assert words[0] == "-m"
    shown = run(sys.executable, "-m", words[1], "--help")
    assert {word for word in words[2:] if word.startswith("--")} <= set(re.findall(r"--[a-z-]+", shown))


def check_boxcal(words: list[str]) -> None:
    run(sys.executable, "-c", "from boxcal.app.cli import main; main()", *words, "--help")


def check_export(words: list[str]) -> None:
    """Check that the serving benchmark reads every variable."""
    shown = run(sys.executable, "-m", "benchmarks.serving", "--help")
    for word in words:
        assignment = ASSIGNMENT.fullmatch(word)
        assert assignment is not None
        assert f"${assignment[1]}" in shown


def check_helm(words: list[str]) -> None:
    """Check that the chart has every value; `tests/deploy/test_helm.py` renders it."""
    chart, values = ROOT / words[2], [words[n + 1] for n, word in enumerate(words) if word == "--set"]
    properties = json.loads((chart / "values.schema.json").read_text())["properties"]
    assert values
    for path, _, _ in (value.partition("=") for value in values):
        first, _, second = path.partition(".")
        assert second in properties[first].get("properties", {"": None})


def check_source(arguments: list[str]) -> None:
    """Check that the environment is the one that make fills."""
    assert arguments == [".venv/bin/activate"]


COMMANDS: Mapping[str, Callable[[list[str]], None]] = {
    "make": check_make,
    "docker": check_docker,
    "python": check_python,
    "boxcal": check_boxcal,
    "export": check_export,
    "helm": check_helm,
    "source": check_source,
}


def check_sh(block: Block) -> None:
    """Check commands that do not end by themselves, take minutes, or require a container engine or a GPU."""
    lines = [words for line in block.text.splitlines() if (words := shlex.split(line, comments=True))]
    assert lines
    for words in lines:
        variables = {}
        while match := ASSIGNMENT.fullmatch(words[0]):
            variables[match[1]] = match[2]
            del words[0]
        check_settings({name: value for name, value in variables.items() if name.startswith("BOXCAL_")})
        COMMANDS[words[0]](words[1:])


def check_played(block: Block) -> None:
    """Check that `test_documents.py` runs the document."""
    assert block.document in PLAYED


def check_promql(block: Block) -> None:
    """Check that the service exposes every metric of the query, once there was a request."""
    telemetry = Telemetry({"/predict": [200]})
    telemetry.request("/predict", 200, 0.01)
    exposed = generate_latest(telemetry.registry).decode()
    names = re.findall(r"boxcal_\w+", block.text)
    assert names
    assert all(re.search(rf"^{name}[ {{]", exposed, re.MULTILINE) for name in names)


def check_toml(block: Block) -> None:
    with tempfile.NamedTemporaryFile("w", suffix=".toml") as file:
        file.write(block.text)
        file.flush()
        assert model_list.read(file.name)


def check_json(block: Block) -> None:
    """Check that the document is what the code reads or writes."""
    DOCUMENTS_IN_JSON[block.document](json.loads(block.text))


def check_declaration(document: Any) -> None:
    assert ModelSpec.model_validate(document).preprocessing is not None


def check_warning(document: Any) -> None:
    """Check that labels which do not belong to their logits cause this warning, up to its numbers."""
    logits = np.random.default_rng(0).normal(0, 5, (400, 10))
    (warning,) = check_data(check_validation_set(logits, (logits.argmax(axis=1) + 1) % 10))
    numbers = re.compile(r"\d+")
    assert numbers.sub("N", json.dumps(document)) == numbers.sub("N", json.dumps(warning.to_dict()))


def check_example(block: Block) -> None:
    """Check that the block is a file of docs/examples; `test_examples.py` runs the scripts."""
    example = re.fullmatch(r'--8<-- "(docs/examples/\w+\.(?:py|txt))"\n', block.text)
    assert example is not None
    assert (ROOT / example[1]).exists()


DOCUMENTS_IN_JSON: Mapping[str, Callable[[Any], None]] = {
    "docs/backbones.md": check_declaration,
    "docs/checks.md": check_warning,
}


LANGUAGES: Mapping[str, Callable[[Block], None]] = {
    "console": check_played,
    "pycon": check_played,
    "sh": check_sh,
    "promql": check_promql,
    "json": check_json,
    "toml": check_toml,
    "{.python}": check_example,  # ruff would format the snippet of a `python` block
    "text": check_example,
}


@pytest.mark.parametrize("block", blocks(), ids=lambda block: f"{block.document}: {block.text[:30]!r}")
def test_block(block: Block) -> None:
    if CONTRIBUTING.fullmatch(block.language):
        assert block.document == "CONTRIBUTING.md"
    else:
        LANGUAGES[block.language](block)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_code_is_in_fenced_blocks(document: Path) -> None:
    """A block that is only indented would escape the checks."""
    text = BLOCK.sub("", document.read_text())
    assert "```" not in text
    assert not re.findall(r"\n\n    +(?![-*\d])\S.*", text)
