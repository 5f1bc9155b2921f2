"""The copy of the keys for a start without the registry."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from boxcal.app.access.access import FILE_NAME, LocalKeys
from boxcal.app.access.keys import CurrentKeys, KeyRecord
from boxcal.app.http.scopes import Scope

NOW = datetime(2026, 11, 25, 9, 30, tzinfo=UTC)
KEY = KeyRecord("ab" * 8, "name", b"\xfb\xff", b"\x00\xfe", frozenset(Scope), 60, None, NOW, NOW)


def test_the_copy_knows_of_a_key_that_was_revoked_before_it_was_seen(tmp_path: Path) -> None:
    copy = LocalKeys(tmp_path)
    for any_created in (False, True):
        copy.write(CurrentKeys([], any_created, datetime.now(UTC)))
        kept = copy.read()
        assert kept is not None
        assert (kept.keys, kept.any_created) == ([], any_created)


def test_the_copy_has_every_member_of_a_key_and_is_of_its_owner_alone(tmp_path: Path) -> None:
    copy = LocalKeys(tmp_path)
    copy.write(CurrentKeys([replace(KEY, last_used_at=NOW)], True, NOW))
    file = tmp_path / FILE_NAME
    assert file.stat().st_mode & 0o777 == 0o600
    (written,) = json.loads(file.read_bytes())["keys"]
    assert (written["salt"], written["expires_at"]) == ("+/8=", NOW.isoformat())
    changed = file.stat().st_ino
    copy.write(CurrentKeys([KEY], True, NOW))
    assert file.stat().st_ino == changed
    kept = copy.read()
    assert kept is not None
    assert kept.keys == [KEY]
    file.write_bytes(b"{}")
    assert copy.read() is None
