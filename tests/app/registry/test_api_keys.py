"""API keys that replicas share on PostgreSQL."""

from __future__ import annotations

from pathlib import Path

import httpx

from boxcal.app.access.keys import KeyStore
from boxcal.app.http.scopes import Scope
from boxcal.app.registry.audit import Caller
from tests.app.registry.postgresql import PostgreSQL
from tests.app.running import running
from tests.app.waiting import until

TESTER = Caller("tester")


def status(url: str, key: str) -> int:
    return httpx.get(f"{url}/stats", headers={"X-API-Key": key}, timeout=30).status_code


def test_every_replica_sees_a_new_key_and_its_revocation(url: str, tmp_path: Path) -> None:
    store = KeyStore.at(url)
    store.create("first", {Scope.ADMIN}, TESTER)
    with (
        running(tmp_path / "a", database_url=url) as one,
        running(tmp_path / "b", database_url=url) as other,
    ):
        record, key = store.create("second", {Scope.READ}, TESTER)
        for replica in (one, other):
            until(lambda replica=replica: status(replica.url, key) == 200)  # type: ignore[misc]
        store.revoke(record.id, TESTER)
        for replica in (one, other):
            until(lambda replica=replica: status(replica.url, key) == 401)  # type: ignore[misc]
    store.close()


def test_keys_hold_while_the_database_is_away(postgresql: PostgreSQL, url: str, tmp_path: Path) -> None:
    store = KeyStore.at(url)
    _, key = store.create("first", {Scope.READ}, TESTER)
    with running(tmp_path, database_url=url) as replica:
        assert status(replica.url, key) == 200
        postgresql.stop()
        try:
            availability = replica.state.default.registry.database.availability
            until(lambda: availability.failed_after(0.0))
            assert status(replica.url, key) == 200
            assert status(replica.url, "wrong") == 401
        finally:
            postgresql.start()
    postgresql.stop()
    try:
        with running(tmp_path, database_url=url) as replica:  # from the copy in its data folder
            assert status(replica.url, key) == 200
            assert status(replica.url, "wrong") == 401
    finally:
        postgresql.start()
    store.close()
