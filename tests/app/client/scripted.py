"""A real HTTP server on a port that answers by a script: what a healthy service does not do at will."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import Any

from tests.app.answering import Quiet, answering

FIT = {
    "id": "f",
    "state": "running",
    "progress": 0.5,
    "stage": "fit",
    "method": "ts",
    "activate": "if_better",
    "samples": 539,
    "created_at": "2026-11-21T02:51:59Z",
}
"""The state of a fit, as the service sends it."""


@dataclass(frozen=True)
class Reply:
    """One answer; `drop` closes the connection without one."""

    status: int = 200
    document: Any = None
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    drop: bool = False

    def write(self, handler: BaseHTTPRequestHandler) -> None:
        if self.drop:
            handler.close_connection = True
            return
        body = self.body or json.dumps(self.document).encode()
        kind = "application/json" if self.status < 400 else "application/problem+json"
        handler.send_response(self.status)
        for name, value in ({"content-type": kind, "content-length": str(len(body))} | self.headers).items():
            handler.send_header(name, value)
        handler.end_headers()
        handler.wfile.write(body)


@dataclass
class Script:
    """Answers by path, each list played once and its last entry repeated; and what was asked."""

    url: str
    replies: dict[str, list[Reply]]
    asked: list[tuple[str, str]] = field(default_factory=list)

    def count(self, path: str) -> int:
        return sum(1 for _, asked in self.asked if asked == path)


@contextmanager
def scripted(**replies: list[Reply]) -> Iterator[Script]:
    """Serve a script whose keys are paths, '/' written '_' and the leading one left out."""
    script = Script("", {"/" + path.replace("_", "/"): list(answers) for path, answers in replies.items()})

    class Handler(Quiet):
        def answer(self) -> None:
            self.rfile.read(int(self.headers.get("content-length", 0)))
            path = self.path.partition("?")[0]
            script.asked.append((self.command, path))
            queue = script.replies[path]
            (queue.pop(0) if len(queue) > 1 else queue[0]).write(self)

        do_GET = do_POST = do_DELETE = answer  # noqa: N815 - the base class's names

    with answering(Handler) as script.url:
        yield script
