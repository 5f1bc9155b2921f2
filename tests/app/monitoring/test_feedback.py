"""`POST /feedback` against a real service: what is kept, what is counted twice, and what is refused."""

import asyncio
import sqlite3
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from boxcal.app.client import BoxcalClient
from boxcal.app.monitoring import writer
from boxcal.app.monitoring.log import FeedbackLog
from boxcal.app.monitoring.records import NONE, Array, ItemProblem, Label, Outcome, PredictionBlock, time_of
from boxcal.app.registry import database
from boxcal.app.registry.records import BackboneIdentity
from boxcal.app.registry.store import Registry
from boxcal.calibrators.monitoring.stored_logits import pack, unpack
from tests.app.registry.postgresql import PostgreSQL
from tests.app.running import Service, running
from tests.app.waiting import until
from tests.pauses import PAUSES

COUNTS = ("accepted", "duplicates", "conflicts", "unknown", "expired", "malformed")
ROWS = np.random.default_rng(0).normal(0, 3, (40, 10))
TINY = BackboneIdentity("tiny", "ab" * 32, ("a", "b", "c"))


def predicted(client: httpx.Client, rows: Any = ROWS) -> list[str]:
    body = {"logits": np.asarray(rows).tolist(), "options": {"feedback": True, "top_k": 1}}
    answer = client.post("/calibrate", json=body).raise_for_status().json()
    return [prediction["id"] for prediction in answer["predictions"]]


def made(rows: Any, now: float = 0.0, began: float | None = None) -> tuple[PredictionBlock, list[str]]:
    block = PredictionBlock(np.shape(rows)[1])
    if began is not None:
        block.id = f"{int(began * 1000):012x}{block.id[12:]}"
    return block, block.add(0, np.asarray(rows), now or time.time())


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
    old = "0" * 32
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


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="reads the peak of memory from Linux")
@pytest.mark.parametrize("is_accepted", [True, pytest.param(False, marks=pytest.mark.long)])
def test_a_table_of_30_mb_is_read_in_pieces(client: httpx.Client, is_accepted: bool) -> None:
    digits = "1234567890" * 5
    if is_accepted:
        row = f'"[{f"-1.{digits}," * 10}0.5]",1\n'.replace(",0.5", "")  # 10 numbers of 53 characters
        body = "key,logits,label\n" + "".join(f"k{n},{row}" for n in range(50_000))
    else:  # a source may have 64 characters
        body = "id,label,source\n" + "".join(f"{n:032x},1,{digits * 11}\n" for n in range(50_000))
    content = body.encode()
    assert 27_000_000 < len(content) < 31_000_000
    del body
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = memory_peak()
    answer = client.post("/feedback", content=content, headers={"content-type": "text/csv"}, timeout=100)
    assert counts(answer.json()) == {"accepted" if is_accepted else "malformed": 50_000}
    assert memory_peak() - before <= 8 * len(content)
    PAUSES.settle()
    assert PAUSES.longest <= 0.1


def memory_peak() -> int:
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return 1024 * int(status["VmHWM"].split()[0])


def test_50_000_labels_of_unknown_predictions_do_not_stop_the_service(client: httpx.Client) -> None:
    began = int(time.time() * 1000)
    items = [{"id": f"{began:012x}{n:020x}", "label": 1} for n in range(50_000)]
    PAUSES.clear()
    assert counts(give(client, items)) == {"unknown": 50_000}
    PAUSES.settle()
    assert PAUSES.longest <= 0.1


