"""The service behind a proxy: a path of its own, a Unix socket; and clients with headers and transports."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from boxcal.app.client import AsyncBoxcalClient, BoxcalClient
from boxcal.app.client.clients import DEFAULT_TIMEOUT
from boxcal.app.http.admission import address_of
from boxcal.app.settings import limits
from tests.app.fitting.validation_data import validation_npz
from tests.app.running import running

LOGITS = [[1.0, 2.0, 3.0]]


def test_a_path_of_its_own_may_be_sent_or_left_out(tmp_path: Path) -> None:
    with running(tmp_path, model="logits:3", root_path="/boxcal") as service, httpx.Client() as http:
        for prefix in ("", "/boxcal"):
            url = service.url + prefix
            assert http.post(f"{url}/calibrate", json={"logits": LOGITS}).is_success
            assert http.get(f"{url}/v2/models/logits:3.calibrator").is_success
            assert http.get(f"{url}/health/ready").is_success
            document = http.get(f"{url}/openapi.json").json()
            assert document["servers"] == [{"url": "/boxcal"}]
            assert http.get(f"{url}/ui/").is_success
        files = {"file": ("v", validation_npz(60, 3))}
        fit = http.post(f"{service.url}/fit", files=files, data={"method": "ts", "activate": "never"})
        assert fit.headers["location"].startswith("/boxcal/fits/")
        metrics = http.get(f"{service.url}/metrics").text
        assert 'route="/calibrate",status="200"} 2.0' in metrics


def test_a_slash_at_the_end_of_a_path_changes_nothing(tmp_path: Path) -> None:
    with running(tmp_path, model="logits:3", root_path="/boxcal") as service, httpx.Client() as http:
        for prefix in ("", "/boxcal"):
            url = service.url + prefix
            found = http.post(f"{url}/calibrate/", json={"logits": LOGITS})
            assert (found.status_code, found.json()["predictions"][0]["index"]) == (200, 2)
            for path in ("/model/", "/fits//", "/calibrators/0/", "/v2/", "/v2/models/logits:3.calibrator/"):
                assert http.get(url + path).status_code == 200
            assert http.get(f"{url}/fits/none/").json()["type"] == "urn:boxcal:problem:fit-not-found"
            assert "No route has the path /nothing;" in http.get(f"{url}/nothing/").json()["detail"]
            assert http.get(f"{url}/docs/", follow_redirects=True).url == f"{url}/docs"
            assert http.get(f"{url}/ui", follow_redirects=True).url == f"{url}/ui/"
            found = http.get(url, follow_redirects=True)
            assert found.is_success
            assert found.url == f"{service.url}/boxcal/ui/"


def test_a_unix_socket(tmp_path: Path) -> None:
    socket = tmp_path / "boxcal.sock"
    program = "from boxcal.app.cli import main; main()"
    command = [sys.executable, "-c", program, "serve", "--model", "logits:3", "--data-dir", str(tmp_path)]
    with subprocess.Popen(command, env={**os.environ, "BOXCAL_HOST": f"unix:{socket}"}) as process:
        try:
            with (
                httpx.Client(transport=httpx.HTTPTransport(uds=str(socket))) as http,
                BoxcalClient("http://localhost", http_client=http) as client,
            ):
                while not socket.exists():
                    assert process.poll() is None
                    time.sleep(0.05)
                client.wait_until_ready(200)
                assert client.calibrate(LOGITS).predictions[0].index == 2
        finally:
            process.terminate()


def seen(request: httpx.Request) -> httpx.Response:
    return httpx.Response(200, json={"status": "ready", "model": request.headers["x-team"], "calibrator": 1})


def test_clients_send_headers_and_leave_a_client_of_others_open() -> None:
    http = httpx.Client(transport=httpx.MockTransport(seen))
    with BoxcalClient(http_client=http, headers={"X-Team": "red"}) as client:
        assert client.ready().model == "red"
    assert not http.is_closed
    http.close()


@pytest.mark.anyio
async def test_the_asynchronous_client_too() -> None:
    async with httpx.AsyncClient(transport=httpx.MockTransport(seen)) as http:
        async with AsyncBoxcalClient(http_client=http, headers={"X-Team": "blue"}) as client:
            assert (await client.ready()).model == "blue"
        assert not http.is_closed


def test_the_client_waits_longer_than_the_service() -> None:
    assert limits.TIMEOUT_SECONDS < DEFAULT_TIMEOUT


@pytest.mark.parametrize(
    ("sent", "known"),
    [
        ("10.0.0.7", "10.0.0.7"),
        ("2001:DB8::1", "2001:db8::1"),
        ("<script>alert(1)</script>", ""),
        ("9" * 60_000, ""),
        ("10.0.0.7\0", ""),
        ("", ""),
    ],
)
def test_what_a_proxy_names_is_an_address_or_nothing(sent: str, known: str) -> None:
    """It becomes part of the audit log, and the key by which uploads and streams are limited."""
    assert address_of(sent) == known
