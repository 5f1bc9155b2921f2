"""Compiled loops are kept on disk, and not used any more once a function that they call has changed."""

import os
import subprocess
import sys
from pathlib import Path

HELPER = "from numba import njit\n\n@njit\ndef helper(x):\n    return x + {}\n"
ENTRY = """
from boxcal.calibrators.operator.compiling import compiled
from helper import helper

@compiled
def entry(x):
    return helper(x)

print(entry(1), sum(entry.stats.cache_hits.values()))
"""


def test_loops_are_compiled_anew_when_what_they_call_has_changed(tmp_path: Path) -> None:
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path / "kept"), "PYTHONDONTWRITEBYTECODE": "1"}
    environment["PYTHONPATH"] = str(Path(__file__).parents[3])
    (tmp_path / "entry.py").write_text(ENTRY)
    said = []
    for added in (10, 10, 20):
        (tmp_path / "helper.py").write_text(HELPER.format(added))
        run = [sys.executable, str(tmp_path / "entry.py")]
        said.append(subprocess.run(run, env=environment, check=True, capture_output=True, text=True).stdout)
    assert said == ["11 0\n", "11 1\n", "21 0\n"]
