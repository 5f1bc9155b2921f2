"""A private PgBouncer in transaction mode, in front of a PostgreSQL server of the tests."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sqlalchemy.engine import make_url

from tests.app.fitting.service import free_port


@contextmanager
def pgbouncer(url: str, folder: Path, pool_size: int, clients: int = 100) -> Iterator[str]:
    """Run it for as long as the block lasts; gives the URL of the same database behind it."""
    program = shutil.which("pgbouncer") or "/usr/sbin/pgbouncer"
    server, port = make_url(url), free_port()
    (folder / "users").write_text('"boxcal" ""\n')
    configuration = folder / "pgbouncer.ini"
    configuration.write_text(
        f"[databases]\n* = host={server.host} port={server.port}\n"
        f"[pgbouncer]\nlisten_addr = 127.0.0.1\nlisten_port = {port}\nunix_socket_dir =\n"
        f"auth_type = trust\nauth_file = {folder}/users\npool_mode = transaction\n"
        f"default_pool_size = {pool_size}\nmax_client_conn = {clients}\nadmin_users = boxcal\n"
    )
    user: dict[str, Any] = {"user": "postgres", "extra_groups": []} if os.geteuid() == 0 else {}
    process = subprocess.Popen(
        [program, configuration], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, **user
    )
    try:
        while True:
            assert process.poll() is None, "PgBouncer did not start"
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.01)
        yield server.set(port=port).render_as_string()
    finally:
        process.terminate()
        process.wait()
