"""Large allocations on huge pages: weights and activations cost fewer address translations there."""

import os
import sys

TUNABLES = "GLIBC_TUNABLES"


def ask_for_huge_pages() -> None:
    """Start this process anew with glibc's large allocations on huge pages, where Linux grants them.

    glibc reads its tunables when a process starts, and at no later time. Tunables that are set already stay,
    and the process keeps its id.
    """
    if sys.platform == "linux" and TUNABLES not in os.environ:
        os.environ[TUNABLES] = "glibc.malloc.hugetlb=1"
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])  # noqa: S606 - this very command
