"""Run the examples and write what they print beside them: `python -m tools.docs.examples`."""

import subprocess
import sys
import time
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "docs" / "examples"
SCRIPTS = sorted(FOLDER.glob("*.py"))


def printed(script: Path) -> str:
    """Run a script; a warning fails it, as an error does."""
    command = [sys.executable, "-W", "error", str(script)]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout


def main() -> None:
    for script in SCRIPTS:
        began = time.monotonic()
        script.with_suffix(".txt").write_text(printed(script))
        print(f"{script.stem}: {time.monotonic() - began:.1f} s", flush=True)


if __name__ == "__main__":
    main()
