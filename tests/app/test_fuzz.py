"""The fuzzer finds what it looks for, and draws the same cases again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tools import fuzz
from tools.hostile.grammars import Fragment, Members, Structured, written

FAULTY = """
import time
from boxcal.app.protocols.v2 import documents
read, kept = documents.read_head, []
def read_head(text):
    if b'"timeout_ms"' in text:
        end = time.thread_time() + 0.15
        while time.thread_time() < end:
            pass
    if b'"priority"' in text:
        raise RuntimeError
    kept.append(bytearray(b"x" * 2**19))
    return read(text)
documents.read_head = read_head
"""


def test_the_fuzzer_finds_failures_pauses_and_memory_that_grows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fuzz, "PRELUDE", fuzz.PRELUDE + FAULTY)
    monkeypatch.setattr(fuzz, "WARM_UP", 20)
    faults = fuzz.fuzz(420, 1, tmp_path, structured=True)
    for expected in ("RuntimeError", ": 500: ", "the event loop computed for 0.1", "the memory has grown by"):
        assert any(expected in fault for fault in faults), (expected, faults)


def test_a_case_is_drawn_from_its_seed_and_number() -> None:
    one, same, other = Structured(1, DOCUMENT), Structured(1, DOCUMENT), Structured(2, DOCUMENT)
    cases = [one.draw(number).data for number in range(50)]
    assert cases == [same.draw(number).data for number in reversed(range(50))][::-1]
    assert cases != [other.draw(number).data for number in range(50)]


DOCUMENT = {
    "paths": {
        "/calibrators/{version}": {
            "get": {"parameters": [{"name": "version", "in": "path"}, {"name": "limit", "in": "query"}]}
        }
    }
}


def test_json_may_repeat_names_and_hold_what_is_no_json() -> None:
    document = Members([("a", [1, "\ud800"]), ("a", {"b": Fragment(b"1e400")})])
    assert written(document) == b'{"a":[1,"\\ud800"],"a":{"b":1e400}}'
    assert json.loads(written(Members([("a", None)]))) == {"a": None}
