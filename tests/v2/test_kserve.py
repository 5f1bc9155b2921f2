"""KServe's clients, in a process of their own: they and Triton's register messages of the same names."""

import subprocess
import sys
from pathlib import Path

SESSION = Path(__file__).with_name("kserve_session.py")
ROOT = Path(__file__).parents[2]


def test_kserves_clients_get_the_answers_of_calibrate() -> None:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist", str(SESSION)]
    ran = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True, timeout=200)
    assert ran.returncode == 0, ran.stdout[-4000:]
    assert "passed" in ran.stdout
