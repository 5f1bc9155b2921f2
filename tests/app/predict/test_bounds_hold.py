"""What a client reads obeys its bounds to the last bit: the JSON numbers of the pipeline's answers."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from boxcal.app.http.problems import InvalidBounds
from boxcal.app.predict import options as request_options
from boxcal.app.predict.answers import CalibratedAnswer, CalibrationRequest, Rows, calibrate, calibrate_batch
from boxcal.app.predict.options import Labels
from boxcal.app.registry.activator import ServedCalibrator
from boxcal.calibrators.array_calibrator import ArrayCalibrator
from boxcal.calibrators.calibrator import Calibrator
from boxcal.calibrators.maps.constant_box import ConstantBounds
from boxcal.calibrators.maps.identity import IdentityMap
from tests.app.raising import raises_problem

SIZES = st.one_of(st.integers(2, 12), st.sampled_from([100, 257, 1000]))


def served(num_classes: int, fitted: tuple[float, float]) -> ServedCalibrator:
    box = ConstantBounds.of(num_classes, *fitted)
    calibrator = Calibrator("pb", IdentityMap(num_classes), box, num_classes)
    return ServedCalibrator(1, "pb", ArrayCalibrator.from_bytes(calibrator.to_bytes()))


def answer(logits: np.ndarray[Any, Any], sent: dict[str, Any], fitted: tuple[float, float]) -> dict[str, Any]:
    """Answer as `/calibrate` does: through JSON on both sides."""
    num_classes = logits.shape[1]
    labels = Labels([f"class {k}" for k in range(num_classes)])
    document = orjson.loads(orjson.dumps(sent))
    options = request_options.from_json({"bounds": document, "probabilities": True, "top_k": 3})
    wanted = CalibrationRequest(
        served(num_classes, fitted), request_options.check_bounds(options.bounds, labels)
    )
    rows = calibrate(logits, wanted)
    answer = CalibratedAnswer("any", labels.names, wanted.served, rows, options, {})
    document = orjson.loads(b"".join(answer.to_json()))
    assert isinstance(document, dict)
    return document


def vectors(sent: dict[str, Any], num_classes: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Bring bounds as sent to vectors, in another way than the service does."""
    sides = []
    for side, default in (("lower", 0.0), ("upper", 1.0)):
        value = sent.get(side, default)
        if isinstance(value, dict):
            value = [value.get(f"class {k}", default) for k in range(num_classes)]
        sides.append(np.broadcast_to(np.array(value, dtype=np.float64), (num_classes,)))
    return sides[0], sides[1]


