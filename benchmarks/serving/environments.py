"""Creates a virtual environment for each server; it is reused until its pinned packages change."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from benchmarks.serving.contestants import Contestant


def python_of(contestant: Contestant, scratch: Path) -> Path:
    """Return the interpreter of a server; installs its packages if necessary."""
    if not contestant.requirements:
        return Path(sys.executable)
    folder = scratch / contestant.name
    python = folder / "bin" / "python"
    installed = folder / "requirements.txt"
    wanted = "\n".join(contestant.requirements) + "\n"
    if installed.exists() and installed.read_text() == wanted:
        return python
    print(f"installing {contestant.name}: {' '.join(contestant.requirements)}", flush=True)
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    result = subprocess.run([*pip, *contestant.requirements], capture_output=True, text=True, check=False)
    if result.returncode:
        raise SystemExit(f"{contestant.name} cannot be installed:\n{result.stderr[-2000:]}")
    installed.write_text(wanted)
    return python
