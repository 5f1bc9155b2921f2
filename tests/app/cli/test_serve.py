"""`boxcal serve`: how the process lays out its memory."""

from __future__ import annotations

import gc
import sys
from functools import partial
from pathlib import Path

import pytest

from boxcal.app.cli import quick_start
from boxcal.app.cli.quick_start import TUNABLES
from boxcal.calibrators import temperature_fast_path
from tests.app.fitting.service import Service

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="glibc's tunables and /proc")


SETTINGS = (
    "glibc.malloc.arena_max=1:glibc.malloc.mmap_threshold=33554432:glibc.malloc.trim_threshold=67108864"
)


@pytest.mark.parametrize(("own", "expected"), [(None, SETTINGS), ("glibc.malloc.arena_max=2",) * 2])
def test_memory_comes_from_one_arena_with_high_thresholds_unless_the_operator_says_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: str | None, expected: str
) -> None:
    monkeypatch.delenv(TUNABLES, raising=False)
    if own:
        monkeypatch.setenv(TUNABLES, own)
    with Service(tmp_path) as service:
        # glibc puts an end to each of them, where it reads them.
        environment = Path(f"/proc/{service.process.pid}/environ").read_bytes()
        assert f"{TUNABLES}={expected}\0".replace(":", "\0").encode() in environment


@pytest.mark.parametrize(("is_kept", "called"), [(False, ["warm_softmax"]), (True, ["warm_arrays"])])
def test_a_start_that_compiles_says_what_it_waits_for(
    is_kept: bool, called: list[str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    calls: list[str] = []
    monkeypatch.setattr(temperature_fast_path, "solver_is_kept", lambda: is_kept)
    for name in ("warm_softmax", "warm_arrays"):
        monkeypatch.setattr(temperature_fast_path, name, partial(calls.append, name))
    try:
        quick_start.prepare()
    finally:
        gc.enable()
    assert calls == called
    assert ("compiling the solver for this processor" in capfd.readouterr().err) is not is_kept
