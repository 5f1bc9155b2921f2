"""API keys that `boxcal keys` creates and revokes, and that the registry must keep as acknowledged."""

from __future__ import annotations

import contextlib
import signal
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path

from tools.hostile.preloaded import PreloadedService


class Keys:
    """The API keys that `boxcal keys` has created and revoked, as files beside the data folder.

    `ID.key` has a whole key, whose creation is thereby acknowledged; `ID.asked` says that its revocation has
    begun, and `ID.revoked` that it was acknowledged.
    """

    def __init__(self, service: PreloadedService) -> None:
        self._service = service
        self._folder = service.data_dir.with_name("keys")
        self._folder.mkdir(exist_ok=True)

    def create(self, scope: str, seconds: float | None = None) -> str:
        """Create a key, and kill that after so many seconds; returns the key, or "" if it was killed."""
        output = self._folder / "new"
        output.unlink(missing_ok=True)
        self._run("create", scope, "--scope", scope, "--output", str(output), seconds=seconds)
        if not output.exists():
            return ""
        key = output.read_text().strip()
        output.rename(self._folder / f"{id_of(key)}.key")
        return key

    def revoke(self, seconds: float) -> bool:
        """Revoke a valid key, and kill that after so many seconds; returns whether it was acknowledged."""
        valid = [file for file in self._keys() if not self._was(file, "asked")]
        chosen = id_of(valid[-1].read_text() if valid else self.create("predict"))
        (self._folder / f"{chosen}.asked").touch()
        self._run("revoke", chosen, seconds=seconds)
        if f"The API key {chosen} is revoked." not in self._service.log():
            return False
        (self._folder / f"{chosen}.revoked").touch()
        return True

    def check(self) -> None:
        """The registry has each acknowledged key and revocation, and each with its entry of the audit log."""
        with database(self._service) as connection:
            stored = dict(connection.execute("SELECT id, revoked_at IS NOT NULL FROM api_keys"))
            entries = "SELECT substr(subject, 5) FROM audit WHERE action = ?"
            logged = {
                action: {row[0] for row in connection.execute(entries, (action,))}
                for action in ("create-key", "revoke-key")
            }
        assert logged["create-key"] == set(stored)
        assert logged["revoke-key"] == {key_id for key_id, is_revoked in stored.items() if is_revoked}
        for file in self._keys():
            if self._was(file, "revoked") or not self._was(file, "asked"):
                assert stored[file.stem] == self._was(file, "revoked")
            if file in self._keys()[-3:]:  # the service knows what the registry has
                headers = {"Authorization": f"Bearer {file.read_text().strip()}"}
                answer = self._service.client.post(
                    "/calibrate", json={"logits": [[0.0] * 10]}, headers=headers
                )
                assert answer.status_code == (401 if stored[file.stem] else 200)

    def _run(self, *arguments: str, seconds: float | None) -> None:
        process = self._service.spawn("keys", *arguments)
        if seconds is not None:
            time.sleep(seconds)
            process.send_signal(signal.SIGKILL)
        process.wait()

    def _keys(self) -> list[Path]:
        """The files of all keys but the first, which the tests themselves use; oldest first."""
        return sorted(self._folder.glob("*.key"), key=lambda file: file.stat().st_mtime_ns)[1:]

    def _was(self, key: Path, what: str) -> bool:
        return key.with_suffix(f".{what}").exists()


def id_of(key: str) -> str:
    """The id that a key contains."""
    return key.split("_")[1]


@contextlib.contextmanager
def database(service: PreloadedService) -> Iterator[sqlite3.Connection]:
    connection = sqlite3.connect(service.data_dir / "boxcal.sqlite3")
    try:
        yield connection
    finally:
        connection.close()
