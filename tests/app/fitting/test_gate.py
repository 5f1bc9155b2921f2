"""The gate activates what it was told to, or what is better than what is active."""

import pytest

from boxcal.app.activation.gate import decide
from boxcal.app.registry.records import ActivatePolicy


@pytest.mark.parametrize("is_better", [True, False])
@pytest.mark.parametrize("active_version", [1, 2])
@pytest.mark.parametrize("policy", ["always", "never"])
def test_always_and_never_mean_it(policy: str, is_better: bool, active_version: int) -> None:
    decision = decide(
        ActivatePolicy(policy), is_better=is_better, compared_with=1, active_version=active_version
    )
    assert decision.activate is (policy == "always")
    assert "as asked" in decision.why


@pytest.mark.parametrize(("is_better", "active_version", "activates"), [(True, 1, True), (False, 1, False)])
def test_if_better_reads_the_report(is_better: bool, active_version: int, activates: bool) -> None:
    decision = decide(
        ActivatePolicy.IF_BETTER, is_better=is_better, compared_with=1, active_version=active_version
    )
    assert decision.activate is activates
    assert "on unseen folds" in decision.why


def test_if_better_does_not_trust_a_comparison_with_something_else() -> None:
    decision = decide(ActivatePolicy.IF_BETTER, is_better=True, compared_with=1, active_version=2)
    assert not decision.activate
    assert "compared with version 1, but version 2 was activated meanwhile" in decision.why
