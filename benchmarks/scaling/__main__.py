"""`python -m benchmarks.scaling PART` prints tables; each part is a file beside this one."""

from __future__ import annotations

import argparse
import sys

from benchmarks.scaling import fencing, followers, on_ray, outages, plan, pooling, wakeups, workers

PARTS = {
    "fencing": fencing.main,
    "outages": outages.main,
    "pgbouncer": pooling.main,
    "followers": followers.main,
    "workers": workers.main,
    "ray": on_ray.main,
    "plan": plan.main,
    "wakeups": wakeups.main,
}


def main() -> None:
    """Run one part with the rest of the arguments."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scaling", description=__doc__)
    parser.add_argument("part", choices=PARTS)
    PARTS[parser.parse_args(sys.argv[1:2]).part](sys.argv[2:])


if __name__ == "__main__":
    main()
