"""Executes the code blocks of documents against a running service.

Three kinds of parts are replaced by their current content. In `console` blocks, each line after `$ ` runs in
a shell, and the lines below are its output. In `pycon` blocks, each line after `>>> ` runs in one Python
session for all documents. The text between `<!-- name -->` and `<!-- /name -->` is generated. `python -m
tools.docs` writes the result into the documents, and the tests compare it with them.
"""

import contextlib
import doctest
import io
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
SERVICE = "http://127.0.0.1:8000"
COMMAND_SECONDS = 300

FENCE = re.compile(r"^```(console|pycon)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
GENERATED = re.compile(r"^(<!-- (\w+) -->\n).*?^(<!-- /\2 -->)$", re.MULTILINE | re.DOTALL)

VARYING: Mapping[str, str | Callable[[re.Match[str]], str]] = {
    r"\d+\.\d{7,}(?:e-?\d+)?": lambda number: (
        f"{float(number[0]):.5f}"
    ),  # the processor decides the last digits
    r'("(?:decode|queue|backbone|calibrate|total)": ?)[0-9.e-]+': r"\1<milliseconds>",
    r'("(?:seconds)": ?)[0-9.e-]+': r"\1<seconds>",
    r'("request_id": ?")[^"]+': r"\1<request>",
    r"\b\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d+)?(?:Z|\+00:00)?": "<time>",
    r'("id": ?"|/fits/|\bfit )[0-9a-f][0-9a-f-]{7,}': r"\1<fit>",
}
"""Patterns of text that differs between runs, with their replacements. All other text must be equal."""


def normalised(text: str) -> str:
    """Replace text that differs between runs by placeholders."""
    for pattern, name in VARYING.items():
        text = re.sub(pattern, name, text)
    return text


@dataclass
class Conversation:
    """Executes documents in a folder, against one service.

    Parameters
    ----------
    url
        Address of the service; the documents use `SERVICE`.
    folder
        Working directory of the commands; contains a link to the `docs` of the checkout.
    generated
        Functions that return the generated parts, by name.
    """

    url: str
    folder: Path
    generated: Mapping[str, Callable[[], str]] = field(default_factory=dict)
    names: dict[str, Any] = field(default_factory=lambda: {"__name__": "__console__"})

    def __post_init__(self) -> None:
        (self.folder / "docs").symlink_to(ROOT / "docs")

    def played(self, document: str) -> str:
        """Return the document with its current outputs and generated parts."""
        document = GENERATED.sub(lambda m: m[1] + self.generated[m[2]]() + m[3], document)
        with contextlib.chdir(self.folder):
            return FENCE.sub(lambda m: f"```{m[1]}\n{''.join(self._block(m[1], m[2]))}```", document)

    def _block(self, kind: str, text: str) -> Iterator[str]:
        return self._shell(text) if kind == "console" else self._python(text)

    def _shell(self, text: str) -> Iterator[str]:
        for typed in commands(text):
            yield f"$ {typed}\n"
            command = typed.replace(SERVICE, self.url).replace(
                "make demo", f"python -m boxcal.app.demo --url {self.url}"
            )
            done = subprocess.run(
                ["/bin/sh", "-c", command],
                cwd=self.folder,
                env=environment(),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=COMMAND_SECONDS,
                check=False,
            )
            yield self._said(done.stdout)

    def _python(self, text: str) -> Iterator[str]:
        for example in doctest.DocTestParser().get_examples(text):
            first, *more = example.source.splitlines()
            yield "".join([f">>> {first}\n", *(f"... {line}\n" for line in more)])
            output = io.StringIO()
            with contextlib.redirect_stdout(output):
                code = compile(example.source.replace(SERVICE, self.url), "<document>", "single")
                exec(code, self.names)  # noqa: S102 - our own documents
            yield self._said(output.getvalue())

    def _said(self, output: str) -> str:
        """Replace the address of the service, and remove trailing whitespace."""
        output = output.replace(self.url, SERVICE)
        return "".join(f"{line.rstrip()}\n" for line in output.splitlines())


def commands(text: str) -> Iterator[str]:
    """Yield the commands of a console block; an open quote or a trailing backslash continues a command."""
    lines = iter(text.splitlines())
    for line in lines:
        if line.startswith("$ "):
            command = line[2:]
            while _is_open(command):
                command += "\n" + next(lines)
            yield command


def _is_open(command: str) -> bool:
    if command.endswith("\\"):
        return True
    try:
        shlex.split(command)
    except ValueError:
        return True
    return False


def environment() -> dict[str, str]:
    """Return the environment of this process with the installed commands, without settings of the service."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("BOXCAL_")}
    return own | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{own.get('PATH', '')}", "COLUMNS": "90"}
