import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.serving import report
from benchmarks.serving.payloads import for_boxcal, open_inference, random_logits, read_answer

MEMORY = {"boxcal": 400 * 2**20, "other": 100 * 2**20}


def one_round(limit: float, ours: int, theirs: int) -> dict[str, Any]:
    def phase(name: str, answered: int, failed: int = 0, rate: float | None = None) -> dict[str, Any]:
        latencies = [0.010] * (answered - 1) + [0.030]
        failures = {"503": failed} if failed else {}
        return {"name": name, "rate": rate, "elapsed": 1.0, "latencies": latencies, "failures": failures}

    def server(answered: int, failed: int) -> dict[str, Any]:
        phases = [phase("lone", 5), phase("saturation", answered, failed)]
        constant = phase("50% of the limit", 4, failed, rate=limit / 2)
        return {"phases": [*phases, constant]}

    servers = {"boxcal": server(ours, 0), "other": server(theirs, 3)}
    return report.condense({"limits": {"limit": limit}, "servers": servers})


def test_the_table_shows_medians_of_shares_taken_within_each_round() -> None:
    rounds = [one_round(100, 90, 50), one_round(50, 48, 40), one_round(200, 100, 20)]
    lines = report.table("images", {"memory_bytes": MEMORY, "rounds": rounds}).splitlines()
    assert "limit 100.0/s" in lines[0]
    ours, theirs = (line.strip("| ").split(" | ") for line in lines[-2:])
    assert ours[:4] == ["**boxcal**", "90.0", "0.900", "0.900, 0.960, 0.500"]
    assert theirs[:4] == ["other", "40.0", "0.500", "0.500, 0.800, 0.100"]
    assert theirs[7:] == ["9", "100"]


def test_the_plot_shows_every_task_measured(tmp_path: Path) -> None:
    results = {"memory_bytes": MEMORY, "rounds": [one_round(100, 90, 50)]}
    (tmp_path / "serving-images.json").write_text(json.dumps(results))
    report.plot(tmp_path, tmp_path / "plot.svg")
    drawn = (tmp_path / "plot.svg").read_text()
    assert drawn.startswith("<?xml")
    report.plot(tmp_path / "nowhere", tmp_path / "none.svg")
    assert not (tmp_path / "none.svg").exists()


@pytest.mark.parametrize("shape", [for_boxcal, open_inference])
def test_every_dialect_carries_the_same_logits(shape: Any) -> None:
    (body,) = random_logits(1)
    sent = json.loads(shape("logits", body).body)
    row = sent["logits"][0] if "logits" in sent else sent["inputs"][0]["data"]
    assert row == json.loads(body)["logits"][0]


def test_every_dialect_of_answers_is_read() -> None:
    top = [{"index": i, "probability": 0.1} for i in range(5)]
    assert read_answer("images", {"top": top}) == [0, 1, 2, 3, 4]
    assert read_answer("images", {"predictions": [{"top": top}]}) == [0, 1, 2, 3, 4]
    assert read_answer("images", {"outputs": [{"data": [0, 1, 2, 3, 4]}]}) == [0, 1, 2, 3, 4]
    for document in (
        [[0.5, 0.5]],
        {"probabilities": [[0.5, 0.5]]},
        {"predictions": [{"probabilities": [0.5, 0.5]}]},
    ):
        assert read_answer("logits", document) == [0.5, 0.5]
