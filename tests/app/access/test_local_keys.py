"""The copy of the keys for a start without the registry."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

from boxcal.app.access.access import LocalKeys
from boxcal.app.access.keys import CurrentKeys


def test_the_copy_knows_of_a_key_that_was_revoked_before_it_was_seen(tmp_path: Path) -> None:
    copy = LocalKeys(tmp_path)
    for any_created in (False, True):
        copy.write(CurrentKeys([], any_created, datetime.now(UTC)))
        kept = copy.read()
        assert kept is not None
        assert (kept.keys, kept.any_created) == ([], any_created)
