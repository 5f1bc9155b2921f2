"""`POST /feedback` against a real service: what is kept, what is counted twice, and what is refused."""

import asyncio
import sqlite3
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from boxcal.app.client import BoxcalClient
from boxcal.app.monitoring.log import FeedbackLog
from boxcal.app.monitoring.records import Label, kept, new_ids
from boxcal.app.registry import database
from boxcal.app.registry.records import BackboneIdentity
from boxcal.app.registry.store import Registry
from tests.app.running import Service, running

COUNTS = ("accepted", "duplicates", "conflicts", "unknown", "expired", "malformed")
ROWS = np.random.default_rng(0).normal(0, 3, (40, 10))
TINY = BackboneIdentity("tiny", "ab" * 32, ("a", "b", "c"))


def predicted(client: httpx.Client, rows: Any = ROWS) -> list[str]:
    body = {"logits": np.asarray(rows).tolist(), "options": {"feedback": True, "top_k": 1}}
    answer = client.post("/calibrate", json=body).raise_for_status().json()
    return [prediction["id"] for prediction in answer["predictions"]]


def give(client: httpx.Client, items: list[dict[str, Any]]) -> dict[str, Any]:
    answer: dict[str, Any] = client.post("/feedback", json={"items": items}).raise_for_status().json()
    return answer


def counts(answer: dict[str, Any]) -> dict[str, int]:
    return {name: answer[name] for name in COUNTS if answer[name]}


def test_only_predictions_with_the_option_have_an_id(client: httpx.Client) -> None:
    plain = client.post("/calibrate", json={"logits": ROWS[:1].tolist()}).json()
    assert "id" not in plain["predictions"][0]
    assert len(set(predicted(client))) == len(ROWS)


def test_a_label_is_taken_once(client: httpx.Client) -> None:
    ids = predicted(client)
    items = [{"id": own, "label": n % 10} for n, own in enumerate(ids)]
    first = give(client, items)
    assert counts(first) == {"accepted": 40}
    again = give(client, items)
    assert counts(again) == {"duplicates": 40}
    assert again["seq"] == first["seq"]
    assert counts(give(client, [items[0] | {"label": 5}])) == {"conflicts": 1}
    assert counts(give(client, [items[0] | {"label": 5}])) == {"duplicates": 1}
    assert counts(give(client, [items[1], items[1]])) == {"duplicates": 2}


def test_one_bad_item_leaves_the_others_alone(client: httpx.Client) -> None:
    own = predicted(client)[0]
    old = new_ids(1, 0.0)[0]
    answer = give(client, [{"id": "none"}, {"id": old, "label": 1}, {"id": own, "label": "3"}, 7])  # type: ignore[list-item]
    assert counts(answer) == {"accepted": 1, "unknown": 1, "malformed": 2}
    assert [(one["index"], one["reason"]) for one in answer["problems"]] == [
        (0, "malformed"), (1, "unknown"), (3, "malformed"),
    ]  # fmt: skip
    assert old in answer["problems"][1]["detail"]


def test_logits_of_another_service_need_a_key_and_count_once(client: httpx.Client) -> None:
    item = {"logits": ROWS[0].tolist(), "key": "order 1", "label": 3}
    assert counts(give(client, [item, item])) == {"accepted": 1, "duplicates": 1}
    assert counts(give(client, [item | {"label": 4}])) == {"conflicts": 1}


def test_csv_is_taken_too(client: httpx.Client) -> None:
    ids = predicted(client)
    body = "id,label\n" + "".join(f"{own},1\n" for own in ids)
    answer = client.post("/feedback", content=body, headers={"content-type": "text/csv"}).json()
    assert counts(answer) == {"accepted": 40}


