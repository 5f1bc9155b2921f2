"""A copy of the keys in the data folder, for a start while the registry does not answer."""

from __future__ import annotations

import base64
import logging
import os
from datetime import UTC, datetime
from pathlib import Path

import orjson

from boxcal.app.access.keys import KeyRecord
from boxcal.app.access.store import CurrentKeys
from boxcal.app.http.scopes import Scope

logger = logging.getLogger("boxcal")

FILE_NAME = "keys.json"


class LocalKeys:
    """One JSON file, which only the owner may read; it has salts and digests, as the registry does."""

    def __init__(self, data_dir: Path) -> None:
        self._path = data_dir / FILE_NAME
        self._written: object = None

    def write(self, current: CurrentKeys) -> None:
        """Replace the copy if a key was added, changed or revoked; a failure is logged, nothing else."""
        document = {
            "keys": [_document(record) for record in current.keys],
            "any_created": current.any_created,
        }
        if document == self._written:
            return
        new = self._path.with_suffix(".new")
        try:
            descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.write(orjson.dumps(document))
                file.flush()
                os.fsync(file.fileno())
            new.replace(self._path)
            self._written = document
        except OSError as error:
            logger.warning("The copy of the API keys could not be written: %s", error)

    def read(self) -> CurrentKeys | None:
        """Return the keys of the copy; None where there is none, or it is not what was written."""
        try:
            document = orjson.loads(self._path.read_bytes())
            keys = [_record(entry) for entry in document["keys"]]
            # The database gives no time.
            return CurrentKeys(keys, bool(document["any_created"]), datetime.now(UTC))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, LookupError, TypeError) as error:
            logger.warning("%s cannot be read: %s", self._path, error)
            return None


def _document(record: KeyRecord) -> dict[str, object]:
    return {
        "id": record.id,
        "name": record.name,
        "salt": base64.b64encode(record.salt).decode(),
        "digest": base64.b64encode(record.digest).decode(),
        "scopes": sorted(record.scopes),
        "per_minute": record.per_minute,
        "concurrency": record.concurrency,
        "created_at": record.created_at.isoformat(),
        "expires_at": record.expires_at and record.expires_at.isoformat(),
    }


def _record(entry: dict[str, object]) -> KeyRecord:
    values = dict(entry)
    for name in ("salt", "digest"):
        values[name] = base64.b64decode(str(entry[name]))
    for name in ("created_at", "expires_at"):
        values[name] = entry[name] and datetime.fromisoformat(str(entry[name]))
    values["scopes"] = frozenset(map(Scope, entry["scopes"]))  # type: ignore[call-overload]
    return KeyRecord(**values)  # type: ignore[arg-type]
