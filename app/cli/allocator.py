"""How glibc allocates memory in the service: large allocations on huge pages, all threads in one arena.

Weights and activations cost fewer address translations on huge pages. With an arena for each thread, the free
end of each would stay with the process, up to 64 MiB; `malloc_trim` returns only that of the first.
"""

import os
import sys

TUNABLES = "GLIBC_TUNABLES"
SETTINGS = "glibc.malloc.hugetlb=1:glibc.malloc.arena_max=1"


def set_up_allocator() -> None:
    """Start this process anew with these settings; Linux may not grant huge pages.

    glibc reads its tunables when a process starts, and at no later time. Tunables that are set already stay,
    and the process keeps its id.
    """
    if sys.platform == "linux" and TUNABLES not in os.environ:
        os.environ[TUNABLES] = SETTINGS
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])  # noqa: S606 - this very command
