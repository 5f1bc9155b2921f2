"""The gate between a finished fit and its activation: whether the new calibrator is put in force, and why."""

from __future__ import annotations

from app.registry.records import ActivatePolicy, Decision


def decide(policy: ActivatePolicy, *, is_better: bool, compared_with: int, in_force: int) -> Decision:
    """Apply the upload's `activate` field.

    Parameters
    ----------
    is_better
        The report's verdict: on folds the fit never saw, its NLL is significantly lower than that of version
        `compared_with`, by a paired bootstrap.
    compared_with
        The version that was in force when the fit began, which the report compares with.
    in_force
        The version in force now.
    """
    if policy is ActivatePolicy.ALWAYS:
        return Decision(True, "Activated, as asked.")
    if policy is ActivatePolicy.NEVER:
        return Decision(False, "Not activated, as asked.")
    if in_force != compared_with:
        return Decision(
            False,
            f"Not activated: the fit was compared with version {compared_with}, but version {in_force} was "
            "put in force meanwhile. Activate it by hand, or fit again.",
        )
    if is_better:
        return Decision(
            True, f"Activated: on unseen folds its NLL is significantly lower than version {in_force}'s."
        )
    return Decision(
        False, f"Not activated: on unseen folds its NLL is not significantly lower than version {in_force}'s."
    )
