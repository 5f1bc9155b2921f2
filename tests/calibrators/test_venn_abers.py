import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from sklearn.isotonic import IsotonicRegression

from boxcal.calibrators import fit
from boxcal.calibrators.maps.isotonic_loop import isotonic_with_one_more

Floats = NDArray[np.float64]


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("label", [0.0, 1.0])
def test_one_more_sample_joins_as_in_a_fit_from_scratch(seed: int, label: float) -> None:
    rng = np.random.default_rng(seed)
    size = int(rng.integers(1, 40))
    counts = rng.integers(1, 4, size)
    sums = rng.binomial(counts, np.linspace(0.1, 0.9, size))
    answers = isotonic_with_one_more(counts.astype(float), sums.astype(float), label)
    assert len(answers) == 2 * size + 1
    for index, answer in enumerate(answers):
        score = (index - 1) / 2
        scores = np.append(np.arange(size), score)
        fitted = IsotonicRegression().fit(
            scores, np.append(sums / counts, label), sample_weight=np.append(counts, 1)
        )
        assert answer == pytest.approx(fitted.predict([score])[0], abs=1e-12)


def by_definition(seen: Floats, hits: Floats, new: float) -> float:
    """Refit with the new sample twice, once for each label (Vovk, Petej and Fedorova 2015)."""
    values = []
    for label in (0.0, 1.0):
        fitted = IsotonicRegression().fit(np.append(seen, new), np.append(hits, label))
        values.append(float(fitted.predict([new])[0]))
    return values[1] / (1.0 - values[0] + values[1])


@pytest.mark.parametrize("levels", [4, 64])
def test_tied_probabilities_are_one_value(levels: int) -> None:
    generator = torch.Generator().manual_seed(levels)
    p = torch.randint(0, levels, (150, 1), generator=generator) / (levels - 1.0)
    probabilities = torch.cat([p, 1.0 - p], dim=1).double().clamp(1e-12, 1.0 - 1e-12)
    labels = (torch.rand(150, generator=generator) > 0.2 + 0.6 * p[:, 0]).long()
    logits = probabilities.log()
    found = fit("venn-abers", logits, labels).calibrator(logits).numpy()
    seen = logits.softmax(1).numpy()
    floor = 1.0 / seen.size
    expected = np.array(
        [[by_definition(seen[:, k], (labels.numpy() == k) * 1.0, row[k]) for k in range(2)] for row in seen]
    ).clip(floor, 1.0)
    np.testing.assert_allclose(found, expected / expected.sum(1, keepdims=True), atol=1e-9)
