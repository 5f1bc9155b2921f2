"""Free memory that the allocator keeps is returned to the system."""

from __future__ import annotations

import pytest

from boxcal.app.free_memory import FreeMemory, resident_bytes

BLOCK, COUNT = 100_000, 1000


def test_what_is_free_below_a_block_in_use_is_returned() -> None:
    memory = FreeMemory()
    memory.look()
    blocks = [bytearray(BLOCK) for _ in range(COUNT)]  # each is below the size that glibc maps by itself
    last = blocks[-1]
    del blocks
    held = resident_bytes()
    assert memory.look() > 0.8 * BLOCK * COUNT
    assert resident_bytes() < held - 0.8 * BLOCK * COUNT
    assert memory.look() == 0  # nothing was added since
    assert len(last) == BLOCK


def test_it_is_looked_for_again_after_a_look_during_a_large_request() -> None:
    memory = FreeMemory()
    memory.look()
    memory.look()
    request = bytearray(BLOCK * COUNT)  # mapped by itself
    blocks = [bytearray(BLOCK) for _ in range(COUNT)]
    last = blocks[-1]
    del blocks
    assert memory.look() > 0.8 * BLOCK * COUNT
    del request
    again = [bytearray(BLOCK) for _ in range(COUNT // 2)]
    end = again[-1]
    del again
    assert memory.look() > 0.3 * BLOCK * COUNT
    assert len(last) == len(end) == BLOCK


def test_other_allocators_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ctypes.CDLL", lambda _: object())
    assert FreeMemory().look() == 0
