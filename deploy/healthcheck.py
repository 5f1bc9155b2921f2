"""Health check of the container: exits with 0 if the service is ready, else with 1 and the reason.

Uses the standard library only. Reads the address or the Unix socket, the port and the TLS files where the
service does: in the environment, then in the file of `BOXCAL_CONFIG`.
"""

import http.client
import os
import socket
import ssl
import sys
import tomllib
from pathlib import Path

SECONDS = 4
UNIX = "unix:"


def setting(name: str) -> str:
    """Return a setting; empty without one."""
    if (given := os.environ.get(f"BOXCAL_{name.upper()}")) is not None:
        return given
    path = os.environ.get("BOXCAL_CONFIG")
    return str(tomllib.loads(Path(path).read_text()).get(name, "")) if path else ""


def context() -> ssl.SSLContext:
    """Accept the certificate of the service, whatever its name, and show it where one is required."""
    loopback = ssl._create_unverified_context()  # noqa: S323 - the connection does not leave the machine
    if setting("tls_key") and setting("tls_client_ca"):
        loopback.load_cert_chain(setting("tls_cert"), setting("tls_key"))
    return loopback


def address() -> str:
    """Return where the service listens; the loopback interface where it listens on all."""
    host = setting("host")
    return "127.0.0.1" if host in {"", "0.0.0.0", "::"} else host  # noqa: S104


def name(port: int) -> str:
    """Return the host of the request: an address, which the service accepts whatever its names."""
    host = address()
    if host.startswith(UNIX):
        return "127.0.0.1"
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def connect(port: int) -> socket.socket:
    """Connect to the socket or the port of the service, with TLS where it serves it."""
    if (host := address()).startswith(UNIX):
        opened = socket.socket(socket.AF_UNIX)
        opened.settimeout(SECONDS)
        opened.connect(host.removeprefix(UNIX))
    else:
        opened = socket.create_connection((host, port), SECONDS)
    return context().wrap_socket(opened) if setting("tls_cert") else opened


def main() -> int:
    """Send one request to `/health/ready`."""
    asked = "/health/ready"
    try:
        port = int(setting("port") or 8000)
        where = address() if address().startswith(UNIX) else name(port)
        asked = f"{'https' if setting('tls_cert') else 'http'}://{where}{asked}"
        request = http.client.HTTPConnection("localhost", timeout=SECONDS)
        request.sock = connect(port)
        try:
            request.request("GET", "/health/ready", headers={"Host": name(port)})
            answer = request.getresponse()
        except (OSError, http.client.HTTPException) as error:
            if setting("tls_client_ca") and not isinstance(error, TimeoutError):
                return 0  # it refuses a certificate that is no client's, and listens once it is ready
            raise
        if answer.status == http.client.OK:
            return 0
        reason: object = f"{answer.status} {answer.reason}"
    except (OSError, ValueError, http.client.HTTPException) as error:
        reason = error
    print(f"{asked}: {reason}", file=sys.stderr)  # noqa: T201 (the container engine records the output)
    return 1


if __name__ == "__main__":
    sys.exit(main())
