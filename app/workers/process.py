"""The program of one serving process, which the supervisor starts."""

from __future__ import annotations

import sys
from pathlib import Path

from boxcal.app.cli.quick_start import prepare
from boxcal.app.workers.cores import take_share


def main() -> None:
    """Serve until SIGTERM, as slot `argv[1]` of `argv[2]`; descriptors and the folder follow."""
    index, count, *descriptors = map(int, sys.argv[1:6])
    cores = take_share(index, count)
    prepare()
    from boxcal.app.workers.serving import Channels, run  # noqa: PLC0415 - not before this
    from boxcal.app.workers.slot import Slot  # noqa: PLC0415

    run(Slot(index, count, Path(sys.argv[6]), cores), Channels(*descriptors))


if __name__ == "__main__":
    main()
