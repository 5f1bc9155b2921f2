"""The memory limit of the worker process."""

from __future__ import annotations

import resource
from pathlib import Path


def limit_memory(allowance: int | None) -> None:
    """Let this process map `allowance` bytes beyond what it has mapped now; None for no limit.

    The libraries that are loaded map gigabytes of their own, so only what follows counts. Beyond the limit
    (RLIMIT_AS) allocations fail.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limits = [_mapped() + allowance] if allowance is not None else []
    limits += [hard] if hard != resource.RLIM_INFINITY else []
    resource.setrlimit(resource.RLIMIT_AS, (min(limits, default=hard), hard))


def _mapped() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
