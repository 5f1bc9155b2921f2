"""How often the search looks at a row, on rows where Newton's own steps creep from bound to bound."""

import pytest

from benchmarks.operator import passes, problems


@pytest.mark.parametrize(("box", "most"), [("vector", 4.0), ("tight", 6.5), ("half", 2.5), ("nowhere", 0.0)])
def test_passes_over_rows_of_a_thousand_classes(box: str, most: float) -> None:
    """Without the logistic steps, 3.5 and 12 passes for the first two."""
    logits, lower, upper = problems(64, 1000)[box]
    assert passes(logits, lower, upper) <= most
