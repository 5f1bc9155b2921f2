"""Expects problems of one type."""

from __future__ import annotations

import pytest

from boxcal.app.http.problems import BoxcalError, ProblemType


def raises_problem(kind: ProblemType, match: str | None = None) -> pytest.RaisesExc[BoxcalError]:
    """Expect a problem of this type whose detail matches, as `pytest.raises` does."""
    return pytest.raises(BoxcalError, match=match, check=lambda error: error.kind is kind)
