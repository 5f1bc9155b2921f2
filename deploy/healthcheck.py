"""Health check of the container: exits with 0 if the service is ready, else with 1 and the reason.

Uses the standard library only. Reads the address, the port and the TLS files where the service does: in the
environment, then in the file of `BOXCAL_CONFIG`.
"""

import os
import ssl
import sys
import tomllib
import urllib.error
import urllib.request
from pathlib import Path


def setting(name: str) -> str:
    """Return a setting; empty without one."""
    if (given := os.environ.get(f"BOXCAL_{name.upper()}")) is not None:
        return given
    path = os.environ.get("BOXCAL_CONFIG")
    return str(tomllib.loads(Path(path).read_text()).get(name, "")) if path else ""


def context(cert: str) -> "ssl.SSLContext | None":
    """Accept the certificate of the service, whatever its name, and show it where one is required."""
    if not cert:
        return None
    loopback = ssl._create_unverified_context()  # noqa: S323 - the connection does not leave the machine
    if setting("tls_key") and setting("tls_client_ca"):
        loopback.load_cert_chain(cert, setting("tls_key"))
    return loopback


def address() -> str:
    """Return where the service listens; the loopback interface where it listens on all."""
    host = setting("host")
    if host in {"", "0.0.0.0", "::"}:  # noqa: S104
        return "127.0.0.1"
    return f"[{host}]" if ":" in host else host


def main() -> int:
    """Send one request to `/health/ready`."""
    ready = "/health/ready"
    try:
        cert = setting("tls_cert")
        ready = f"{'https' if cert else 'http'}://{address()}:{setting('port') or 8000}{ready}"
        with urllib.request.urlopen(ready, timeout=4, context=context(cert)):  # noqa: S310
            return 0
    except (urllib.error.URLError, OSError, ValueError) as error:
        print(f"{ready}: {error}", file=sys.stderr)  # noqa: T201 (the container engine records the output)
        return 1


if __name__ == "__main__":
    sys.exit(main())
