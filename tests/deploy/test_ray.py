"""The service on two Ray nodes, in the environment of `make ray`: routes, a killed replica, a lost node."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.app.registry.postgresql import is_installed

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-ray" / "bin" / "python"
MOST = {"`kill -9` of one replica of two": 2, "one node of two lost": 2}
SCHEMAS = """
from ray.serve import schema, config
from boxcal.app.protocols.ray import serve_config as ours
PAIRS = [
    (ours.ServeConfig, schema.ServeDeploySchema), (ours.ServedApplication, schema.ServeApplicationSchema),
    (ours.Deployment, schema.DeploymentSchema), (ours.Actor, schema.RayActorOptionsSchema),
    (ours.Http, schema.HTTPOptionsSchema), (ours.Autoscaling, config.AutoscalingConfig),
    (ours.Logging, schema.LoggingConfig),
]
for mine, theirs in PAIRS:
    print(*sorted(set(mine.model_fields) - set(theirs.model_fields)), end="")
"""


@pytest.fixture(autouse=True)
def _ray() -> None:
    if not PYTHON.exists():
        pytest.skip("run `make ray` first")


def test_every_member_of_a_config_is_one_of_ray_serve() -> None:
    done = subprocess.run(
        [PYTHON, "-c", SCHEMAS], check=True, capture_output=True, text=True,
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.stdout == ""


def test_requests_are_answered_as_under_uvicorn_and_outlast_replicas_and_nodes() -> None:
    if os.geteuid() != 0 or not is_installed() or shutil.which("unshare") is None:
        pytest.skip("needs root, PostgreSQL and network namespaces")
    command = [sys.executable, "-m", "tools.ray.cluster"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "\n0 differences from the answers under uvicorn" in done.stdout, done.stdout
    rows = re.findall(r"^\| (.+?) \| [\d,]+ \| (\d+) \| ([\d.]+) \|$", done.stdout, re.MULTILINE)
    assert {name for name, *_ in rows} == set(MOST)
    for name, failed, last in rows:
        assert int(failed) <= MOST[name], done.stdout
        assert float(last) <= 1.0, done.stdout
