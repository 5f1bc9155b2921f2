"""Code, documentation and messages use the standard terms of the field.

`WORDS` and `PHRASES` are not allowed in any text file, `IDENTIFIERS` not as names in Python code or of files,
and `METHODS` not as names of functions. Each is listed with the term to use.
"""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EXCLUDED = re.compile(r"LICENSE|CHANGELOG\.md|.*\.lock|tests/test_vocabulary\.py")

WORDS: Mapping[str, str] = {
    "in(to)? force": "active",
    "pictures?": "image",
    "lack(s|ed|ing)?": "missing, requirements",
    "worthless": "timeout",
    "obituar(y|ies)": "describe_exit",
    "bur(y|ies|ied)": "reap",
    "complaints?": "invalid_reason",
    "dips?": "local_minima",
    "hops?": "perturbations",
    "give_way": "lower_thread_priority",
    "drained": "observe_throughput",
    "doors?": "lock_file",
    "PlainFailures": "StartupErrorReporter",
    "HeldHead": "BufferedHeaderTransport",
    "CAUTION": "ADMISSION_SAFETY_FACTOR",
}
IDENTIFIERS: Mapping[str, str] = {
    "needs": "requirements",
    "Wanted": "CalibrationRequest, GradientMask",
    "Pace": "BatchSizer",
    "Pieces": "ThreadPerCorePool",
}
METHODS: Mapping[str, str] = {"place": "reserve_slot"}
PHRASES: Mapping[str, str] = {
    "nothing else:": "You need ...",
    "refused for now": "Retries 503 responses, honouring Retry-After",
    "keeps what it keeps": "Directory for the database and uploads",
    "body that is no upload": "Maximum request body, except /fit",
    "promise about numbers": "Bounds constrain the numbers; they do not improve accuracy",
    "are no JPEG": "Unsupported format: expected JPEG, PNG or WebP",
    "Calibrator 0 has none": "Calibrator 0 has no report: it was never fitted",
    "the log says": "see the server log",
}
FORBIDDEN = re.compile(
    rf"(?<![A-Za-z])({'|'.join(WORDS)})(?![A-Za-z])|{'|'.join(map(re.escape, PHRASES))}", re.IGNORECASE
)
NAMES = re.compile(rf"\b({'|'.join([*IDENTIFIERS, *METHODS])})\b")


def files() -> list[str]:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    return [name for name in listed if not EXCLUDED.fullmatch(name) and (ROOT / name).is_file()]


def text_of(name: str) -> str | None:
    content = (ROOT / name).read_bytes()
    try:
        return None if b"\0" in content else content.decode()
    except UnicodeDecodeError:
        return None


def words_in(text: str) -> Iterator[str]:
    """Yield every forbidden word or phrase; a line break counts as a space."""
    for found in FORBIDDEN.finditer(re.sub(r"\s+(# )?", " ", text)):
        yield found[0]


def identifiers_in(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)) if NAMES.search(source) else ():
        names = (getattr(node, member, None) for member in ("id", "attr", "arg", "name", "asname"))
        yield from (name for name in names if isinstance(name, str) and name in IDENTIFIERS)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name in METHODS:
            yield f"{node.name}()"


def test_standard_terms_are_used() -> None:
    found = []
    for name in files():
        found += [f"{name}: in its name: {word}" for word in words_in(name)]
        found += [
            f"{name}: is named {part}" for part in Path(name).with_suffix("").parts if part in IDENTIFIERS
        ]
        text = text_of(name)
        if text is None:
            continue
        found += [f"{name}: {word}" for word in words_in(text)]
        if name.endswith(".py"):
            found += [f"{name}: {identifier}" for identifier in identifiers_in(text)]
    assert not found, "use the standard term (see tests/test_vocabulary.py):\n" + "\n".join(found)


@pytest.mark.parametrize(
    "text",
    [
        "the calibrator in\nforce",
        "A picture of a cat.",
        "what is lacking",
        "def _obituary(): ...",
        "An unexpected error; the log\n    # says which.",
        "class PlainFailures: ...",
        "hops = 3",
    ],
)
def test_a_forbidden_word_is_found(text: str) -> None:
    assert list(words_in(text))


@pytest.mark.parametrize(
    "source", ["import needs", "needs = 1", "class Wanted: ...", "def place(self): ...", "x.needs()"]
)
def test_a_forbidden_identifier_is_found(source: str) -> None:
    assert list(identifiers_in(source))


@pytest.mark.parametrize("text", ["a fit needs two samples", "the place of an entry", "a full black box"])
def test_ordinary_words_are_allowed(text: str) -> None:
    assert not list(words_in(text))
