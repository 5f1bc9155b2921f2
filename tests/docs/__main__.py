"""Play documents against a service started for them and write down what came out.

python -m tests.docs README.md docs/operations.md
"""

import sys
import tempfile
from pathlib import Path

from tests.deploy import processes
from tests.docs.conversation import Conversation
from tests.docs.generated import PARTS


def main() -> None:
    for name in sys.argv[1:]:
        path = Path(name)
        with tempfile.TemporaryDirectory() as folder, processes.service(Path(folder)) as url:
            path.write_text(Conversation(url, Path(folder), PARTS).played(path.read_text()))


if __name__ == "__main__":
    main()
