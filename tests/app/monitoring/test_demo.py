"""The act of the demo about monitoring, against a real service: from calm traffic to an activation."""

from pathlib import Path

import numpy as np
import pytest

from boxcal.app.client import BoxcalClient
from boxcal.app.demo import __main__ as demo
from boxcal.app.demo import shift as demo_shift
from boxcal.models.digits_data import load_digits_split
from tests.app.client.scripted import Reply, scripted
from tests.app.running import running


def active(version: int, method: str) -> list[Reply]:
    at = {"reason": "rollback", "activated_at": "2026-11-21T02:51:59Z"}
    return [Reply(document={"version": version, "method": method, **at})]


def test_the_last_steps_say_what_each_of_them_activates(capsys: pytest.CaptureFixture[str]) -> None:
    """After two activations a rollback leads to the first; another step leads to what was before the demo."""
    replies = {
        "calibrators_rollback": active(1, "ts"),
        "calibrators_0_activate": active(0, "uncalibrated"),
    }
    with scripted(**replies) as script, BoxcalClient(script.url) as client:
        demo.restore(client, 0)
        assert capsys.readouterr().out.splitlines() == [
            "6. Roll back:",
            "   calibrator 1 (ts) is active",
            "7. Activate the calibrator from before the demo:",
            "   calibrator 0 (uncalibrated) is active",
        ]
        demo.restore(client, 1)
    assert capsys.readouterr().out == "6. Roll back:\n   calibrator 1 (ts) is active\n"


@pytest.mark.long
def test_the_act_of_the_demo(data_dir: Path) -> None:
    digits = load_digits_split()
    said: list[str] = []
    with running(data_dir) as service, BoxcalClient(service.url, timeout=120) as client:
        answer = client.predict_tensors(digits.validation.levels, logits=True, calibrator=0)
        logits = np.array([prediction.logits for prediction in answer.predictions])
        fit = client.fit_arrays(logits, digits.validation.labels, method="ts", activate="always", wait=120)
        assert fit.activated
        demo_shift.run(client, digits.test, said.append)
        kinds = [decision["kind"] for decision in client.refits()][::-1]
        assert client.activations()["activations"][0]["version"] > fit.version
    assert "no alarm" in said[0]
    assert "Activated calibrator" in said[-1]
    order = ["alarm", "refit", "candidate", "duel_won", "activated"]
    assert [kind for kind in kinds if kind in order][-5:] == order
