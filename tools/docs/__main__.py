"""Execute the documents against a service and update their outputs: `python -m tools.docs`."""

import difflib
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.deploy import processes
from tools.docs.conversation import ROOT, Conversation, normalised
from tools.docs.generated import PARTS

PLAYED = (
    "README.md",
    "docs/api/calibrators.md",
    "docs/configuration.md",
    "docs/http.md",
    "docs/operations.md",
    "docs/monitoring.md",
    "docs/scikit-learn.md",
)
"""Documents in the order in which they are executed against one service."""


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, processes.service(Path(folder)) as url:
        conversation = Conversation(url, Path(folder), PARTS)
        for name in PLAYED:
            written = (ROOT / name).read_text()
            (ROOT / name).write_text("".join(merged(written, conversation.played(written))))


def merged(written: str, played: str) -> Iterator[str]:
    """Yield the lines of `played`; keep a written line if only text that differs between runs changed."""
    old, new = written.splitlines(keepends=True), played.splitlines(keepends=True)
    matcher = difflib.SequenceMatcher(None, [*map(normalised, old)], [*map(normalised, new)], autojunk=False)
    for kind, start, stop, new_start, new_stop in matcher.get_opcodes():
        yield from old[start:stop] if kind == "equal" else new[new_start:new_stop]


if __name__ == "__main__":
    main()
