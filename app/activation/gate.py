"""The gate between a finished fit and its activation: whether the new calibrator is activated, and why."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from boxcal.app.registry.records import ActivatePolicy, Decision


def decide(
    policy: ActivatePolicy,
    *,
    is_better: bool,
    reason: str,
    warnings: Sequence[dict[str, Any]],
    compared_with: int,
    active_version: int,
) -> Decision:
    """Apply the upload's `activate` field.

    Parameters
    ----------
    is_better, reason
        The report's verdict on folds that the fit never saw, against version `compared_with`, and why.
    warnings
        Those of the report; a serious one means that the data may not show what the service will meet.
    compared_with
        The version that was active when the fit began, which the report compares with.
    active_version
        The version active now.
    """
    serious = "; ".join(warning["message"] for warning in warnings if warning["severity"] == "serious")
    if policy is ActivatePolicy.ALWAYS:
        return Decision(
            True, f"Activated, as asked{f', despite a serious warning: {serious}' * bool(serious)}."
        )
    if policy is ActivatePolicy.NEVER:
        return Decision(False, "Not activated, as asked.")
    if active_version != compared_with:
        return Decision(
            False,
            f"Not activated: the fit was compared with version {compared_with}, but version {active_version} "
            "was activated meanwhile. Activate it yourself, or fit again.",
        )
    if serious:
        return Decision(False, f"Not activated: {serious}. Correct the data, or activate it yourself.")
    verdict = f"compared with version {compared_with}, {reason}."
    return Decision(is_better, f"{'Activated' if is_better else 'Not activated'}: {verdict}")
