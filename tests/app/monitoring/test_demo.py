"""The act of the demo about monitoring, against a real service: from calm traffic to an activation."""

from pathlib import Path

import numpy as np
import pytest

from boxcal.app.client import BoxcalClient
from boxcal.app.demo import shift as demo_shift
from boxcal.models.digits_data import load_digits_split
from tests.app.running import running


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