@st.composite
def logits_of(draw: st.DrawFn, num_classes: int) -> np.ndarray[Any, Any]:
    """Two rows: hand-picked extremes for the first classes, and a seeded spread for the others."""
    scale = draw(st.sampled_from([0.0, 1.0, 30.0, 1e4]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    logits = np.clip(rng.normal(size=(2, num_classes)) * scale, -1e4, 1e4)
    head = draw(st.lists(st.floats(-1e4, 1e4), min_size=1, max_size=min(num_classes, 8)))
    logits[0, : len(head)] = head
    return logits


@st.composite
def bounds_of(draw: st.DrawFn, num_classes: int) -> dict[str, Any]:
    """Feasible bounds in one of their three forms, some of them feasible by a hair."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    form = draw(st.sampled_from(["number", "hair", "labels", "array", "array of a hair", "pinned"]))
    lower_share, upper_share = draw(st.floats(0, 1)), draw(st.floats(0, 1))
    if form == "number":
        return {
            "lower": lower_share / num_classes,
            "upper": 1 / num_classes + upper_share * (1 - 1 / num_classes),
        }
    if form == "hair":
        return {"upper": 1 / num_classes} if draw(st.booleans()) else {"lower": 1 / num_classes}
    inside = rng.dirichlet(np.full(num_classes, 0.5))
    if form == "pinned":
        return {"lower": inside.tolist(), "upper": inside.tolist()}
    lower = inside * lower_share
    upper = inside + (1 - inside) * upper_share
    if form == "array of a hair":
        return {"upper": inside.tolist()} if draw(st.booleans()) else {"lower": inside.tolist()}
    if form == "array":
        return {"lower": lower.tolist(), "upper": upper.tolist()}
    chosen = rng.choice(num_classes, size=min(3, num_classes), replace=False)
    return {
        "lower": {f"class {k}": float(lower[k]) for k in chosen},
        "upper": {f"class {chosen[0]}": float(upper[chosen[0]])},
    }


@settings(max_examples=150)
@given(st.data())
def test_every_answer_obeys_its_bounds_and_sums_to_one(data: st.DataObject) -> None:
    num_classes = data.draw(SIZES)
    logits = data.draw(logits_of(num_classes))
    sent = data.draw(bounds_of(num_classes))
    fitted = data.draw(
        st.sampled_from([(0.0, 1.0), (0.3 / num_classes, 0.9), (0.9 / num_classes, 1 / num_classes)])
    )
    document = answer(logits, sent, fitted)
    lower, upper = vectors(sent, num_classes)
    for row, prediction in zip(logits, document["predictions"], strict=True):
        probabilities = np.array(prediction["probabilities"])
        assert (lower <= probabilities).all()
        assert (probabilities <= upper).all()
        assert abs(math.fsum(probabilities) - 1) <= 1e-6
        assert prediction["probability"] == probabilities.max()
        tied = np.flatnonzero(probabilities == probabilities.max())
        assert row[prediction["index"]] == row[tied].max()
        for entry in prediction["top"]:
            assert entry["probability"] == probabilities[entry["index"]]


def test_requests_of_one_batch_keep_their_calibrators_and_bounds() -> None:
    scores = 3 * np.random.default_rng(0).normal(size=(6, 3)).astype(np.float32)
    loose, tight = served(3, (0.0, 0.9)), served(3, (0.0, 0.6))
    box = request_options.RequestBounds(np.zeros(3), np.full(3, 0.4))
    wanted = [CalibrationRequest(*one) for one in ((loose, None), (loose, box), (tight, None))]
    parts: list[Any] = [
        SimpleNamespace(context=one, start=2 * n, stop=2 * n + 2) for n, one in enumerate(wanted)
    ]
    for part, rows in zip(parts, calibrate_batch(scores, parts), strict=True):
        assert isinstance(rows, Rows)
        alone = calibrate(scores[part.start : part.stop].astype(np.float64), part.context)
        np.testing.assert_allclose(rows.probabilities, alone.probabilities, rtol=0, atol=1e-12)


def test_float32_bounds_are_not_mistaken_for_their_float64_neighbours() -> None:
    document = answer(np.array([[5.0, 0.0, 0.0]]), {"upper": 0.4, "lower": 0.1}, (0.0, 1.0))
    assert document["predictions"][0]["probabilities"][0] == 0.4
    assert document["predictions"][0]["top"][0]["bound"] == "upper"


def test_ties_go_to_the_larger_logit() -> None:
    document = answer(np.array([[1.0, 3.0, 2.0, 0.0]]), {"upper": 0.3}, (0.0, 1.0))
    assert [entry["index"] for entry in document["predictions"][0]["top"]] == [1, 2, 0]
    assert [entry["bound"] for entry in document["predictions"][0]["top"]] == ["upper", "upper", None]


def test_fitted_bounds_yield_and_say_so() -> None:
    fitted = (0.0, 0.5)
    assert answer(np.array([[9.0, 0.0, 0.0]]), {"lower": {"class 0": 0.8}}, fitted)["bounds_relaxed"] is False
    tight = answer(np.array([[9.0, 0.0, 0.0]]), {"upper": {"class 1": 0.1, "class 2": 0.1}}, fitted)
    assert tight["bounds_relaxed"] is True
    assert tight["predictions"][0]["probability"] == pytest.approx(0.8)


@pytest.mark.parametrize(
    ("sent", "words"),
    [
        ({"lower": 0.5, "upper": 0.2}, "lower bound 0.5 of class 'class 0' is above its upper bound 0.2"),
        ({"lower": 0.4}, "lower bounds of the 3 classes add up to 1.2000000000000002, above 1"),
        ({"upper": 0.3}, "upper bounds of the 3 classes add up to 0.8999999999999999, below 1"),
        ({"upper": {"clas 1": 0.3}}, "'clas 1', a class the model does not have; did you mean 'class 1'?"),
        ({"upper": [0.5, 0.5]}, "bounds.upper has 2 numbers, but the model has 3 classes"),
        ({"lower": -0.1}, "bounds.lower is -0.1; a bound is a probability in [0, 1]"),
        ({"upper": {"class 2": 1.5}}, "bounds.upper of class 'class 2' is 1.5"),
        ({"upper": "half"}, "bounds.upper is 'half'; a bound is a number"),
        ({"lower": [0, None, 0]}, "bounds.lower of class 'class 1' is None"),
        ({"lower": True}, "bounds.lower is True; a bound is a number"),
        ({"upper": True}, "bounds.upper is True; a bound is a number"),
        ({"lower": float("nan")}, "bounds.lower is nan"),
        ({"lower": 10**400}, "a bound is a probability"),
    ],
)
def test_bounds_that_cannot_be_met_are_refused_by_name(sent: dict[str, Any], words: str) -> None:
    options = request_options.from_json({"bounds": sent})
    with raises_problem(InvalidBounds) as refused:
        request_options.check_bounds(options.bounds, Labels(["class 0", "class 1", "class 2"]))
    assert words in refused.value.detail


def test_bounds_name_classes_in_composed_and_decomposed_unicode() -> None:
    labels = Labels(["caf\xe9", "bar"])
    bounds = request_options.from_json({"bounds": {"upper": {"cafe\u0301": 0.25}}}).bounds
    checked = request_options.check_bounds(bounds, labels)
    assert checked is not None
    assert checked.upper.tolist() == [0.25, 1.0]
    twice = request_options.from_json({"bounds": {"upper": {"caf\xe9": 0.5, "cafe\u0301": 0.25}}}).bounds
    with raises_problem(InvalidBounds) as refused:
        request_options.check_bounds(twice, labels)
    assert refused.value.detail == "bounds.upper names the class 'caf\xe9' twice, in two spellings."


@pytest.mark.parametrize(
    ("name", "meant"), [("taxi cat", "taxi cab"), ("axi cab", "taxi cab"), ("xyz", None), ("", None)]
)
@pytest.mark.parametrize("others", [0, 1000])
def test_a_misspelt_class_gets_a_suggestion_wherever_the_mistake_is(
    name: str, meant: str | None, others: int
) -> None:
    labels = Labels(["taxi cab", *(f"{number:05}" for number in range(others))])
    assert labels.hint(name) == (f"; did you mean {meant!r}?" if meant else "")


@pytest.mark.parametrize(
    "sent", [{"lower": [math.nextafter(0.5, 1)] * 2}, {"upper": [math.nextafter(0.5, 0)] * 2}]
)
def test_bounds_whose_sum_misses_1_by_an_ulp_are_taken(sent: Any) -> None:
    bounds = request_options.from_json({"bounds": sent}).bounds
    assert request_options.check_bounds(bounds, Labels(["a", "b"])) is not None


@pytest.mark.parametrize("sent", [None, {}, {"lower": 0}, {"lower": 0.0, "upper": 1}])
def test_bounds_that_bound_nothing_cost_nothing(sent: Any) -> None:
    bounds = request_options.from_json({"bounds": sent}).bounds
    assert request_options.check_bounds(bounds, Labels(["a", "b"])) is None
