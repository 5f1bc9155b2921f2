"""`boxcal prune` deletes the parts of old calibrators from the registry of the settings."""

from pathlib import Path

import pytest

from boxcal.app.registry.records import ActivatePolicy, BackboneIdentity, Decision, FittedCalibrator
from boxcal.app.registry.store import Registry
from tests.app.cli.conftest import Boxcal


def test_prune_returns_the_space_to_the_disk(
    boxcal: Boxcal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BOXCAL_DATA_DIR", str(tmp_path))
    file = tmp_path / "boxcal.sqlite3"
    registry = Registry(f"sqlite:///{file}", BackboneIdentity("digits", "ab" * 32, ("a", "b")), owner="me")
    fitted = FittedCalibrator("ts", bytes(1_000_000), {}, {"warnings": []}, b"", b"", 7)
    for number in range(5):
        fit = registry.fits.add(str(number), "ts", ActivatePolicy.NEVER, 7)
        registry.record_fit(fit, fitted, lambda _: Decision(False, "so"))
    registry.close()
    assert file.stat().st_size > 5_000_000
    assert boxcal("prune", "--keep-versions", 2, "--json").json == {"pruned": [1, 2, 3]}
    assert file.stat().st_size < 3_000_000
    assert boxcal("prune", "--keep-versions", 2).stdout == "Pruned 0 calibrators: none.\n"
    assert boxcal("prune", "--keep-versions", 0).code == 2
