"""A service that requires keys, with one key for each purpose."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import pytest

from boxcal.app.access.keys import KeyStore, written
from boxcal.app.http.scopes import Scope
from boxcal.app.registry.audit import Caller
from tests.app.running import Service, running

TESTER = Caller("tester")


@dataclass(frozen=True)
class Guarded:
    """`keys` has a whole key by scope, and `expired`, `revoked`, `wrong` and `none`."""

    service: Service
    store: KeyStore
    keys: dict[str, str]

    @property
    def url(self) -> str:
        return self.service.url

    def headers(self, key: str) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.keys[key]}"} if self.keys[key] else {}


def sqlite_url(data_dir: Path) -> str:
    return f"sqlite:///{data_dir / 'boxcal.sqlite3'}"


@pytest.fixture(scope="session")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    """Run one service that requires keys for all tests of access."""
    data_dir = tmp_path_factory.mktemp("guarded")
    store = KeyStore.at(sqlite_url(data_dir))
    keys = {str(scope): store.create(scope, {scope}, TESTER)[1] for scope in Scope}
    keys["expired"] = store.create("expired", {Scope.ADMIN}, TESTER, valid_for=timedelta(0))[1]
    record, keys["revoked"] = store.create("revoked", {Scope.ADMIN}, TESTER)
    store.revoke(record.id, TESTER)
    own_id = keys["admin"].split("_")[1]
    keys["wrong"] = written(own_id, "A" * 43)
    keys["none"] = ""
    with running(data_dir) as service, pytest.MonkeyPatch.context() as patch:
        patch.setattr("boxcal.app.access.access.LONGEST_WAIT", 0.0)  # the tests send wrong keys all the time
        yield Guarded(service, store, keys)
    store.close()
