"""Replicas share validation sets and artifacts in a bucket of a real S3 server."""

from __future__ import annotations

import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from tests.app.fitting.service import Service, free_port
from tests.app.fitting.validation_data import validation_npz
from tests.app.waiting import until

pytestmark = pytest.mark.long

LISTING = """
import sys
from fsspec.core import url_to_fs
files, root = url_to_fs(sys.argv[1])
if len(sys.argv) > 2:
    files.mkdir(root)
else:
    print(*sorted(path.removeprefix(root) for path in files.find(root)), sep="\\n")
"""


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The extra `s3` and a server, which nothing else needs."""
    folder = tmp_path_factory.mktemp("s3")
    wanted = Path(__file__).with_name("s3-requirements.txt")
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(folder)]
    subprocess.run([*command, "-r", str(wanted)], check=True)
    return folder


class Bucket:
    """A bucket `boxcal` on a server that a test may stop and start; it forgets its objects then."""

    def __init__(self, packages: Path) -> None:
        self.port = free_port()
        self.url = "s3://boxcal/service"
        self.variables = {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.port}",
            "AWS_ACCESS_KEY_ID": "id",
            "AWS_SECRET_ACCESS_KEY": "key",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_MAX_ATTEMPTS": "1",
        }
        path = f"{packages}{os.pathsep}{os.environ.get('PYTHONPATH', Path.cwd())}"
        self.environment = {**os.environ, **self.variables, "PYTHONPATH": path}
        self.start()

    def start(self) -> None:
        command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self.port)]
        self._process = subprocess.Popen(command, env=self.environment, stderr=subprocess.DEVNULL)
        until(lambda: answers(f"http://127.0.0.1:{self.port}"), 60)
        self._ask("s3://boxcal", "make")

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait()

    def files(self) -> list[str]:
        return self._ask(self.url).split()

    def _ask(self, *arguments: str) -> str:
        command = [sys.executable, "-c", LISTING, *arguments]
        done = subprocess.run(command, env=self.environment, check=True, capture_output=True, text=True)
        return done.stdout


def answers(url: str) -> bool:
    try:
        urllib.request.urlopen(url, timeout=1).close()  # noqa: S310 - the loopback
    except OSError:
        return False
    return True


@pytest.fixture
def bucket(packages: Path) -> Iterator[Bucket]:
    opened = Bucket(packages)
    yield opened
    opened.stop()


def service(folder: Path, url: str, bucket: Bucket, **settings: str) -> Service:
    made = Service(folder, database_url=url, device="cpu", shared_dir=bucket.url, **settings)
    made.environment |= {**bucket.variables, "PYTHONPATH": bucket.environment["PYTHONPATH"]}
    return made


def submit(service: Service, samples: int = 5000, wait: float = 0) -> httpx.Response:
    return service.fit(validation_npz(samples), wait, method="ts", activate="always")


def test_a_fit_of_a_killed_replica_is_continued_from_the_bucket(
    tmp_path: Path, url: str, bucket: Bucket
) -> None:
    with ExitStack() as stack:
        one, other = (stack.enter_context(service(tmp_path / name, url, bucket)) for name in ("one", "other"))
        path = f"/fits/{submit(one).json()['id']}"
        with httpx.stream("GET", f"{one.url}{path}/events", timeout=280) as events:
            next(line for line in events.iter_lines() if '"state":"running"' in line)
        assert [name for name in bucket.files() if name.startswith("/fits/")]
        one.kill()
        until(lambda: other.client.get(path).json()["state"] == "succeeded", 200)
        until(lambda: not [name for name in bucket.files() if name.startswith("/fits/")], 60)
        (artifact,) = bucket.files()
        fitted = other.client.get("/calibrators/1").json()
        assert artifact == f"/artifacts/{fitted['sha256']}"
        one.start()
        assert one.client.get("/health/ready").json()["calibrator"] == 1


def test_a_start_names_a_bucket_that_is_missing_and_survives_one_that_is_away(
    tmp_path: Path, url: str, bucket: Bucket
) -> None:
    missing = service(tmp_path / "none", url, bucket)
    missing.environment["BOXCAL_SHARED_DIR"] = "s3://nobucket/service"
    with pytest.raises(AssertionError, match="The specified bucket does not exist"), missing:
        pass
    assert "BOXCAL_SHARED_DIR is s3://nobucket/service: The specified bucket does not exist" in missing.log()
    assert "Traceback" not in missing.log()
    bucket.stop()
    with service(tmp_path / "one", url, bucket) as one:
        assert "BOXCAL_SHARED_DIR is s3://boxcal/service, which cannot be used now" in one.log()
        bucket.start()
        assert submit(one, 200, wait=200).json()["state"] == "succeeded"


def test_an_upload_while_the_bucket_is_away_is_refused_and_later_ones_are_not(
    tmp_path: Path, url: str, bucket: Bucket
) -> None:
    with service(tmp_path / "one", url, bucket) as one:
        bucket.stop()
        refused = submit(one, 200)
        assert (refused.status_code, refused.json()["title"]) == (503, "Storage unavailable"), refused.text
        bucket.start()
        assert submit(one, 200, wait=200).json()["state"] == "succeeded"
