"""The gate activates what it was told to, or what is better than what is active."""

from typing import Any

import pytest

from boxcal.app.fitting.server.runner import decide
from boxcal.app.registry.records import ActivatePolicy

HARMLESS = {"severity": "warning", "message": "few samples"}
SERIOUS = {"severity": "serious", "message": "error rate 93%"}


WHY = "compared with version 1, NLL is what it is."


@pytest.mark.parametrize(
    ("policy", "changes", "activate", "why"),
    [
        ("always", {}, True, "Activated, as asked."),
        ("always", {"is_better": False, "active_version": 2}, True, "Activated, as asked."),
        ("always", {"warnings": [SERIOUS]}, True, "as asked, despite a serious warning: error rate 93%"),
        ("never", {"warnings": [SERIOUS]}, False, "as asked"),
        ("never", {"active_version": 2}, False, "as asked"),
        ("if_better", {"warnings": [HARMLESS]}, True, f"Activated: {WHY}"),
        ("if_better", {"is_better": False, "warnings": [HARMLESS]}, False, f"Not activated: {WHY}"),
        (
            "if_better", {"active_version": 2}, False,
            "compared with version 1, but version 2 was activated meanwhile",
        ),
        (
            "if_better", {"warnings": [HARMLESS, SERIOUS]}, False,
            "Not activated: error rate 93%. Correct the data, or activate it yourself.",
        ),
        (
            "if_better", {"warnings": [HARMLESS, SERIOUS], "is_better": False}, False,
            f"Not activated: error rate 93%. Nor is it better: {WHY}",
        ),
    ],
)  # fmt: skip
def test_the_gate(policy: str, changes: dict[str, Any], activate: bool, why: str) -> None:
    known: dict[str, Any] = {"is_better": True, "reason": "NLL is what it is", "warnings": []}
    known |= {"compared_with": 1, "active_version": 1}
    decision = decide(ActivatePolicy(policy), **known | changes)
    assert (decision.activate, why in decision.why) == (activate, True), decision