@pytest.mark.parametrize(
    ("content_type", "body", "status", "says"),
    [
        ("text/plain", b"x", 415, "text/plain"),
        ("application/json", b"{", 400, "not JSON"),
        ("application/json", b'{"items": []}', 422, "at least one object"),
        ("application/json", b'{"item": []}', 422, "'item'"),
        ("text/csv", b"id;label\n", 400, "columns"),
    ],
)
def test_what_is_no_feedback_is_refused(
    client: httpx.Client, content_type: str, body: bytes, status: int, says: str
) -> None:
    answer = client.post("/feedback", content=body, headers={"content-type": content_type})
    assert answer.status_code == status
    assert says in answer.json()["detail"]


def test_ids_have_no_place_in_npy(client: httpx.Client) -> None:
    headers = {"accept": "application/x-npy"}
    body = {"logits": ROWS.tolist(), "options": {"feedback": True}}
    answer = client.post("/calibrate", json=body, headers=headers)
    assert answer.status_code == 422
    assert "feedback is true" in answer.json()["detail"]


def test_a_label_waits_for_a_prediction_that_is_stored_later(
    client: httpx.Client, monitored: Service
) -> None:
    """As if another replica had made it: the id is known to the client before it is in the database."""
    own = kept(0, ROWS[:1])
    log: FeedbackLog = monitored.state.feedback._log
    with ThreadPoolExecutor(1) as threads:
        answer = threads.submit(give, client, [{"id": own.ids[0], "label": 1}])
        until_waiting(monitored)
        log.write([own], [])
        assert counts(answer.result()) == {"accepted": 1}


def until_waiting(service: Service) -> None:
    """Wait until a request has been told once that its prediction is unknown."""
    asked = service.state.feedback.attempts
    while service.state.feedback.attempts == asked:
        time.sleep(0.01)


def test_the_oldest_predictions_are_deleted_and_their_ids_expire(data_dir: Path) -> None:
    registry = Registry(f"sqlite:///{data_dir / 'r.sqlite3'}", TINY, owner="x")
    log = FeedbackLog(registry.database, registry.backbone_id, 10)
    batches = [kept(0, np.zeros((4, 3))) for _ in range(5)]
    for number, batch in enumerate(batches):
        object.__setattr__(batch, "ids", new_ids(4, 1000.0 + number))
        object.__setattr__(batch, "at", 1000.0 + number)
        log.write([batch], [])
    with registry.database.read() as connection:
        assert log.position(connection) == (20, 10)
        assert [event.seq for event in log.after(connection, 0, 100)] == list(range(11, 21))
    (outcome,) = log.write([], [[Label(n, batch.ids[3], 1) for n, batch in enumerate(batches)]])
    assert (outcome.accepted, outcome.count("expired"), outcome.count("unknown")) == (3, 2, 0)
    registry.close()


def test_predictions_that_were_stored_by_a_failed_attempt_are_not_stored_twice(data_dir: Path) -> None:
    registry = Registry(f"sqlite:///{data_dir / 'r.sqlite3'}", TINY, owner="x")
    log = FeedbackLog(registry.database, registry.backbone_id, 100)
    one, two = kept(0, np.zeros((4, 3))), kept(0, np.zeros((2, 3)))
    log.write([one], [])
    log.write([one, two], [], may_be_stored=True)
    with registry.database.read() as connection:
        assert log.position(connection) == (6, 6)
    registry.close()


def test_a_page_of_the_log_ends_where_both_kinds_of_entries_are_known(data_dir: Path) -> None:
    registry = Registry(f"sqlite:///{data_dir / 'r.sqlite3'}", TINY, owner="x")
    log = FeedbackLog(registry.database, registry.backbone_id, 100)
    for _ in range(5):
        batch = kept(0, np.zeros((3, 3)))
        log.write([batch], [[Label(0, batch.ids[0], 1)]])
    direct = Label(0, "key-1", 2, logits=np.zeros(3, np.float16).tobytes())
    log.write([], [[direct]])
    with registry.database.read() as connection:
        whole = [(event.seq, event.label) for event in log.after(connection, 0, 100)]
        assert [seq for seq, _ in whole] == list(range(1, 22))
        assert [seq for seq, label in whole if label is not None] == [4, 8, 12, 16, 20, 21]
        for limit in (2, 3, 7):
            read: list[tuple[int, int | None]] = []
            while page := log.after(connection, read[-1][0] if read else 0, limit):
                read += [(event.seq, event.label) for event in page]
            assert read == whole
    registry.close()


