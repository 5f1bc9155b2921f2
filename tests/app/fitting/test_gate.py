"""The gate activates what it was told to, or what is better than what is active."""

from typing import Any

import pytest

from boxcal.app.fitting.server.runner import decide
from boxcal.app.registry.records import ActivatePolicy, Decision

HARMLESS = {"severity": "warning", "message": "few samples"}
SERIOUS = {"severity": "serious", "message": "error rate 93%"}


def decided(policy: str = "if_better", **changes: Any) -> Decision:
    known: dict[str, Any] = {
        "is_better": True,
        "reason": "NLL is what it is",
        "warnings": [],
        "compared_with": 1,
        "active_version": 1,
    }
    return decide(ActivatePolicy(policy), **known | changes)


@pytest.mark.parametrize("is_better", [True, False])
@pytest.mark.parametrize("active_version", [1, 2])
@pytest.mark.parametrize("policy", ["always", "never"])
def test_always_and_never_mean_it(policy: str, is_better: bool, active_version: int) -> None:
    decision = decided(policy, is_better=is_better, active_version=active_version, warnings=[SERIOUS])
    assert decision.activate is (policy == "always")
    assert "as asked" in decision.why


@pytest.mark.parametrize("is_better", [True, False])
def test_if_better_follows_the_report(is_better: bool) -> None:
    decision = decided(is_better=is_better, warnings=[HARMLESS])
    assert decision.activate is is_better
    assert decision.why.endswith("ctivated: compared with version 1, NLL is what it is.")


def test_if_better_does_not_trust_a_comparison_with_another_version() -> None:
    decision = decided(active_version=2)
    assert not decision.activate
    assert "compared with version 1, but version 2 was activated meanwhile" in decision.why


@pytest.mark.parametrize(
    ("is_better", "advice"),
    [
        (True, "Correct the data, or activate it yourself."),
        (False, "Nor is it better: compared with version 1, NLL is what it is."),
    ],
)
def test_if_better_refuses_data_with_a_serious_warning(is_better: bool, advice: str) -> None:
    decision = decided(is_better=is_better, warnings=[HARMLESS, SERIOUS])
    assert not decision.activate
    assert decision.why == f"Not activated: error rate 93%. {advice}"


def test_always_names_the_serious_warning() -> None:
    assert decided("always").why == "Activated, as asked."
    assert "despite a serious warning: error rate 93%" in decided("always", warnings=[SERIOUS]).why
