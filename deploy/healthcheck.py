"""The container's health check: 0 when the service inside is ready, else 1 with the reason.

It needs nothing but the standard library, and reads `BOXCAL_PORT` as the service does.
"""

import os
import sys
import urllib.error
import urllib.request

READY = f"http://127.0.0.1:{os.environ.get('BOXCAL_PORT', '8000')}/health/ready"


def main() -> int:
    """Ask once, within the time the container engine allows."""
    try:
        with urllib.request.urlopen(READY, timeout=4):
            return 0
    except (urllib.error.URLError, OSError) as error:
        print(f"{READY}: {error}", file=sys.stderr)  # noqa: T201 (the engine keeps what a probe prints)
        return 1


if __name__ == "__main__":
    sys.exit(main())