def test_matured_predictions_come_in_their_order_with_labels_that_were_in_time(data_dir: Path) -> None:
    registry = Registry(f"sqlite:///{data_dir / 'r.sqlite3'}", TINY, owner="x")
    log = FeedbackLog(registry.database, registry.backbone_id, 100)
    now = time.time()
    for age in (100.0, 60.0, 5.0):
        batch = kept(0, np.zeros((2, 3)))
        object.__setattr__(batch, "at", now - age)
        log.write([batch], [[Label(0, batch.ids[1], 1)]])
    with registry.database.read() as connection:
        found = [(event.seq, event.label) for event in log.matured(connection, 0, 100, 50.0)]
        assert found == [(1, None), (2, None), (4, None), (5, None)]  # labelled after 60 and 100 s: too late
        found = [(event.seq, event.label) for event in log.matured(connection, 0, 100, 80.0)]
        assert found == [(1, None), (2, None)]
        found = [(event.seq, event.label) for event in log.matured(connection, 2, 100, 2.5)]
        assert found == [(4, None), (5, None), (7, None), (8, None)]
    registry.close()


def test_what_was_collected_is_stored_when_the_service_stops(data_dir: Path) -> None:
    with running(data_dir) as service, httpx.Client(base_url=service.url) as client:
        ids = predicted(client)
    with running(data_dir) as service, httpx.Client(base_url=service.url) as client:
        assert counts(give(client, [{"id": own, "label": 1} for own in ids])) == {"accepted": 40}


def test_the_client_gives_feedback(monitored: Service) -> None:
    with BoxcalClient(monitored.url) as client:
        answer = client.calibrate(ROWS, feedback=True)
        ids = [prediction.id for prediction in answer.predictions if prediction.id is not None]
        assert client.feedback(dict.fromkeys(ids, "4")).accepted == 40
        assert client.feedback([{"id": ids[0], "label": 4, "propensity": 0.5}]).duplicates == 1


def test_while_the_database_is_locked_feedback_is_refused_and_predictions_are_kept(
    data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "BUSY_SECONDS", 0.1)
    with running(data_dir) as service, httpx.Client(base_url=service.url, timeout=30) as client:
        other = sqlite3.connect(data_dir / "boxcal.sqlite3", isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        ids = predicted(client)
        refused = client.post("/feedback", json={"items": [{"id": ids[0], "label": 1}]})
        assert refused.status_code == 503
        assert "retry-after" in refused.headers
        other.close()
        assert counts(give(client, [{"id": own, "label": 1} for own in ids])) == {"accepted": 40}


def test_ids_are_unique_and_say_when_they_were_made() -> None:
    ids = new_ids(1000, 1234.5)
    assert len(set(ids)) == 1000
    assert {own[:12] for own in ids} == {f"{1234500:012x}"}


@pytest.mark.anyio
async def test_many_clients_at_once(monitored: Service) -> None:
    async with httpx.AsyncClient(base_url=monitored.url, timeout=30) as client:

        async def one() -> dict[str, int]:
            body = {"logits": ROWS.tolist(), "options": {"feedback": True}}
            predictions = (await client.post("/calibrate", json=body)).json()["predictions"]
            items = [{"id": prediction["id"], "label": 2} for prediction in predictions]
            return counts((await client.post("/feedback", json={"items": items})).json())

        assert await asyncio.gather(*(one() for _ in range(20))) == [{"accepted": 40}] * 20
