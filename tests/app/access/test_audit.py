"""The audit log: who did what, when and from where."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from boxcal.app.client import BoxcalClient, UnauthorizedError
from boxcal.app.http.scopes import Scope
from tests.app.access.conftest import TESTER, Guarded
from tests.app.fitting.validation_data import overconfident
from tests.app.running import running
from tests.app.waiting import until


@pytest.fixture
def operator(guarded: Guarded) -> Iterator[BoxcalClient]:
    """A client with every right, whose key is new to the service."""
    _, key = guarded.store.create("operator", {Scope.ADMIN}, TESTER)
    client = BoxcalClient(guarded.url, api_key=key)

    def known() -> bool:
        try:
            return bool(client.whoami())
        except UnauthorizedError:
            return False

    until(known)
    yield client
    client.close()


def test_every_change_has_an_entry(guarded: Guarded, operator: BoxcalClient) -> None:
    last = operator.audit(limit=1)[0]["id"]
    logits, labels = overconfident(200)
    fit = operator.wait_for_fit(operator.fit_arrays(logits, labels, method="ts", activate="always").id)
    operator.rollback()
    operator.activate(fit.calibrator or 0)
    operator.activate(fit.calibrator or 0)  # changes nothing, so it is not recorded
    operator.activate(0)
    running = operator.fit_arrays(logits, labels, method="ts+pb-mlp", activate="never")
    operator.cancel_fit(running.id)
    entries = [entry for entry in operator.audit() if entry["id"] > last][::-1]
    calibrator = f"calibrator {fit.calibrator}"
    assert [(entry["action"], entry["subject"], entry["name"]) for entry in entries] == [
        ("fit", f"fit {fit.id}", "operator"),
        ("activate", calibrator, "the service"),
        ("rollback", "calibrator 0", "operator"),
        ("activate", calibrator, "operator"),
        ("activate", "calibrator 0", "operator"),
        ("fit", f"fit {running.id}", "operator"),
        ("cancel-fit", f"fit {running.id}", "operator"),
    ]
    whoami = operator.whoami()
    assert {entry["key"] for entry in entries if entry["name"] == "operator"} == {whoami["key"]}
    assert {entry["address"] for entry in entries if entry["name"] == "operator"} == {"127.0.0.1"}
    assert entries[0]["details"] == {"method": "ts", "activate": "always", "samples": 200}
    assert entries[1]["details"] == {"method": "ts", "fit": fit.id}
    moments = [entry["at"] for entry in entries]
    assert moments == sorted(moments)
    created = next(entry for entry in operator.audit() if entry["subject"] == f"key {whoami['key']}")
    assert created["action"] == "create-key"
    assert created["details"] == {"name": "operator", "scopes": "admin"}


def test_the_log_is_paged(operator: BoxcalClient) -> None:
    everything = operator.audit(limit=1000)
    assert len(everything) >= 5
    pages, before = [], None
    while page := operator.audit(limit=2, before_entry=before):
        pages += page
        before = page[-1]["id"]
    assert pages == everything


def test_without_keys_entries_are_anonymous(tmp_path: Path) -> None:
    with running(tmp_path) as service, BoxcalClient(service.url) as client:
        assert client.whoami() == {
            "key_required": False,
            "key": None,
            "name": "anonymous",
            "scopes": ["predict", "read", "fit", "activate", "admin"],
            "expires_at": None,
        }
        logits, labels = overconfident(200)
        client.wait_for_fit(client.fit_arrays(logits, labels, method="ts", activate="never").id)
        client.activate(1)
        assert [(e["action"], e["name"], e["key"]) for e in client.audit()] == [
            ("activate", "anonymous", None),
            ("fit", "anonymous", None),
        ]
