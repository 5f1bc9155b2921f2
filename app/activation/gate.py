"""The gate between a finished fit and its activation: whether the new calibrator is activated, and why."""

from __future__ import annotations

from boxcal.app.registry.records import ActivatePolicy, Decision


def decide(policy: ActivatePolicy, *, is_better: bool, compared_with: int, active_version: int) -> Decision:
    """Apply the upload's `activate` field.

    Parameters
    ----------
    is_better
        The report's verdict: on folds the fit never saw, its NLL is significantly lower than that of version
        `compared_with`, by a paired bootstrap.
    compared_with
        The version that was active when the fit began, which the report compares with.
    active_version
        The version active now.
    """
    if policy is ActivatePolicy.ALWAYS:
        return Decision(True, "Activated, as asked.")
    if policy is ActivatePolicy.NEVER:
        return Decision(False, "Not activated, as asked.")
    if active_version != compared_with:
        return Decision(
            False,
            f"Not activated: the fit was compared with version {compared_with}, but version {active_version} "
            "was activated meanwhile. Activate it yourself, or fit again.",
        )
    if is_better:
        return Decision(
            True,
            f"Activated: on unseen folds its NLL is significantly lower than version {active_version}'s.",
        )
    return Decision(
        False,
        f"Not activated: on unseen folds its NLL is not significantly lower than version {active_version}'s.",
    )
