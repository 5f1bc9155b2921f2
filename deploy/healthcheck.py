"""Health check of the container: exits with 0 if the service is ready, else with 1 and the reason.

Uses the standard library only. Reads `BOXCAL_PORT` like the service.
"""

import os
import sys
import urllib.error
import urllib.request

READY = f"http://127.0.0.1:{os.environ.get('BOXCAL_PORT', '8000')}/health/ready"


def main() -> int:
    """Send one request to `/health/ready`."""
    try:
        with urllib.request.urlopen(READY, timeout=4):
            return 0
    except (urllib.error.URLError, OSError) as error:
        print(f"{READY}: {error}", file=sys.stderr)  # noqa: T201 (the container engine records the output)
        return 1


if __name__ == "__main__":
    sys.exit(main())
