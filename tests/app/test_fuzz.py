"""The fuzzer finds what it looks for, and draws the same cases again."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import fuzz

FAULTY = """
import time
from boxcal.app.protocols.v2 import documents
read, kept, slow = documents.read_head, [], []
def read_head(text):
    if b'"timeout_ms"' in text and len(slow) < 30:
        slow.append(True)
        end = time.thread_time() + 0.15
        while time.thread_time() < end:
            pass
    if b'"priority"' in text:
        raise RuntimeError
    kept.append(bytearray(b"x" * 2**22))
    return read(text)
documents.read_head = read_head
"""


@pytest.mark.long
def test_the_fuzzer_finds_failures_pauses_and_memory_that_grows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fuzz, "PRELUDE", fuzz.PRELUDE + FAULTY)
    monkeypatch.setattr(fuzz, "WARM_UP", 20)
    faults = fuzz.fuzz(150, 2, tmp_path, structured=True)
    for expected in ("RuntimeError", ": 500: ", "the event loop computed for 0.1", "the memory has grown by"):
        assert any(expected in fault for fault in faults), (expected, faults)
