"""`kill -9` at any moment costs what was under way, and nothing else; `python -m tools.kills` shows more."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.hostile.crashes import KINDS, rounds


def test_a_kill_of_each_kind(tmp_path: Path) -> None:
    assert len(rounds(tmp_path / "data", len(KINDS), seed=4)) == len(KINDS)


@pytest.mark.long
def test_a_hundred_kills(tmp_path: Path) -> None:
    found = rounds(tmp_path / "data", 100, seed=20)
    print(*found, sep="\n")  # noqa: T201 - shown by -s, and where the test fails
    for step in ("fitting", "fold", ("judging", "comparing", "preparing", "drawing", "done")):
        assert any(stage.startswith(step) for stage in found)
