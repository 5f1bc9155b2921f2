"""JSON that is slow to parse for its size: limits by count, no collections of garbage, no long pause."""

from __future__ import annotations

import gc
from typing import Any

import httpx
import orjson
import pytest

from boxcal.app.http.problems import BodyTooLarge
from boxcal.app.predict.bodies import COLLECTION_PAUSE, parse_json
from tests.app.raising import raises_problem
from tests.pauses import PAUSES

JSON = {"content-type": "application/json"}


def listed(item: bytes, count: int) -> bytes:
    return b"[" + b",".join([item] * count) + b"]"


@pytest.mark.parametrize(
    ("item", "most", "says"),
    [
        (b"[]", 249_999, "250,001 lists and objects; the limit is 250,000"),
        (b'{"a":1}', 149_999, "300,001 lists, objects and members; the limit is 300,000"),
        (b'""', 750_000, "750,001 strings; the limit is 750,000"),
    ],
)
def test_what_is_slow_to_parse_is_counted_first(item: bytes, most: int, says: str) -> None:
    assert len(parse_json(listed(item, most))) == most
    with raises_problem(BodyTooLarge, says):
        parse_json(listed(item, most + 1))


def test_50_000_labels_with_every_member_are_below_the_limits() -> None:
    item = b'{"id":"01936d8f2b7c4d0e9a5f6b1c2d3e4f50","label":1,"propensity":0.5,"source":"a"}'
    assert len(parse_json(listed(item, 50_000))) == 50_000


def test_no_garbage_is_collected_while_a_document_is_parsed() -> None:
    runs: list[Any] = []

    def note(phase: str, info: dict[str, int]) -> None:
        runs.append((phase, info["generation"]))

    body = listed(b"[1]", 100_000)
    gc.callbacks.append(note)
    try:
        orjson.loads(body)
        assert len(runs) > 20  # without the pause
        runs.clear()
        with COLLECTION_PAUSE:
            parse_json(body)
            assert not gc.isenabled()
            assert runs == []
    finally:
        gc.callbacks.remove(note)
    assert gc.isenabled()


def test_a_parse_that_fails_leaves_the_collector_on() -> None:
    with pytest.raises(orjson.JSONDecodeError):
        parse_json(b"[" + b"1," * 100_000)
    assert gc.isenabled()


MEMBERS = b"{" + b",".join(b'"%x":1' % n for n in range(299_000)) + b"}"
BODIES = {
    "rows": b'{"%s":' + listed(listed(b"0.25", 10), 79_000) + b"}",
    "lists": b'{"%s":' + listed(b"[]", 249_000) + b"}",
    "strings": b'{"%s":' + listed(b'"a"', 749_000) + b"}",
    "integers": b'{"%s":' + listed(b"18446744073709551615", 199_000) + b"}",
    "members": MEMBERS,
    "options": b'{"%s":[[1]],"options":' + MEMBERS + b"}",
}
ROUTES = {
    "/calibrate": b"logits",
    "/predict": b"inputs",
    "/feedback": b"items",
    "/v2/models/digits.calibrator/infer": b"inputs",
}


@pytest.mark.parametrize("name", BODIES)
@pytest.mark.parametrize("route", ROUTES)
def test_4_mib_of_json_pause_the_event_loop_for_50_ms_at_most(
    http: httpx.Client, route: str, name: str
) -> None:
    body = BODIES[name].replace(b"%s", ROUTES[route])
    assert 2**19 < len(body) <= 2**22
    answer = http.post(route, content=body, headers=JSON)
    assert answer.status_code in (200, 413, 422), answer.text[:500]
    PAUSES.settle()
    assert PAUSES.longest <= 0.05


def test_parameters_of_the_protocol_are_counted(http: httpx.Client) -> None:
    route = "/v2/models/digits.calibrator/infer"
    logits = {"name": "logits", "shape": [1, 10], "datatype": "FP64", "data": [0.0] * 10}
    for count, status in ((64, 200), (65, 422), (299_000, 422)):
        body = {"inputs": [logits], "parameters": {f"zz{n}": 1 for n in range(count)}}
        answer = http.post(route, content=orjson.dumps(body), headers=JSON)
        assert answer.status_code == status, answer.text[:500]
    assert "at most 64 parameters" in answer.text
    PAUSES.settle()
    assert PAUSES.longest <= 0.05


def test_options_of_a_form_are_limited_as_a_json_body_is(http: httpx.Client) -> None:
    too_long = http.post("/predict", files={"file": b"x", "options": b" " * 4_194_304 + b"{}"})
    assert too_long.status_code == 413
    assert "4,194,306 bytes; the limit of JSON is 4,194,304" in too_long.json()["detail"]
    members = http.post("/predict", files={"file": b"x", "options": MEMBERS[:-1] + b',"a":1' * 1_000 + b"}"})
    assert members.status_code == 413
    assert "lists, objects and members" in members.json()["detail"]
    PAUSES.settle()
    assert PAUSES.longest <= 0.05
