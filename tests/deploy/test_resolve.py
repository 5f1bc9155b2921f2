"""The table of `make resolve`: what it must cover, and that a failure is shown and fails."""

from __future__ import annotations

import pytest

from tools import resolve


def test_every_platform_has_the_extras_that_are_promised_there() -> None:
    found = resolve.wanted()
    assert len(found) == 14
    assert [extra for platform, extra in found if platform == "Windows"] == ["", "calibrators"]
    for platform in ("Linux x86-64", "Linux aarch64", "macOS 14 arm64"):
        assert [extra for one, extra in found if one == platform] == ["", "calibrators", "onnx", "serve"]
    assert resolve.PYTHONS == ("3.11", "3.12", "3.13")
    assert resolve.PLATFORMS["Linux aarch64"] == "aarch64-manylinux_2_28"


@pytest.mark.parametrize(("fails", "status"), [(False, 0), (True, 1)])
def test_what_does_not_resolve_is_said(
    fails: bool, status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def resolved(extra: str, platform: str, python: str) -> tuple[int, str]:
        return (0, "no wheel") if fails and (extra, python) == ("onnx", "3.13") else (7, "")

    monkeypatch.setattr(resolve, "resolve", resolved)
    assert resolve.main() == status
    shown = capsys.readouterr().out.splitlines()
    assert shown[3].split() == ["Linux", "x86-64", "onnx", "7", "7", "no" if fails else "7"]
    assert ("boxcal[onnx] on macOS 14 arm64, Python 3.13: no wheel" in shown) is fails
