"""What a release consists of: its notes, the list of its packages, and a workflow that may not do more."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.deploy.test_project_files import PROJECT, ROOT, load
from tools.release import notes, section

CHANGELOG = (
    "# Changes\n\n## Unreleased\n\n{}## 1.1.0 - 2026-01-02\n\n- B\n\n### Fixed\n\n- C\n\n## 1.0.0\n\n- A\n"
)


def test_the_notes_are_the_section_of_the_version() -> None:
    changelog = CHANGELOG.format("")
    assert notes(changelog, "1.1.0", "v1.1.0") == "- B\n\n### Fixed\n\n- C\n"
    assert notes(changelog, "1.0.0", "") == "- A\n"
    assert notes(CHANGELOG.format("- D\n\n"), "1.1.0", "") == notes(changelog, "1.1.0", "")


@pytest.mark.parametrize(
    ("unreleased", "version", "tag", "message"),
    [
        ("", "1.1.0", "v1.1.1", r"tag is v1\.1\.1, .* version of pyproject\.toml is 1\.1\.0"),
        ("", "1.2.0", "", r"no section 1\.2\.0"),
        ("- D\n\n", "1.1.0", "v1.1.0", 'changes under "Unreleased"'),
        ("", "Unreleased", "", "section Unreleased of CHANGELOG.md is empty"),
    ],
)
def test_a_wrong_release_is_refused(unreleased: str, version: str, tag: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        notes(CHANGELOG.format(unreleased), version, tag)


def test_the_command_writes_the_notes_of_this_version() -> None:
    command = [sys.executable, "-m", "tools.release"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == section((ROOT / "CHANGELOG.md").read_text(), PROJECT["version"]) + "\n"
    refused = subprocess.run([*command, "--tag", "v0"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert refused.returncode == 1
    assert "name it v" in refused.stderr


def test_only_the_job_without_our_code_can_publish() -> None:
    workflow = load(".github/workflows/release.yml")
    assert workflow["permissions"] == {"contents": "read"}
    allowed = {name: job.get("permissions", {}) for name, job in workflow["jobs"].items()}
    assert [name for name, given in allowed.items() if "id-token" in given] == ["publish"]
    publish = workflow["jobs"]["publish"]
    assert publish["environment"] == "release"
    assert not [step for step in publish["steps"] if "run" in step]
    assert not re.search(r"password|secrets\.|repository-url", json.dumps(workflow))


@pytest.mark.parametrize("lock", ["requirements", "requirements-onnx"])
def test_the_list_of_packages_has_every_line_of_the_lock_file(lock: str, tmp_path: Path) -> None:
    command = ROOT / ".venv-release" / "bin" / "cyclonedx-py"
    if not command.exists():
        pytest.skip("cyclonedx-bom is not installed; `make sbom` installs it")
    document = tmp_path / "sbom.json"
    arguments = [f"{lock}.lock", "--pyproject", "pyproject.toml", "--output-file", str(document)]
    subprocess.run([str(command), "requirements", *arguments], cwd=ROOT, check=True, capture_output=True)
    written = json.loads(document.read_text())
    assert written["metadata"]["component"]["version"] == PROJECT["version"]
    listed = {(one["name"], one["version"]) for one in written["components"]}
    pinned = re.findall(r"^([\w.-]+)(?:\[.*\])?==([^ ;]+)", (ROOT / f"{lock}.lock").read_text(), re.MULTILINE)
    assert listed == set(pinned)
    assert all(one["externalReferences"][0]["hashes"] for one in written["components"])
