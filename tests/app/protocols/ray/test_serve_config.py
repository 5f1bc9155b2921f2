"""Serve configs are checked to the last member, before `boxcal deploy` sends them to a cluster."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from boxcal.app.protocols.ray.serve_config import ongoing_limit, read_config, replica_settings
from tests.app.answering import Quiet, answering
from tests.app.cli.conftest import Boxcal, boxcal

__all__ = ["boxcal"]

FILES = [Path(__file__).parents[4] / "deploy" / "ray" / name for name in ("serve.yaml", "ray-service.yaml")]
SERVE = FILES[0].read_text()
DATABASE = "postgresql://boxcal@database/boxcal"


def written(folder: Path, text: str) -> Path:
    (file := folder / "serve.yaml").write_text(text)
    return file


@pytest.mark.parametrize("file", FILES)
def test_the_configs_of_this_repository_are_valid(file: Path) -> None:
    (application,) = read_config(file)["applications"]
    assert application["args"]["data_dir"] == "/var/lib/boxcal"


@pytest.mark.parametrize("file", FILES)
def test_ray_gets_what_the_file_says_and_no_more(file: Path) -> None:
    found = yaml.safe_load(file.read_text())
    wanted = yaml.safe_load(found["spec"]["serveConfigV2"]) if "spec" in found else found
    assert read_config(file) == wanted


@pytest.mark.parametrize(
    ("right", "wrong", "message"),
    [
        ("proxy_location:", "proxy_locaton:", "proxy_locaton: Extra inputs are not permitted"),
        ("num_replicas:", "num_replica:", "deployments.0.num_replica: Extra inputs"),
        ("num_cpus:", "num_cpu:", "ray_actor_options.num_cpu: Extra inputs"),
        ("port: 8000", "prot: 8000", "http_options.prot: Extra inputs"),
        ("model: digits", "modle: digits", "args.modle: Extra inputs"),
        ("model: digits", "port: 8001", "args.port: the cluster's proxies listen"),
        ("model: digits", "database_url: x", "args.database_url is a secret: set BOXCAL_DATABASE_URL"),
        ("model: digits", "max_batch_size: many", "args.max_batch_size: Input should be a valid integer"),
        ("/var/lib/boxcal", "data", "args.data_dir is 'data'; it must be an absolute path"),
        ("num_replicas: 2", "max_ongoing_requests: 100", "max_ongoing_requests is 100; below 1088"),
        ("replica:application", "replica:aplication", "import_path: Input should be"),
        ("applications:", "applicatons:", "Field required"),
        ("applications:", "applications: [", "has no Serve config"),
    ],
)
def test_a_mistake_is_refused_by_its_place(tmp_path: Path, right: str, wrong: str, message: str) -> None:
    file = written(tmp_path, SERVE.replace(right, wrong))
    with pytest.raises(ValueError, match=r"serve.yaml") as refused:
        read_config(file)
    assert message in str(refused.value)


def test_a_replica_needs_the_shared_registry_and_refuses_requests_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    args = {"model": "logits:4", "data_dir": "/tmp/boxcal"}  # noqa: S108 - only a path
    with pytest.raises(ValueError, match="share a registry on PostgreSQL: set BOXCAL_DATABASE_URL"):
        replica_settings(args)
    monkeypatch.setenv("BOXCAL_DATABASE_URL", DATABASE)
    monkeypatch.setenv("BOXCAL_HOST", "127.0.0.1")
    settings = replica_settings(args)
    assert (settings.model, settings.database_url, settings.host) == ("logits:4", DATABASE, "0.0.0.0")  # noqa: S104
    assert ongoing_limit(settings) == 1024 + 64
    several = replica_settings({"model": "one=logits:4,other=logits:2", "data_dir": "/tmp/boxcal"})  # noqa: S108
    assert ongoing_limit(several) == 2048 + 64


class Cluster(Quiet):
    """The routes of Ray's dashboard that `boxcal deploy` uses."""

    got: Any = None
    statuses: list[str]

    def do_PUT(self) -> None:  # noqa: N802
        type(self).got = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.answer({})

    def do_GET(self) -> None:  # noqa: N802
        status = self.statuses.pop(0)
        self.answer({"applications": {"boxcal": {"status": status, "message": "no such model"}}})

    def answer(self, document: Any) -> None:
        body = json.dumps(document).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture
def address() -> Iterator[str]:
    with answering(Cluster) as url:
        yield url


def test_deploy_sends_the_config_and_waits(
    boxcal: Boxcal, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("boxcal.app.cli.deploy.POLL_SECONDS", 0.01)
    Cluster.statuses = ["DEPLOYING", "RUNNING"]
    done = boxcal("deploy", FILES[0], "--address", address)
    assert (done.code, done.stdout) == (0, "boxcal: every replica runs.\n")
    assert Cluster.got == yaml.safe_load(SERVE)
    Cluster.statuses = ["DEPLOYING", "DEPLOY_FAILED"]
    failed = boxcal("deploy", FILES[0], "--address", address)
    assert failed.code == 2
    assert "boxcal: DEPLOY_FAILED: no such model" in failed.stderr


def test_deploy_refuses_before_it_sends_and_names_a_cluster_that_does_not_answer(
    boxcal: Boxcal, tmp_path: Path
) -> None:
    nowhere = "http://127.0.0.1:9"
    wrong = boxcal("deploy", written(tmp_path, SERVE.replace("model:", "modle:")), "--address", nowhere)
    assert (wrong.code, "args.modle" in wrong.stderr) == (2, True)
    away = boxcal("deploy", FILES[0], "--address", nowhere)
    assert away.code == 3
    assert f"the cluster at {nowhere} does not answer" in away.stderr
    assert boxcal("deploy", "--check", FILES[1]).code == 0
