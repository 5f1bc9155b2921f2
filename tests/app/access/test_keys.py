"""Keys by the command line, their storage, copy and last use, and the refusal to serve all by mistake."""

from __future__ import annotations

import hashlib
import json
import re
import stat
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import select

from boxcal.app.access.access import FILE_NAME, LocalKeys
from boxcal.app.access.keys import CurrentKeys, KeyRecord, KeyStore
from boxcal.app.cli import output
from boxcal.app.client import BoxcalClient, ForbiddenError, UnauthorizedError
from boxcal.app.http.problems import NoApiKey
from boxcal.app.http.scopes import Scope
from boxcal.app.main import declared_statuses
from boxcal.app.observability.telemetry import Telemetry
from boxcal.app.registry.tables import api_keys
from boxcal.app.settings.service import Settings
from boxcal.app.state import build
from tests.app.access.conftest import TESTER, Guarded, sqlite_url
from tests.app.cli.conftest import Boxcal, boxcal
from tests.app.raising import raises_problem
from tests.app.running import running
from tests.app.waiting import until

__all__ = ["boxcal"]

KEY = re.compile(r"boxcal_[0-9a-f]{16}_[A-Za-z0-9_-]{43}")


def test_the_command_creates_lists_and_revokes(
    boxcal: Boxcal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BOXCAL_DATA_DIR", str(tmp_path))
    created = boxcal("keys", "create", "ci", "--scope", "read", "--scope", "fit", "--per-minute", 9)
    assert KEY.fullmatch(created.stdout.strip())
    as_json = boxcal("keys", "create", "web", "--scope", "predict", "--expires-days", 1, "--json").json
    assert KEY.fullmatch(as_json["key"])
    file = tmp_path / "admin.key"
    written = boxcal("keys", "create", "admin", "--scope", "admin", "--output", file)
    assert written.stdout == ""
    assert KEY.fullmatch(file.read_text().strip())
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert "no key was created" in boxcal("keys", "create", "x", "--scope", "admin", "-o", file).stderr
    assert boxcal("keys", "create", "x", "--scope", "admin", "-o", file, "--json").stdout == "null\n"
    listed = boxcal("keys", "list", "--json").json
    assert [(key["name"], key["scopes"], key["per_minute"]) for key in listed] == [
        ("ci", ["fit", "read"], 9),
        ("web", ["predict"], None),
        ("admin", ["admin"], None),
    ]
    assert listed[1]["expires_at"] is not None
    assert boxcal("keys", "revoke", listed[0]["id"]).code == 0
    assert boxcal("keys", "revoke", listed[0]["id"]).code == 0
    table = boxcal("keys", "list").stdout
    assert "revoked" in table
    for width in (80, 40):
        monkeypatch.setattr(output.screen(), "width", width)
        folded = boxcal("keys", "list").stdout.split()
        assert [key["id"] for key in listed if key["id"] not in folded] == []
    monkeypatch.setattr(output.screen(), "width", 100)
    assert created.stdout.strip() not in table
    boxcal("keys", "create", "over", "--scope", "read", "--expires-days", 0)
    assert table.count("expires 2") == boxcal("keys", "list").stdout.count("expires 2") == 1
    assert boxcal("keys", "list").stdout.count("expired 2") == 1
    unknown = boxcal("keys", "revoke", "0000")
    assert (unknown.code, "'0000'" in unknown.stderr) == (2, True)
    assert boxcal("keys", "create", "x", "--scope", "root").code == 2
    assert boxcal("keys", "create", "", "--scope", "read").code == 2


def test_the_registry_has_no_secret(tmp_path: Path) -> None:
    store = KeyStore.at(sqlite_url(tmp_path))
    keys = [store.create("same", {Scope.READ}, TESTER)[1] for _ in range(2)]
    with store._database.read() as connection:
        rows = connection.execute(select(api_keys)).mappings().all()
    store.close()
    content = (tmp_path / "boxcal.sqlite3").read_bytes()
    for row, key in zip(sorted(rows, key=lambda row: row["id"]), sorted(keys), strict=True):
        secret = key.split("_", 2)[2].encode()
        assert row["digest"] == hashlib.sha256(row["salt"] + secret).digest()
        assert secret not in content
    assert rows[0]["salt"] != rows[1]["salt"]


def test_the_client_sends_its_key(guarded: Guarded, monkeypatch: pytest.MonkeyPatch) -> None:
    with BoxcalClient(guarded.url) as client, pytest.raises(UnauthorizedError, match="no API key"):
        client.stats()
    monkeypatch.setenv("BOXCAL_API_KEY", guarded.keys["predict"])
    with BoxcalClient(guarded.url) as client, pytest.raises(ForbiddenError, match="requires read"):
        client.stats()
    with BoxcalClient(guarded.url, api_key=guarded.keys["read"]) as client:
        assert client.whoami()["name"] == "read"


def test_the_last_use_is_recorded_when_the_service_ends(tmp_path: Path) -> None:
    store = KeyStore.at(sqlite_url(tmp_path))
    _, used = store.create("used", {Scope.READ}, TESTER)
    store.create("unused", {Scope.READ}, TESTER)
    with running(tmp_path) as service:
        assert httpx.get(f"{service.url}/stats", headers={"X-API-Key": used}).status_code == 200
        access: Any = service.state.admission.access
        access.record_uses()
        first = store.list()[0].last_used_at
        assert httpx.get(f"{service.url}/stats", headers={"X-API-Key": used}).status_code == 200
    last, never = (record.last_used_at for record in store.list())
    store.close()
    assert first is not None
    assert last is not None
    assert last > first
    assert never is None


def test_the_first_key_ends_anonymous_use_and_its_revocation_does_not_restore_it(tmp_path: Path) -> None:
    with running(tmp_path) as service:
        assert httpx.get(f"{service.url}/stats").status_code == 200
        store = KeyStore.at(sqlite_url(tmp_path))
        record, key = store.create("first", {Scope.READ}, TESTER)
        until(lambda: httpx.get(f"{service.url}/stats").status_code == 401)
        with httpx.Client(base_url=service.url, headers={"X-API-Key": key}) as http:
            assert http.get("/stats").status_code == 200
            store.revoke(record.id, TESTER)
            until(lambda: http.get("/stats").status_code == 401)
        assert httpx.get(f"{service.url}/stats").status_code == 401
        store.close()
    with running(tmp_path, allow_anonymous=True) as service:
        assert httpx.get(f"{service.url}/stats").status_code == 200


@pytest.mark.parametrize("ends", ["revoked", "expired"])
def test_an_open_stream_ends_with_its_key(guarded: Guarded, ends: str) -> None:
    valid_for = timedelta(seconds=3) if ends == "expired" else None
    record, key = guarded.store.create(ends, {Scope.READ}, TESTER, valid_for=valid_for)
    admin = guarded.headers("admin")
    with httpx.Client(base_url=guarded.url, headers={"Authorization": f"Bearer {key}"}, timeout=10) as http:
        until(lambda: http.get("/whoami").is_success)
        with http.stream("GET", "/monitor/events") as stream:
            lines = stream.iter_lines()
            assert next(lines) == ": open"
            note = {"note": f"while {ends} is valid"}
            httpx.post(f"{guarded.url}/monitor/acknowledge", json=note, headers=admin).raise_for_status()
            assert any(note["note"] in line for line in lines)
            if ends == "revoked":
                guarded.store.revoke(record.id, TESTER)
            until(lambda: http.get("/whoami").status_code == 401)
            note = {"note": f"after {ends}"}
            httpx.post(f"{guarded.url}/monitor/acknowledge", json=note, headers=admin).raise_for_status()
            assert not any(note["note"] in line for line in lines)  # the stream ends


@pytest.mark.anyio
async def test_another_address_than_loopback_needs_a_key(tmp_path: Path) -> None:
    telemetry = Telemetry(declared_statuses([]))
    settings = Settings(data_dir=tmp_path, host="0.0.0.0")  # noqa: S104 - nothing listens
    with raises_problem(NoApiKey, match="boxcal keys create"):
        async with build(settings, telemetry):
            raise AssertionError("it started")
    async with build(settings.model_copy(update={"allow_anonymous": True}), Telemetry({})) as state:
        assert not state.admission.access.is_required
    store = KeyStore.at(sqlite_url(tmp_path))
    store.create("any", {Scope.READ}, TESTER)
    store.close()
    async with build(settings, Telemetry({})) as state:
        assert state.admission.access.is_required


NOW = datetime(2026, 11, 25, 9, 30, tzinfo=UTC)
RECORD = KeyRecord("ab" * 8, "name", b"\xfb\xff", b"\x00\xfe", frozenset(Scope), 60, None, NOW, NOW)


def test_the_copy_knows_of_a_key_that_was_revoked_before_it_was_seen(tmp_path: Path) -> None:
    copy = LocalKeys(tmp_path)
    for any_created in (False, True):
        copy.write(CurrentKeys([], any_created, datetime.now(UTC)))
        kept = copy.read()
        assert kept is not None
        assert (kept.keys, kept.any_created) == ([], any_created)


def test_the_copy_has_every_member_of_a_key_and_is_of_its_owner_alone(tmp_path: Path) -> None:
    copy = LocalKeys(tmp_path)
    copy.write(CurrentKeys([replace(RECORD, last_used_at=NOW)], True, NOW))
    file = tmp_path / FILE_NAME
    assert file.stat().st_mode & 0o777 == 0o600
    (written,) = json.loads(file.read_bytes())["keys"]
    assert (written["salt"], written["expires_at"]) == ("+/8=", NOW.isoformat())
    changed = file.stat().st_ino
    copy.write(CurrentKeys([RECORD], True, NOW))
    assert file.stat().st_ino == changed
    kept = copy.read()
    assert kept is not None
    assert kept.keys == [RECORD]
    file.write_bytes(b"{}")
    assert copy.read() is None
