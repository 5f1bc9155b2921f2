"""A release serves on the tables of the next one, restarts included."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psycopg
import pytest

from boxcal.app.registry.database import NEXT, Database
from tests.app.fitting.service import Service
from tests.app.fitting.validation_data import validation_npz

pytestmark = pytest.mark.long

EXPANSION = """
ALTER TABLE backbones ADD COLUMN added text;
ALTER TABLE fits ADD COLUMN added text NOT NULL DEFAULT 'one';
ALTER TABLE calibrators ADD COLUMN added bigint NOT NULL DEFAULT 0;
ALTER TABLE activations ADD COLUMN added text;
ALTER TABLE feedback_blocks ADD COLUMN added bytea;
ALTER TABLE audit ADD COLUMN added jsonb;
CREATE TABLE added (id bigint PRIMARY KEY, fit_id varchar(32) REFERENCES fits (id) ON DELETE CASCADE);
CREATE INDEX ix_fits_added ON fits (added);
"""
"""What an additive migration may do."""


@pytest.fixture
def services(tmp_path: Path, url: str) -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def fit(service: Service, **fields: str) -> dict[str, Any]:
    answer = service.fit(validation_npz(500, 4), wait=280, method="ts", **fields)
    document: dict[str, Any] = answer.json()
    assert document["state"] == "succeeded", document
    return document


def version(service: Service) -> int:
    rows = {"logits": [[1.0, 2.0, 3.0, 4.0]]}
    answer = service.client.post("/calibrate", json=rows).raise_for_status()
    return int(answer.json()["calibrator"]["version"])


def does_everything(service: Service) -> None:
    """Use every table: fits, calibrators, activations, feedback, the monitor and the audit log."""
    fitted = fit(service, activate="always")["calibrator"]
    assert version(service) == fitted
    service.client.post("/calibrators/rollback").raise_for_status()
    assert version(service) != fitted
    service.client.post(f"/calibrators/{fitted}/activate").raise_for_status()
    rows = {"logits": [[1.0, 2.0, 3.0, 4.0]] * 20, "options": {"feedback": True}}
    predictions = service.client.post("/calibrate", json=rows).raise_for_status().json()["predictions"]
    items = [{"id": one["id"], "label": "3"} for one in predictions]
    stored = service.client.post("/feedback", json={"items": items}).raise_for_status().json()
    assert stored["accepted"] == 20, stored
    for path in ("/calibrators", "/fits", "/activations", "/monitor", "/refits", "/audit"):
        service.client.get(path).raise_for_status()
    for path in ("report", "artifact"):
        service.client.get(f"/calibrators/{fitted}/{path}").raise_for_status()


def serves_over_restarts(service: Service) -> None:
    does_everything(service)
    active = version(service)
    assert service.stop() == 0
    service.start()
    assert version(service) == active
    service.kill()
    service.start()
    assert version(service) == active
    does_everything(service)


def test_this_release_serves_on_the_tables_of_the_next(tmp_path: Path, url: str, services: ExitStack) -> None:
    migrate(url)
    settings = {"database_url": url, "model": "logits:4"}
    service = services.enter_context(Service(tmp_path / "now", **settings))
    does_everything(service)
    with psycopg.connect(url) as connection:  # as the job that migrates, beside replicas that serve
        connection.execute(EXPANSION.encode())
        connection.execute("UPDATE alembic_version SET version_num = %s", [NEXT])
    does_everything(service)
    serves_over_restarts(service)
    assert revision(url) == NEXT


def migrate(url: str) -> None:
    database = Database(url)
    database.open()
    database.close()


def revision(url: str) -> str:
    with psycopg.connect(url) as connection:
        row = connection.execute("SELECT version_num FROM alembic_version").fetchone()
    assert row is not None
    return str(row[0])
