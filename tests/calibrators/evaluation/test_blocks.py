"""Reports on sets that take several blocks of rows: the numbers of the code that held all rows at once.

The expected numbers were first computed by 70ed12c, which kept float64 arrays of all logits and
probabilities. Since then the temperature ends at a slope of 1e-16, where it was 4e-8: this moved them by at
most 1.2e-7, and one p-value by four draws.
"""

import tracemalloc

import numpy as np
import pytest

from boxcal.calibrators import fit
from boxcal.calibrators.data import check_validation_set
from boxcal.calibrators.evaluation.classwise import ClassCells
from boxcal.calibrators.evaluation.crossfit import answers_on
from boxcal.calibrators.evaluation.evaluate import perfect_metrics
from boxcal.calibrators.evaluation.outcomes import kept_rows, outcomes
from boxcal.calibrators.evaluation.report import report_on
from tests.calibrators.samples import sharpened

ROWS, CLASSES = 6000, 50
EXPECTED = {
    "error_rate": (0.7711666666666667, 0.7603658114142131, 0.7816205188909124, 0.3690773067331671, 0.0),
    "nll": (
        3.9866118862162656,
        2.9189603975998253,
        2.9847881790691275,
        0.9576059850374065,
        -1.0362467442270817,
    ),
    "brier": (
        1.0614107439944251,
        0.8903559117113883,
        0.9011290124659531,
        0.6533665835411472,
        -0.1660079213529132,
    ),
    "ece_width": (0.35599656820724573, 0.0, 0.022035889617555475, 0.3386613386613387, -0.34337548026433695),
    "ece_mass": (0.35599656820724573, 0.0, 0.02856337480313787, 0.15784215784215785, -0.3373957535135957),
    "smooth_ece": (0.35624232530206557, 0.0, 0.025053875460188463, 0.026973026973026972, -0.3393387011475618),
    "debiased_ece": (0.3788114364039871, 0.0, 0.033857143352069984, 0.16583416583416583, -0.3675078963751552),
    "ks": (0.3559978895359686, 0.0, 0.010124789448184315, 0.5984015984015985, -0.35072112347635087),
    "classwise_ece": (
        0.018305344551337286,
        0.0,
        0.0040478319614764505,
        0.012468827930174564,
        -0.01472010647962436,
    ),
    "brier_calibration": (
        0.1762740127915106,
        0.0,
        0.01885994722402386,
        0.07481296758104738,
        -0.16066747422043978,
    ),
    "brier_refinement": (
        0.8851367312029146,
        0.873559605995201,
        0.9026467315175113,
        0.38902743142144636,
        -0.0053404471324733915,
    ),
    "mce": (0.5293240976881606, 0.0, 0.8753767366435224, 0.6183816183816184, -0.3576453907337132),
}


def drawn() -> tuple[np.ndarray, np.ndarray]:
    logits, labels = sharpened(ROWS, CLASSES, 2.5)
    return logits.astype(np.float32), labels


def test_a_report_in_blocks_has_the_numbers_of_one_over_all_rows() -> None:
    """To 1e-12; a p-value counts draws, of which none changes its rank."""
    data = check_validation_set(*drawn())
    found: list[tuple[float, str]] = []
    report = report_on("ts", data, progress=lambda fraction, stage: found.append((fraction, stage)))
    document = report.to_dict()
    for name, (before, low, high, p_value, difference) in EXPECTED.items():
        metric = document["metrics"][name]
        ours = (metric["before"]["value"], metric["after"]["low"], metric["after"]["high"])
        assert ours == pytest.approx((before, low, high), rel=1e-12, abs=1e-12), name
        assert metric["after"]["p_value"] == p_value, name
        assert metric["difference"]["value"] == pytest.approx(difference, rel=1e-12, abs=1e-12), name
    assert data.logits.dtype == np.float32
    assert "scores" not in vars(data)  # nothing has asked for a float64 copy
    fractions = [fraction for fraction, _ in found]
    assert fractions == sorted(fractions)
    assert len(found) > 100


def test_the_answers_of_one_temperature_are_not_kept() -> None:
    data = check_validation_set(*(np.concatenate([part] * 10) for part in drawn()))
    calibrator = fit("ts", data.logits[:ROWS], data.labels[:ROWS]).calibrator
    tracemalloc.start()
    answers = answers_on(calibrator, data)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert answers.rows.shape == (10 * ROWS, CLASSES)
    assert most < 4 * 10 * ROWS * CLASSES  # half of the float64 array


def test_answers_of_folds_are_those_of_their_calibrators() -> None:
    logits, labels = drawn()
    data = check_validation_set(logits[:900], labels[:900])
    for method in ("ts", "vector"):
        report = report_on(method, data)
        rows = report.answers.rows
        np.testing.assert_array_equal(rows.at(slice(100, 120)), rows.at(np.arange(100, 120)))
        np.testing.assert_array_equal(report.answers.probabilities[5:7], rows.at(slice(5, 7)))


def test_float32_logits_are_fitted_as_their_float64_copies() -> None:
    logits, labels = drawn()
    narrow, wide = (fit("ts", logits.astype(dtype), labels) for dtype in (np.float32, np.float64))
    assert narrow.calibrator.to_bytes() == wide.calibrator.to_bytes()
    assert narrow.nll == wide.nll


def test_many_classes_take_no_more_memory_than_their_samples_fill() -> None:
    """Hits of 400 draws by 15 cells a class took 48 KB a class: 1.2 GB of 20 samples of 20,000 classes."""
    random = np.random.default_rng(0)
    probabilities = random.dirichlet(np.ones(20_000), 20)
    labels = random.integers(20_000, size=20)
    scored = outcomes(kept_rows(probabilities), labels, probabilities.argmax(1))
    cells = ClassCells(scored)
    perfect_metrics(scored, cells, draws=2)
    tracemalloc.start()
    found = perfect_metrics(scored, cells)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 200e6
    # Of labels drawn from the rows themselves: 2 (1 - sum p^2) / 20,000 on average, as cells hold one sample
    expected = (1 - (probabilities**2).sum(1)).mean()
    assert 20_000 * found["classwise_ece"].mean() == pytest.approx(2 * expected, rel=1e-2)
