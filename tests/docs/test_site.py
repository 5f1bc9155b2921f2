"""The documentation site builds without a warning and contains the public names."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import boxcal
from boxcal.app import client
from tools.docs.conversation import ROOT


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    build = [sys.executable, "-W", "error", "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    # Otherwise mkdocs-material prints an advertisement that contains the word "warning".
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(build, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    assert "WARNING" not in built.stderr
    reference = "".join(page.read_text() for page in (tmp_path / "api").glob("*.html"))
    missing = {name for name in (*boxcal.__all__, *client.__all__) if f'.{name}"' not in reference}
    assert not missing
