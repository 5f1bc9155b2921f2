"""`polynomial`: products of log probabilities, which the answers of a naive Bayes model need."""

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from boxcal.calibrators.data import ValidationSet, check_validation_set
from boxcal.calibrators.errors import InvalidDataError
from boxcal.calibrators.fitting import selection
from boxcal.calibrators.fitting.api import fit
from boxcal.calibrators.fitting.selection import candidates
from boxcal.calibrators.maps.linear import PolynomialScaling
from tests.calibrators.samples import drawn, mean_nll

CORRELATIONS = (0.0, 0.9, -0.9)
"""Of the two inputs, in each class. Each has the variance 1, so naive Bayes sees no difference."""


def naive(count: int, seed: int) -> tuple[NDArray[Any], NDArray[Any], float]:
    """Give logits of naive Bayes, labels, and the NLL of the true probabilities of the classes."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(3, size=count)
    means = np.array([[0.0, 0.0], [0.5, 0.0], [0.0, 0.5]])
    shapes = np.array([[[1.0, r], [r, 1.0]] for r in CORRELATIONS])
    noise = np.einsum("nij,nj->ni", np.linalg.cholesky(shapes)[labels], rng.normal(size=(count, 2)))
    inputs = means[labels] + noise
    away = inputs[:, None] - means
    logits = -0.5 * (away**2).sum(axis=2)
    exact = -0.5 * np.einsum("nki,kij,nkj->nk", away, np.linalg.inv(shapes), away)
    exact -= 0.5 * np.log(np.linalg.det(shapes))
    return logits, labels, mean_nll(exact, labels)


@pytest.fixture(scope="module")
def data() -> ValidationSet:
    return check_validation_set(*naive(2000, 0)[:2])


def test_the_true_probabilities_of_a_naive_bayes_model_are_found() -> None:
    logits, labels, lowest = naive(40_000, 1)
    loss = {
        name: float(-np.log(fit(name, *naive(4000, 0)[:2]).on_arrays(logits)[range(40_000), labels]).mean())
        for name in ("sms", "polynomial", "auto")
    }
    assert loss["sms"] > lowest + 0.2
    assert loss["polynomial"] < lowest + 0.01
    assert loss["auto"] < lowest + 0.01


def test_polynomial_replaces_dirichlet_in_auto_unless_the_data_are_too_large(
    data: ValidationSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    for given, offered in ((data, "mix+polynomial"), (data.rows(np.arange(2000) < 199), "dirichlet")):
        assert {"dirichlet", "mix+polynomial"}.intersection(candidates(given)) == {offered}
    monkeypatch.setattr(selection, "MOST_ENTRIES", 9 * 2000)
    assert "mix+polynomial" in candidates(data)
    monkeypatch.setattr(selection, "MOST_ENTRIES", 9 * 2000 - 1)
    assert "mix+polynomial" not in candidates(data)


def test_where_the_first_fold_says_it_is_worse_the_other_folds_are_not_fitted() -> None:
    rows = {row["method"]: row for row in fit("auto", *drawn(500, 10)).choice["candidates"]}
    assert rows["mix+polynomial"]["status"] == "worse on the first fold"
    assert rows["mix+polynomial"]["nll"] is None
    assert rows["mix+polynomial"]["seconds"] > 0.0


def test_beyond_four_standard_deviations_only_the_linear_part_goes_on(data: ValidationSet) -> None:
    one: Any = PolynomialScaling(3)
    one.prepare(data)
    rng = np.random.default_rng(0)
    one.parameters["weight"] = rng.normal(size=(3, 9))
    far = np.array([[0.0, -400.0, -500.0], [0.0, -800.0, -900.0]])
    x = far / one.parameters["temperature"]
    change = one(far)[1] - one(far)[0]
    np.testing.assert_allclose(change, one.parameters["weight"][:, :3] @ (x[1] - x[0]), rtol=1e-9)


def test_it_takes_forty_classes() -> None:
    assert PolynomialScaling(40).parameters["weight"].shape == (40, 860)
    logits, labels = drawn(100, 41)
    with pytest.raises(InvalidDataError, match=r"'polynomial' .* takes at most 40, not 41"):
        fit("polynomial", logits, labels)
    assert "mix+polynomial" not in candidates(check_validation_set(logits, labels))
