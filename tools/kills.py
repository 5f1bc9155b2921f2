"""Kills a service at random moments of its work and starts it again: `python -m tools.kills 500`.

After each start the last acknowledged state must be there, the database whole, and no fit or file left over.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from tools.hostile.crashes import rounds


def main() -> int:
    """Run; an assertion that fails ends it."""
    parser = argparse.ArgumentParser(description="Kill a service at random moments, and start it again.")
    parser.add_argument("count", type=int)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    began = time.monotonic()

    def report(line: str) -> None:
        print(f"{time.monotonic() - began:6.0f} s: {line}", flush=True)

    with tempfile.TemporaryDirectory(prefix="boxcal-kills-") as folder:
        stages = Counter(rounds(Path(folder) / "data", given.count, given.seed, report))
    print(f"{given.count} of {given.count} starts are right. Killed in: {dict(stages.most_common())}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
