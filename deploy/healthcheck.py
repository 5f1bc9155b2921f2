"""Health check of the container: exits with 0 if the service is ready, else with 1 and the reason.

Uses the standard library only. Reads `BOXCAL_PORT` and `BOXCAL_TLS_CERT` like the service.
"""

import os
import ssl
import sys
import urllib.error
import urllib.request

CERT, KEY = os.environ.get("BOXCAL_TLS_CERT"), os.environ.get("BOXCAL_TLS_KEY")
READY = f"{'https' if CERT else 'http'}://127.0.0.1:{os.environ.get('BOXCAL_PORT', '8000')}/health/ready"


def context() -> "ssl.SSLContext | None":
    """Accept the certificate of the service, whatever its name, and show it where one is required."""
    if not CERT:
        return None
    loopback = ssl._create_unverified_context()  # noqa: S323 - the connection does not leave the machine
    if KEY and os.environ.get("BOXCAL_TLS_CLIENT_CA"):
        loopback.load_cert_chain(CERT, KEY)
    return loopback


def main() -> int:
    """Send one request to `/health/ready`."""
    try:
        with urllib.request.urlopen(READY, timeout=4, context=context()):  # noqa: S310
            return 0
    except (urllib.error.URLError, OSError) as error:
        print(f"{READY}: {error}", file=sys.stderr)  # noqa: T201 (the container engine records the output)
        return 1


if __name__ == "__main__":
    sys.exit(main())
