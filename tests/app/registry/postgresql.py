"""A PostgreSQL server of the tests' own, where its programs are installed."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PROGRAMS = ("initdb", "postgres")


def is_installed() -> bool:
    """Whether a server can be started here."""
    return all(shutil.which(program) for program in PROGRAMS)


@contextlib.contextmanager
def server() -> Iterator[str]:
    """Run a server over an empty folder; gives the URL of its database."""
    # The server refuses to run as root, and its user must be able to reach its folder.
    user: dict[str, Any] = {"user": "postgres"} if os.geteuid() == 0 else {}
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory(prefix="boxcal-postgresql-") as name:
        if user:
            shutil.chown(name, **user)
        data = Path(name) / "data"
        initdb, postgres = (str(Path(shutil.which(program) or program).resolve()) for program in PROGRAMS)
        subprocess.run(
            [initdb, "-D", data, "-A", "trust", "-U", "boxcal", "--no-sync"],
            check=True, capture_output=True, cwd=name, **user,
        )  # fmt: skip
        process = subprocess.Popen(
            [postgres, "-D", data, "-k", name, "-p", str(port), "-h", "127.0.0.1"],
            stderr=subprocess.PIPE, text=True, cwd=name, **user,
        )  # fmt: skip
        assert process.stderr is not None
        with process, process.stderr:
            try:
                for line in process.stderr:
                    if "ready to accept connections" in line:
                        break
                else:
                    raise AssertionError("the server did not start")
                yield f"postgresql://boxcal@127.0.0.1:{port}/postgres"
            finally:
                process.terminate()
