"""Run the examples and write what they print beside them: `python -m tools.docs.examples`."""

import os
import subprocess
import sys
import time
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "docs" / "examples"
SCRIPTS = sorted(FOLDER.glob("*.py"))


def printed(script: Path) -> str:
    """Run a script; a warning fails it, as an error does.

    With one thread: those of OpenMP spin while they wait, on a busy machine for as good as ever.
    """
    command, environment = (
        [sys.executable, "-W", "error", str(script)],
        {**os.environ, "OMP_NUM_THREADS": "1"},
    )
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment).stdout


def main() -> None:
    for script in SCRIPTS:
        began = time.monotonic()
        script.with_suffix(".txt").write_text(printed(script))
        print(f"{script.stem}: {time.monotonic() - began:.1f} s", flush=True)


if __name__ == "__main__":
    main()
