import numpy as np
import pytest
from sklearn.isotonic import IsotonicRegression

from boxcal.calibrators.fitting.kernels import isotonic_with_one_more


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("label", [0.0, 1.0])
def test_one_more_sample_joins_as_in_a_fit_from_scratch(seed: int, label: float) -> None:
    rng = np.random.default_rng(seed)
    size = int(rng.integers(1, 40))
    counts = rng.integers(1, 4, size)
    sums = rng.binomial(counts, np.linspace(0.1, 0.9, size))
    answers = isotonic_with_one_more(counts.astype(float), sums.astype(float), label)
    for gap in range(size + 1):
        places = np.append(np.arange(size), gap - 0.5)
        fitted = IsotonicRegression().fit(
            places, np.append(sums / counts, label), sample_weight=np.append(counts, 1)
        )
        assert answers[gap] == pytest.approx(fitted.predict([gap - 0.5])[0], abs=1e-12)
