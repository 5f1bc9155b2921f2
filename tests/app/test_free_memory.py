"""Free memory that the allocator keeps is returned to the system."""

from __future__ import annotations

import pytest

from boxcal.app.observability.supervised_task import FreeMemory, resident_bytes

BLOCK, COUNT = 100_000, 1000


def blocks() -> list[bytearray]:
    """Blocks below the size that glibc maps by itself."""
    return [bytearray(BLOCK) for _ in range(COUNT)]


def test_what_is_free_below_a_block_in_use_is_returned() -> None:
    memory = FreeMemory()
    memory.give_back()
    for _ in range(2):
        *others, last = blocks()
        held = resident_bytes()
        assert memory.give_back() < 0.2 * BLOCK * COUNT  # all of it is in use
        del others
        assert memory.give_back() > 0.8 * BLOCK * COUNT
        assert resident_bytes() < held - 0.8 * BLOCK * COUNT
        assert len(last) == BLOCK


def test_other_allocators_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ctypes.CDLL", lambda _: object())
    assert FreeMemory().give_back() == 0
