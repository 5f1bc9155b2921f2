"""The files that other tools read: the workflow, dependabot, the citation and the hooks."""

from __future__ import annotations

import json
import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from check_jsonschema.builtin_schemas import get_builtin_schema
from jsonschema.validators import validator_for

from boxcal.app.settings.service import Settings

ROOT = Path(__file__).parents[2]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
SCHEMAS = {
    ".github/workflows/tests.yml": "vendor.github-workflows",
    ".github/workflows/release.yml": "vendor.github-workflows",
    ".github/dependabot.yml": "vendor.dependabot",
    "CITATION.cff": "vendor.citation-file-format",
    "docker-compose.yml": "vendor.compose-spec",
}


def load(name: str) -> Any:
    return yaml.load((ROOT / name).read_text(), Loader=yaml.BaseLoader)  # noqa: S506 - `on` stays a string


def violations(document: dict[Any, Any], schema_name: str) -> list[str]:
    schema = get_builtin_schema(schema_name)
    return [f"{e.json_path}: {e.message}" for e in validator_for(schema)(schema).iter_errors(document)]


@pytest.mark.parametrize("name", SCHEMAS)
def test_a_file_follows_its_schema(name: str) -> None:
    document = yaml.safe_load((ROOT / name).read_text())
    if True in document:  # YAML 1.1 reads `on` as a boolean
        document["on"] = document.pop(True)
    assert violations(document, SCHEMAS[name]) == []


def test_the_workflow_runs_every_supported_python() -> None:
    workflow = load(".github/workflows/tests.yml")
    versions = workflow["jobs"]["test"]["strategy"]["matrix"]["python"]
    low, high = re.findall(r"3\.(\d+)", PROJECT["requires-python"])
    assert versions == [f"3.{minor}" for minor in range(int(low), int(high))]


@pytest.mark.parametrize("name", ["tests", "release"])
def test_a_workflow_runs_existing_targets(name: str) -> None:
    workflow = load(f".github/workflows/{name}.yml")
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    steps = [step.get("run", "") for job in workflow["jobs"].values() for step in job["steps"]]
    used = [step.removeprefix("make ") for step in steps if step.startswith("make ")]
    assert used
    assert set(used) <= targets


def test_an_environment_that_could_not_be_made_is_made_by_the_next_make(tmp_path: Path) -> None:
    """Debian without python3-venv makes an environment without pip, and fails."""
    python = tmp_path / "python"
    python.write_text(
        '#!/bin/sh\n[ "$2" != venv ] || { mkdir -p .venv/bin; touch .venv/bin/python; exit 1; }\n'
    )
    python.chmod(0o755)
    make = ["make", "-f", str(ROOT / "Makefile"), f"PYTHON={python}", ".venv/bin/python"]
    assert subprocess.run(make, cwd=tmp_path, capture_output=True, check=False).returncode == 2
    assert not (tmp_path / ".venv/bin/python").exists()


def test_the_chart_accepts_every_setting_that_it_does_not_set_itself() -> None:
    schema = json.loads((ROOT / "deploy" / "helm" / "boxcal" / "values.schema.json").read_text())
    accepted = set(schema["properties"]["settings"]["propertyNames"]["enum"])
    rendered = {
        "HOST", "PORT", "DATA_DIR", "DATABASE_URL", "MIGRATE", "SHARED_DIR",
        "ALLOW_ANONYMOUS", "ALARM_SECRET",
    }  # fmt: skip
    of_the_ingress = {"TLS_CERT", "TLS_KEY", "TLS_CLIENT_CA"}  # the probes of the pods ask by HTTP
    assert accepted | rendered | of_the_ingress == {name.upper() for name in Settings.model_fields}
    assert not accepted & of_the_ingress
    assert not accepted & rendered
