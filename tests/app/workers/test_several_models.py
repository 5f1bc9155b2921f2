"""Several models in several processes: every process serves all of them, also while PostgreSQL is away."""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import tritonclient.grpc as triton

from boxcal.models.digits_data import Digits
from tests.app.fitting.service import Service, free_port
from tests.app.registry.conftest import postgresql, url
from tests.app.registry.postgresql import PostgreSQL
from tests.app.test_several_models import FILE, LOGITS, fit
from tests.app.workers.test_service import ready, wait

__all__ = ["postgresql", "url"]

pytestmark = pytest.mark.long

PROCESSES = 2


def started(folder: Path, **settings: str) -> Service:
    """Write the list of models, and describe a service of two processes."""
    folder.mkdir(exist_ok=True)
    (file := folder / "models.toml").write_text(FILE)
    return Service(folder, workers=str(PROCESSES), model=str(file), device="cpu", **settings)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with started(tmp_path_factory.mktemp("several"), grpc_port=str(free_port())) as service:
        wait(lambda: len(ready(service)) == PROCESSES)
        yield service


def everywhere(service: Service, model: str) -> set[int]:
    """Ask over new connections, so that every process answers, which version a model has."""

    def one(_: int) -> int:
        body = {"logits": LOGITS.tolist() if model != "elsewhere" else [[1.0, 2.0, 3.0]]}
        headers = {"connection": "close"}
        answer = service.client.post("/calibrate", params={"model": model}, json=body, headers=headers)
        return int(answer.json()["calibrator"]["version"])

    with ThreadPoolExecutor(4) as pool:
        return set(pool.map(one, range(12)))


def reach(service: Service, model: str, version: int) -> None:
    wait(lambda: everywhere(service, model) == {version})


def test_activating_one_reaches_its_copies_in_every_process_and_no_other_model(service: Service) -> None:
    version = fit(service.client, model="south")
    reach(service, "south", version)
    assert everywhere(service, "north") == everywhere(service, "elsewhere") == {0}
    assert service.client.post("/calibrators/rollback", params={"model": "south"}).json()["version"] == 0
    reach(service, "south", 0)


def test_metrics_of_a_model_are_of_all_processes(service: Service, digits: Digits) -> None:
    def counted(series: str) -> float:
        text = service.client.get("/metrics", headers={"connection": "close"}).text
        (found,) = re.findall(rf"^{series} (\S+)$", text, re.MULTILINE)
        return float(found)

    def predictions() -> float:
        return counted('boxcal_request_seconds_count{model="south",route="/predict",status="200"}')

    device = 'boxcal_device_seconds_total{model="%s"}'
    before = counted(device % "south")
    for _ in range(20):
        headers = {"content-type": "image/png", "connection": "close"}
        sent = service.client.post(
            "/predict", params={"model": "south"}, content=digits.png(0), headers=headers
        )
        assert sent.is_success, sent.text
    wait(lambda: {predictions() for _ in range(6)} == {20.0})
    wait(lambda: counted(device % "south") > before)
    assert counted(device % "elsewhere") == 0.0


def test_every_process_listens_for_grpc(service: Service) -> None:
    address = f"127.0.0.1:{service.environment['BOXCAL_GRPC_PORT']}"
    for _ in range(8):
        client = triton.InferenceServerClient(address)
        assert client.is_model_ready("south.calibrator")
        client.close()
    assert "it starts again" not in service.log()


def test_models_start_without_their_database_and_are_activated_once_it_is_back(
    tmp_path: Path, url: str, postgresql: PostgreSQL
) -> None:
    with started(tmp_path / "data", database_url=url) as service:
        wait(lambda: len(ready(service)) == PROCESSES)
        version = fit(service.client, model="south")
        reach(service, "south", version)
        assert service.stop() == 0
        postgresql.stop()
        try:
            service.start()
            wait(lambda: len(ready(service)) == 2 * PROCESSES)
            assert (everywhere(service, "south"), everywhere(service, "north")) == ({version}, {0})
            refused = service.client.post("/calibrators/0/activate", params={"model": "south"})
            assert refused.status_code == 503, refused.text
            assert (everywhere(service, "south"), everywhere(service, "north")) == ({version}, {0})
        finally:
            postgresql.start()
        wait(lambda: service.client.post("/calibrators/0/activate", params={"model": "south"}).is_success)
        reach(service, "south", 0)
        newer = fit(service.client, model="north")
        reach(service, "north", newer)
        assert everywhere(service, "south") == {0}
