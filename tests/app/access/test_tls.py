"""HTTPS with certificates made by openssl: renewal without a restart, and client certificates."""

from __future__ import annotations

import shutil
import socket
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from boxcal.app.server import Server, server_config
from boxcal.app.settings.service import Settings
from tests.app.running import listening
from tests.app.waiting import until
from tests.deploy.processes import probe

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="needs the command openssl")


def certify(folder: Path, name: str, serial: int, ca: Path | None = None) -> None:
    """Make `NAME.key` and `NAME.pem` for localhost: signed by the authority `CA`, or by itself."""
    command = ["openssl", "req", "-x509", "-nodes", "-newkey", "ec"]
    command += ["-pkeyopt", "ec_paramgen_curve:prime256v1"]
    command += ["-subj", f"/CN={name}", "-days", "2", "-set_serial", str(serial)]
    command += ["-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    command += ["-keyout", str(folder / f"{name}.key"), "-out", str(folder / f"{name}.pem")]
    if ca is not None:
        command += ["-CA", str(ca.with_suffix(".pem")), "-CAkey", str(ca.with_suffix(".key"))]
    subprocess.run(command, check=True, capture_output=True)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    certify(tmp_path, "server", 1)
    certify(tmp_path, "next", 2)
    return tmp_path


def serving(folder: Path, client_ca: Path | None = None) -> Iterator[int]:
    settings = Settings(
        data_dir=folder / "data",
        port=0,
        tls_cert=folder / "server.pem",
        tls_key=folder / "server.key",
        tls_client_ca=client_ca,
    )
    with listening(Server(server_config(settings))) as port:
        yield port


@pytest.fixture
def port(folder: Path) -> Iterator[int]:
    yield from serving(folder)


@pytest.fixture
def port_for_clients(folder: Path) -> Iterator[int]:
    certify(folder, "authority", 3)
    yield from serving(folder, folder / "authority.pem")


def serial(port: int) -> int:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with socket.create_connection(("127.0.0.1", port)) as plain, context.wrap_socket(plain) as secure:
        shown = ssl.DER_cert_to_PEM_cert(secure.getpeercert(binary_form=True) or b"")
    found = subprocess.run(
        ["openssl", "x509", "-noout", "-serial"], input=shown.encode(), check=True, capture_output=True
    )
    return int(found.stdout.decode().partition("=")[2], 16)


def test_a_renewed_certificate_is_used_without_a_restart(
    port: int, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    context = ssl.create_default_context(cafile=str(folder / "server.pem"))
    with httpx.Client(base_url=f"https://localhost:{port}", verify=context) as http:
        assert http.get("/health/ready").json()["status"] == "ready"
        assert serial(port) == 1
        assert probe(BOXCAL_PORT=str(port), BOXCAL_TLS_CERT=str(folder / "server.pem")).returncode == 0
        # A certificate without its key: the service keeps what it has, and says so once.
        shutil.copy(folder / "next.pem", folder / "server.pem")
        until(lambda: "was not loaded again" in caplog.text)
        assert serial(port) == 1
        shutil.copy(folder / "next.key", folder / "server.key")
        until(lambda: serial(port) == 2)
        assert caplog.text.count("was not loaded again") == 1
        assert http.get("/health/ready").status_code == 200  # the open connection goes on
    renewed = ssl.create_default_context(cafile=str(folder / "next.pem"))
    assert httpx.get(f"https://localhost:{port}/health/live", verify=renewed).status_code == 200


def test_clients_show_a_certificate_of_the_authority(port_for_clients: int, folder: Path) -> None:
    url = f"https://localhost:{port_for_clients}/health/live"
    context = ssl.create_default_context(cafile=str(folder / "server.pem"))
    with pytest.raises(httpx.TransportError):
        httpx.get(url, verify=context)
    certify(folder, "stranger", 4)
    context.load_cert_chain(folder / "stranger.pem", folder / "stranger.key")
    with pytest.raises(httpx.TransportError):
        httpx.get(url, verify=context)
    certify(folder, "client", 5, ca=folder / "authority")
    context.load_cert_chain(folder / "client.pem", folder / "client.key")
    assert httpx.get(url, verify=context).status_code == 200
    shown = {"BOXCAL_PORT": str(port_for_clients), "BOXCAL_TLS_CLIENT_CA": str(folder / "authority.pem")}
    for name in ("stranger", "client"):  # the container has no certificate but that of the service
        files = {
            f"BOXCAL_TLS_{kind}": str(folder / f"{name}.{end}")
            for kind, end in (("CERT", "pem"), ("KEY", "key"))
        }
        assert probe(**shown, **files).returncode == 0
        with socket.create_server(("127.0.0.1", 0)) as silent:  # nobody answers there
            elsewhere = {**shown, "BOXCAL_PORT": str(silent.getsockname()[1])}
            assert probe(**elsewhere, **files).returncode == 1
