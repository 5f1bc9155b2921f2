"""Log lines in both formats, one per request, and the id that ties them to a response."""

import contextvars
import json
import logging
import re
from pathlib import Path

import httpx
import pytest

from boxcal.app.observability import logs
from tests.app.fitting.service import Service

NEW_ID = re.compile(r"[0-9a-f]{16}")


@pytest.mark.parametrize("path", ["/health/live", "/nowhere", "/metrics"])
def test_a_valid_id_is_returned(http: httpx.Client, path: str) -> None:
    response = http.get(path, headers={"X-Request-Id": "order-17:a.b_C"})
    assert response.headers.get_list("x-request-id") == ["order-17:a.b_C"]


def test_every_request_without_an_id_gets_its_own(http: httpx.Client) -> None:
    ids = {http.post("/calibrate", json={"logits": [[0.0] * 10]}).headers["x-request-id"] for _ in range(3)}
    ids.add(http.post("/calibrate", content=b"not JSON").headers["x-request-id"])
    assert len(ids) == 4
    assert all(NEW_ID.fullmatch(each) for each in ids)


@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", "/nowhere"), ("DELETE", "/predict"), ("POST", "/calibrate"), ("POST", "/fit")],
)
def test_a_problem_has_the_id_of_its_request(http: httpx.Client, method: str, path: str) -> None:
    given = http.request(method, path, headers={"X-Request-Id": "order-17"})
    assert given.json()["request_id"] == "order-17"
    drawn = http.request(method, path)
    assert drawn.json()["request_id"] == drawn.headers["x-request-id"]


@pytest.mark.parametrize("given", ["", "two words", "x" * 129, "a;b", "ä"])
def test_an_invalid_id_is_replaced(http: httpx.Client, given: str) -> None:
    response = http.get("/health/live", headers=[(b"X-Request-Id", given.encode())])
    assert NEW_ID.fullmatch(response.headers["x-request-id"])


def lines_after_one_request(folder: Path, **settings: str) -> list[str]:
    """Serve one request in a process of its own and read its log."""
    with Service(folder, device="cpu", **settings) as service:
        damaged = {"content-type": "multipart/form-data; boundary=X"}
        assert service.client.post("/predict", content=b"--X\r\nno head", headers=damaged).status_code == 400
        service.client.get("/nowhere/%0A", headers={"X-Request-Id": "abc"})
    return service.log().splitlines()


def test_json_lines_hold_one_object_per_record_and_request(tmp_path: Path) -> None:
    lines = lines_after_one_request(tmp_path, log_format="json", log_level="debug")
    records = [json.loads(line) for line in lines]
    assert all({"time", "level", "logger", "message"} <= record.keys() for record in records)
    assert "uvicorn.error" in {record["logger"] for record in records}
    (one,) = [record for record in records if record.get("request_id") == "abc"]
    assert (one["level"], one["logger"]) == ("debug", "boxcal.request")
    assert (one["method"], one["path"], one["status"]) == ("GET", r"'/nowhere/\n'", 404)
    assert one["milliseconds"] > 0


def test_text_lines_leave_requests_out_by_default(tmp_path: Path) -> None:
    lines = lines_after_one_request(tmp_path)
    assert not [line for line in lines if "nowhere" in line]
    assert [line for line in lines if line.startswith("INFO:") and "Uvicorn running on" in line]


def test_a_text_line_names_the_request_and_an_exception_follows() -> None:
    def format_it() -> str:
        logs.request_id.set("abc")
        error = (ValueError, ValueError("bad"), None)
        record = logging.LogRecord("boxcal", logging.ERROR, __file__, 1, "%s failed", ("it",), error)
        return logs.TextFormatter().format(record)

    lines = contextvars.copy_context().run(format_it).splitlines()
    assert (lines[0], lines[-1]) == ("ERROR:    [abc] it failed", "ValueError: bad")
