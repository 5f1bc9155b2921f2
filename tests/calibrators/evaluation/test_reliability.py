"""Reliability data and the images drawn from it."""

import io
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from PIL import Image

from boxcal.calibrators.evaluation.outcomes import outcomes
from boxcal.calibrators.evaluation.reliability import (
    class_reliability,
    reliability_data,
    reliability_images,
    reliability_svg,
)
from boxcal.calibrators.evaluation.report import cross_fitted_report
from tests.calibrators.evaluation.simulation import WORLDS, sample
from tests.calibrators.evaluation.test_report import overconfident


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    return cross_fitted_report("pb", *overconfident(400), folds=2).to_dict()


def test_bins_hold_every_sample_and_their_means_and_a_single_one_too() -> None:
    scored, _ = sample(WORLDS["overconfident"], 800, np.random.default_rng(0))
    data = reliability_data(scored.confidence, scored.correct)
    assert sum(part["count"] for part in data["bins"]) == sum(data["histogram"]["counts"]) == 800
    total = sum(part["count"] * part["accuracy"] for part in data["bins"])
    assert total / 800 == pytest.approx(data["accuracy"])
    for part in data["bins"]:
        assert part["low"] < part["confidence"] <= part["high"]
        assert part["accuracy_low"] <= part["accuracy"] <= part["accuracy_high"]
    single = reliability_data(np.array([0.7]), np.array([1.0]))
    assert single["bins"][0]["count"] == 1
    assert single["curve"]["confidence"] == []


def test_the_curve_stays_in_its_band_where_the_model_is_calibrated_and_only_there() -> None:
    inside = []
    for seed in range(20):
        scored, _ = sample(WORLDS["calibrated"], 1000, np.random.default_rng(seed))
        curve = reliability_data(scored.confidence, scored.correct, seed=seed)["curve"]
        low, high = np.array(curve["band_low"]), np.array(curve["band_high"])
        inside.append(np.mean((low <= curve["accuracy"]) & (curve["accuracy"] <= high)))
    assert 0.9 < np.mean(inside) < 0.99
    scored, _ = sample(WORLDS["overconfident"], 2000, np.random.default_rng(0))
    curve = reliability_data(scored.confidence, scored.correct)["curve"]
    below = np.array(curve["accuracy"]) < curve["band_low"]
    assert below.mean() > 0.6
    assert curve["confidence"][-1] <= scored.confidence.max() + 0.005


def test_the_worst_classes_are_shown() -> None:
    rng = np.random.default_rng(0)
    probabilities = rng.dirichlet(np.ones(30), size=500)
    labels = (probabilities.cumsum(axis=1) < rng.random((500, 1))).sum(axis=1)
    labels[labels == 17] = 3  # class 17 is predicted and never true
    scored = outcomes(probabilities, np.minimum(labels, 29))
    shown = class_reliability(scored, scored)
    assert len(shown) == 12
    assert {3, 17} <= {panel["class"] for panel in shown}
    assert next(panel for panel in shown if panel["class"] == 17)["positives"] == 0


def test_images_are_those_of_the_report_also_where_threads_draw_at_once(document: dict[str, Any]) -> None:
    svg, png = reliability_images(document)
    assert ElementTree.fromstring(svg).tag.endswith("svg")  # noqa: S314 - our own
    assert reliability_svg(json.loads(json.dumps(document))) == svg
    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(reliability_svg, [document] * 4)) == [svg] * 4
    with Image.open(io.BytesIO(png)) as image:
        assert min(image.size) > 500
        colours = image.convert("RGB").getcolors(2**24)
    assert colours is not None
    assert len(colours) > 50


def test_every_class_of_a_small_problem_and_an_infinite_loss_can_be_drawn(document: dict[str, Any]) -> None:
    assert [panel["class"] for panel in document["reliability"]["classes"]] == list(range(5))
    assert sum(panel["positives"] for panel in document["reliability"]["classes"]) == 400
    changed = json.loads(json.dumps(document))
    for part in ("value", "low", "high"):
        changed["metrics"]["nll"]["before"][part] = None
    assert reliability_svg(changed).startswith(b"<?xml")


def test_matplotlib_and_scipy_wait_until_they_are_needed() -> None:
    code = (
        "import sys, boxcal.calibrators.evaluation.report, boxcal.calibrators.evaluation.reliability;"
        "assert not {'matplotlib', 'scipy', 'sklearn'} & set(sys.modules), sorted(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[3])
