"""Play the documents against a service started for them and write what it says: `python -m tests.docs`."""

import tempfile
from pathlib import Path

from tests.deploy import processes
from tests.docs.conversation import ROOT, Conversation
from tests.docs.generated import PARTS

PLAYED = ("README.md", "docs/operations.md")
"""In this order, against one service: what the second shows rests on what the first did."""


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, processes.service(Path(folder)) as url:
        conversation = Conversation(url, Path(folder), PARTS)
        for name in PLAYED:
            (ROOT / name).write_text(conversation.played((ROOT / name).read_text()))


if __name__ == "__main__":
    main()
