"""The sentence that a report begins with."""

from typing import Any

import pytest

from boxcal.calibrators.evaluation.verdict import sentence

FALLS, RISES, OPEN = (-0.0981, -0.1601, -0.0526), (0.0981, 0.0526, 0.1601), (-0.02, -0.0534, 0.0112)
SAME, INFINITE = (0.0, 0.0, 0.0), (None, None, None)
SERIOUS = [{"severity": "serious", "message": "labels are shifted by one"}]


def document(
    nll: tuple[float | None, ...],
    brier: tuple[float | None, ...] = OPEN,
    *,
    before: float | None = 0.354,
    after: float | None = 0.2559,
    warnings: list[dict[str, str]] | None = None,
) -> dict[str, Any]:
    names = ("value", "low", "high")
    metrics = {
        name: {"difference": dict(zip(names, one, strict=True))}
        for name, one in {"nll": nll, "brier": brier, "smooth_ece": OPEN}.items()
    }
    metrics["nll"] |= {"before": {"value": before}, "after": {"value": after}}
    return {"metrics": metrics, "warnings": warnings or []}


@pytest.mark.parametrize(
    ("said", "report"),
    [
        ("Use it: NLL falls by 0.098 (0.053 to 0.160).", document(FALLS)),
        ("Use it: NLL falls by 0.00040 (0.00010 to 0.00070).", document((-0.0004, -0.0007, -0.0001))),
        ("Do not use it: NLL rises by 0.098 (0.053 to 0.160).", document(RISES)),
        (
            "Do not use it: NLL falls by 0.098 (0.053 to 0.160), "
            "but Brier score rises by 0.012 (0.010 to 0.014).",
            document(FALLS, (0.012, 0.01, 0.014)),
        ),
        ("No clear gain: NLL is not clearly different (-0.053 to +0.011).", document(OPEN)),
        ("No clear gain: NLL does not change.", document(SAME)),
        ("Use it: NLL is no longer infinite.", document(INFINITE, before=None)),
        ("Do not use it: NLL is infinite: a true class has probability 0.", document(INFINITE, after=None)),
        ("Correct the data first: NLL falls by 0.098 (0.053 to 0.160).", document(FALLS, warnings=SERIOUS)),
    ],
)
def test_a_report_begins_with_what_to_do(said: str, report: dict[str, Any]) -> None:
    assert sentence(report) == said


def test_against_an_active_calibrator_the_sentence_names_it() -> None:
    report = document(FALLS)
    differences = {name: one["difference"] for name, one in document(OPEN)["metrics"].items()}
    report["against"] = {
        "method": "ts",
        "metrics": {"nll": {"active": {"value": 0.25}, "difference": differences["nll"]}},
        "joint_intervals": differences,
    }
    assert sentence(report) == "No clear gain: NLL is not clearly different (-0.053 to +0.011) against `ts`."