@pytest.mark.parametrize(
    ("content_type", "body", "status", "says"),
    [
        ("text/plain", b"x", 415, "text/plain"),
        ("application/json", b"{", 400, "not JSON"),
        ("application/json", b'{"items": [{"id": "\\ud800", "label": 1}]}', 400, "not JSON"),
        ("application/json", b'{"items": []}', 422, "at least one object"),
        (
            "application/json",
            b'{"labels": []}',
            422,
            '\'labels\'; it may have items. Write {"items": [{"id": "',
        ),
        ("application/json", b"[]", 422, 'with \'items\'. Write {"items": [{"id": "'),
        ("text/csv", b"ident,label\n", 400, "columns"),
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
    block, (own,) = made(ROWS[:1])
    log: FeedbackLog = monitored.state.default.feedback._log
    with ThreadPoolExecutor(1) as threads:
        answer = threads.submit(give, client, [{"id": own, "label": 1}])
        until_waiting(monitored)
        log.write([block], [])
        assert counts(answer.result()) == {"accepted": 1}


def test_a_label_waits_for_a_replica_whose_clock_is_behind(
    data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "WAIT_SECONDS", 60.0)
    block, (own,) = made(ROWS[:1], began=time.time() - 300)
    with (
        running(data_dir) as service,
        httpx.Client(base_url=service.url, timeout=90) as client,
        ThreadPoolExecutor(1) as threads,
    ):
        feedback = service.state.default.feedback
        answer = threads.submit(give, client, [{"id": own, "label": 1}])
        until(lambda: feedback.attempts > 1 or answer.done(), 60)
        feedback._log.write([block], [])
        assert counts(answer.result()) == {"accepted": 1}


def test_a_label_of_a_prediction_of_long_ago_does_not_wait() -> None:
    labels = [
        Label(index, f"{int((time.time() - age) * 1000):012x}{0:020x}", 1)
        for index, age in enumerate((-300, 0, 300, 900))
    ]
    problems = [ItemProblem(label.index, label.id, "unknown", "so") for label in labels]
    assert writer._young(Outcome(problems=problems), labels) == labels[:3]


def until_waiting(service: Service) -> None:
    """Wait until a request has been told once that its prediction is unknown."""
    asked = service.state.default.feedback.attempts
    while service.state.default.feedback.attempts == asked:
        time.sleep(0.01)


def opened(data_dir: Path, max_rows: int = 100) -> tuple[Registry, FeedbackLog]:
    registry = Registry(f"sqlite:///{data_dir / 'r.sqlite3'}", TINY, owner="x")
    return registry, FeedbackLog(registry.database, registry.backbone_id, max_rows)


def direct(n: int) -> Label:
    return Label(0, f"key-{n}", 2, logits=pack(np.zeros((1, 3))).tobytes())


def shown(entries: Array) -> list[tuple[int, int | None]]:
    labels = [None if label == NONE else label for label in entries["label"].tolist()]
    return list(zip(entries["seq"].tolist(), labels, strict=True))


@pytest.mark.parametrize("seconds_between", [1.0, 0.0])
def test_the_oldest_predictions_are_deleted_and_their_ids_expire(
    data_dir: Path, seconds_between: float
) -> None:
    registry, log = opened(data_dir, 10)
    last = []
    for number in range(5):
        block, ids = made(np.zeros((4, 3)), began=1000.0 + number * seconds_between)
        log.write([block], [])
        last.append(ids[3])
    with registry.database.read() as connection:
        assert log.position(connection) == (20, 8)
        assert log.after(connection, 0, 100)[0]["seq"].tolist() == list(range(13, 21))
    (outcome,) = log.write([], [[Label(n, own, 1) for n, own in enumerate(last)]])
    assert (outcome.accepted, outcome.count("expired"), outcome.count("unknown")) == (2, 3, 0)
    log.write([], [[direct(n)] for n in range(4)])
    with registry.database.read() as connection:
        assert log.position(connection) == (26, 8)  # of one block, and those that came with their label
        found = log.after(connection, 0, 100)[0]
        assert shown(found)[4:] == [(22, 1), (23, 2), (24, 2), (25, 2), (26, 2)]
    registry.close()


def test_only_as_many_predictions_as_asked_for_are_kept_whatever_their_order(data_dir: Path) -> None:
    registry, log = opened(data_dir, 20)
    rng = np.random.default_rng(0)
    kept: list[int] = []
    seq = 0
    for number in range(60):
        if rng.random() < 0.5:
            count = int(rng.integers(1, 4))
            block, _ = made(np.zeros((count, 3)))
            log.write([block], [])
        else:
            count = 1
            log.write([], [[direct(number)]])
        kept += range(seq + 1, seq + count + 1)
        seq += count
        with registry.database.read() as connection:
            found = log.after(connection, 0, 1000)[0]
            assert log.position(connection) == (seq, len(found))
        assert 17 < len(found) <= 20 or len(kept) < 18
        assert found["seq"].tolist() == kept[-len(found) :]
    registry.close()


def test_what_is_too_much_to_keep_is_never_stored_and_expires(data_dir: Path) -> None:
    with running(data_dir, feedback_rows=32) as service, httpx.Client(base_url=service.url) as client:
        ids = [own for _ in range(3) for own in predicted(client)]
        answer = give(client, [{"id": own, "label": 1} for own in (ids[0], ids[40], ids[-1])])
        assert counts(answer) == {"accepted": 1, "expired": 2}
        assert answer["seq"] == len(ids) + 1
        assert client.get("/monitor").json()["log"]["rows"] <= 32
        predictions = 'boxcal_feedback_total{result="predictions"} '
        assert f"{predictions}{len(ids):.1f}" in client.get("/metrics").text


def test_all_ids_that_were_deleted_expire_though_two_blocks_began_at_once(data_dir: Path) -> None:
    with (
        running(data_dir, feedback_rows=2000) as service,
        httpx.Client(base_url=service.url, timeout=100) as client,
    ):
        sent = [predicted(client, np.zeros((rows, 10))) for rows in (900, 900, 900, 600)]
        answers = [give(client, [{"id": own, "label": 1} for own in ids]) for ids in sent]
        assert [counts(answer) for answer in answers] == [
            {"expired": 900}, {"accepted": 400, "expired": 500}, {"accepted": 900}, {"accepted": 600},
        ]  # fmt: skip


def test_predictions_that_were_stored_by_a_failed_attempt_are_not_stored_twice(data_dir: Path) -> None:
    registry, log = opened(data_dir)
    (one, _), (two, _) = made(np.zeros((4, 3))), made(np.zeros((2, 3)))
    log.write([one], [])
    log.write([one, two], [], may_be_stored=True)
    with registry.database.read() as connection:
        assert log.position(connection) == (6, 6)
    registry.close()


def test_what_is_copied_to_a_label_is_what_was_predicted(data_dir: Path) -> None:
    registry, log = opened(data_dir)
    block = PredictionBlock(3)
    rows = np.random.default_rng(0).normal(0, 3, (6, 3))
    rows[4] += 1e6
    ids = [*block.add(1, rows[:2], 10.0), *block.add(2, rows[2:5], 11.0), *block.add(1, rows[5:], 12.0)]
    log.write([block], [])
    log.write([], [[Label(n, ids[own], 1, 0.5 if own else None) for n, own in enumerate((4, 0, 5))]])
    with registry.database.read() as connection:
        entries = log.after(connection, 0, 100)[0]
        assert log.after(connection, 6, 100)[0]["seq"].tolist() == [7, 8, 9]
    assert entries["version"].tolist() == [1, 1, 2, 2, 2, 1, 2, 1, 1]
    assert entries["moment"].tolist() == [10.0, 10.0, 11.0, 11.0, 11.0, 12.0, 11.0, 10.0, 12.0]
    assert entries["propensity"].tolist() == [*[1.0] * 6, 0.5, 1.0, 0.5]
    assert unpack(entries["logits"]) == pytest.approx(rows[[*range(6), 4, 0, 5]], abs=0.01)
    registry.close()


def test_the_newest_predictions_of_a_version_are_found_behind_many_small_blocks(data_dir: Path) -> None:
    registry, log = opened(data_dir, 5000)
    blocks = [PredictionBlock(3, 1) for _ in range(3000)]
    for number, block in enumerate(blocks):
        block.add(1 if number < 1200 else 2, np.array([[0.0, number, 0.0]]), 10.0)
    log.write(blocks, [])
    with registry.database.read() as connection:
        for version, count, expected in ((1, 1000, range(200, 1200)), (1, 5000, range(1200)), (3, 1, ())):
            found = log.newest(connection, version, count)
            assert found.shape == ((len(expected), 3) if expected else (0, 0))
            assert found[:, 1:2].ravel().tolist() == pytest.approx(list(expected), rel=1e-3)
    registry.close()


def test_a_page_of_the_log_ends_where_both_kinds_of_entries_are_known(data_dir: Path) -> None:
    registry, log = opened(data_dir)
    for _ in range(5):
        block, ids = made(np.zeros((3, 3)))
        log.write([block], [[Label(0, ids[0], 1)]])
    log.write([], [[direct(0)]])
    with registry.database.read() as connection:
        found, more = log.after(connection, 0, 100)
        whole = shown(found)
        assert not more
        assert [seq for seq, _ in whole] == list(range(1, 22))
        assert [seq for seq, label in whole if label is not None] == [4, 8, 12, 16, 20, 21]
        for limit in (2, 3, 7):
            read: list[tuple[int, int | None]] = []
            more = True
            while more:
                found, more = log.after(connection, read[-1][0] if read else 0, limit)
                read += shown(found)
            assert read == whole
            assert not log.has_entries_after(connection, 21)
            assert log.has_entries_after(connection, 20)
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


def refused(client: httpx.Client, own: str) -> None:
    for path, body in (
        ("/feedback", {"items": [{"id": own, "label": 1}]}),
        ("/calibrators/0/activate", None),
        ("/monitor/acknowledge", {"note": "seen"}),
    ):
        answer = client.post(path, json=body)
        assert answer.status_code == 503, path
        assert "retry-after" in answer.headers


def test_while_postgresql_is_read_only_changes_are_refused_and_predictions_are_kept(
    data_dir: Path, url: str, postgresql: PostgreSQL
) -> None:
    with (
        running(data_dir, database_url=url) as service,
        httpx.Client(base_url=service.url, timeout=60) as client,
    ):
        ids = predicted(client)
        assert counts(give(client, [{"id": ids[0], "label": 1}])) == {"accepted": 1}
        postgresql.set_read_only(url, True)
        ids = predicted(client)
        refused(client, ids[0])
        postgresql.set_read_only(url, False)
        items = [{"id": own, "label": 1} for own in ids]
        until(lambda: client.post("/feedback", json={"items": items}).status_code == 200, 60)
        assert counts(give(client, items)) == {"duplicates": 40}


def test_while_the_sqlite_file_is_damaged_feedback_is_refused_and_predictions_are_kept(
    data_dir: Path,
) -> None:
    with running(data_dir) as service, httpx.Client(base_url=service.url, timeout=60) as client:
        feedback = service.state.default.feedback
        assert counts(give(client, [{"id": predicted(client)[0], "label": 1}])) == {"accepted": 1}
        file = data_dir / "boxcal.sqlite3"
        select = "SELECT rootpage FROM sqlite_schema WHERE name = 'feedback_blocks'"
        with (
            closing(sqlite3.connect(file, timeout=60, isolation_level=None)) as other,
            file.open("r+b") as pages,
        ):
            other.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            pages.seek((other.execute(select).fetchone()[0] - 1) * database.PAGE_BYTES)
            pages.write(b"\xff" * database.PAGE_BYTES)
            pages.flush()
            other.execute("UPDATE feedback_logs SET seq = seq")  # no connection keeps pages from before
        ids = predicted(client)
        answer = client.post("/feedback", json={"items": [{"id": ids[0], "label": 1}]})
        assert (answer.status_code, answer.json()["type"]) == (503, "urn:boxcal:problem:registry-unavailable")
        until(lambda: sum(block.rows for block in feedback._blocks) == 40)


def test_after_any_failure_feedback_is_answered_and_predictions_are_kept(
    data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(data_dir) as service, httpx.Client(base_url=service.url, timeout=60) as client:

        def fail(*_: Any, **__: Any) -> None:
            raise RuntimeError("unexpected")

        with monkeypatch.context() as failing:
            failing.setattr(service.state.default.feedback._log, "write", fail)
            ids = predicted(client)
            answer = client.post("/feedback", json={"items": [{"id": ids[0], "label": 1}]})
            assert answer.status_code == 503
        assert counts(give(client, [{"id": own, "label": 1} for own in ids])) == {"accepted": 40}


def test_ids_are_unique_and_say_when_they_were_made() -> None:
    ids = [own for _ in range(100) for own in PredictionBlock(10).add(0, ROWS, 0.0)]
    assert len(set(ids)) == 4000
    assert {len(own) for own in ids} == {32}
    assert all(abs(time_of(own) - time.time()) < 60 for own in ids)


@pytest.mark.anyio
async def test_many_clients_at_once(monitored: Service) -> None:
    async with httpx.AsyncClient(base_url=monitored.url, timeout=30) as client:

        async def one() -> dict[str, int]:
            body = {"logits": ROWS.tolist(), "options": {"feedback": True}}
            predictions = (await client.post("/calibrate", json=body)).json()["predictions"]
            items = [{"id": prediction["id"], "label": 2} for prediction in predictions]
            return counts((await client.post("/feedback", json={"items": items})).json())

        assert await asyncio.gather(*(one() for _ in range(20))) == [{"accepted": 40}] * 20
