"""The report as a web page: complete, escaped, and without anything that a browser would have to fetch."""

import json
import re
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

import numpy as np
import pytest
from matplotlib import pyplot as plt
from matplotlib.collections import PathCollection
from matplotlib.figure import Figure

from boxcal import BoxCalibratedClassifier, BoxCalibrator
from boxcal.calibrators.checks import DataWarning
from boxcal.calibrators.data import check_validation_set
from boxcal.calibrators.evaluation.comparison import compare_methods
from boxcal.calibrators.evaluation.html_report import fit_fragment, html_report
from boxcal.calibrators.evaluation.reliability import reliability_svg
from boxcal.calibrators.evaluation.report import Report, cross_fitted_report
from tests.calibrators.evaluation.test_report import METRICS, overconfident

HOSTILE = "<script>alert('&')</script>\""


class Tags(HTMLParser):
    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.open: list[str] = []
        self.feed(page)
        self.close()
        assert not self.open, self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        if tag not in {"meta", "img", "input", "br"}:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.fixture(scope="module")
def report() -> Report:
    return cross_fitted_report("pb", *overconfident(300), folds=2)


@pytest.fixture(scope="module")
def document(report: Report) -> dict[str, Any]:
    return report.to_dict()


def test_the_page_tells_verdict_metrics_and_changes(document: dict[str, Any]) -> None:
    page = Tags(html_report(document, reliability_svg(document), title="Calibrator 3", decision="activated"))
    assert "Calibrator 3" in page.text
    assert document["against"]["reason"].replace("`", "") in page.text
    lead = "Use it: NLL falls by 0.612 (0.414 to 0.842)."
    assert page.text.index(lead) < page.text.index("Method pb. 300 samples")
    assert "active calibrator" not in page.text  # it is compared with the logits as they are
    assert "activated" in page.text
    rows = [attributes for tag, attributes in page.found if tag == "tr"]
    assert len(rows) == 1 + len(METRICS)
    value = document["metrics"]["nll"]["difference"]["value"]
    assert f"{value:+.4f}" in page.text
    assert f"changed: {document['changed_labels']}" in page.text
    assert "upper bound" in page.text
    assert_nothing_is_loaded(page)
    assert not any("href" in attributes for _, attributes in page.found)
    assert not re.search(r"url\(|@import|http", page.text)


def assert_nothing_is_loaded(page: Tags) -> None:
    assert {"script", "link", "iframe", "object", "form"}.isdisjoint(tag for tag, _ in page.found)
    (source,) = [attributes["src"] for tag, attributes in page.found if tag == "img"]
    assert source is not None
    assert source.startswith("data:image/svg+xml;base64,")


def test_what_auto_found_is_shown_and_an_infinite_loss_has_a_place(document: dict[str, Any]) -> None:
    candidates = [{"method": "ts", "nll": 0.5123456789, "parameters": 1}, {"method": "pb", "nll": None}]
    choice = {"chosen": "ts", "why": "ts has the lowest NLL", "candidates": candidates}
    text = Tags(html_report({**document, "fit": {"choice": choice}}, b"<svg/>")).text
    assert "ts has the lowest NLL" in text
    assert "0.512346" in text
    assert "Method auto, which chose ts. 300 samples" in text
    changed = json.loads(json.dumps(document))
    for side in ("before", "difference"):
        changed["metrics"]["nll"][side] |= {"value": None, "low": None, "high": None}
    shown = Tags(html_report(changed, b"<svg/>")).text
    assert "infinite" in shown.replace("no longer infinite", "")
    assert "no longer infinite" in shown


def test_what_is_seriously_wrong_with_the_data_comes_first(document: dict[str, Any]) -> None:
    found = [
        {"code": "a", "severity": "warning", "message": "few samples"},
        {"code": "b", "severity": "serious", "message": "labels are shifted"},
    ]
    text = Tags(html_report({**document, "warnings": found}, b"<svg/>")).text
    places = [text.index(one) for one in ("labels are shifted", "Correct the data first: NLL", "few samples")]
    assert places == sorted(places)


def test_all_text_is_escaped(document: dict[str, Any]) -> None:
    hostile = json.loads(json.dumps(document))
    candidates = [{HOSTILE: HOSTILE, "method": HOSTILE}]
    choice = {"chosen": HOSTILE, "why": HOSTILE, "candidates": candidates}
    hostile |= {"method": HOSTILE, "fit": {"choice": choice}}
    hostile["against"]["reason"] = HOSTILE
    hostile["metrics"][HOSTILE] = hostile["metrics"]["nll"]
    hostile["bounds"] = {HOSTILE: hostile["bounds"]["upper"]}
    hostile["warnings"] = [{"code": HOSTILE, "severity": HOSTILE, "message": HOSTILE, "rows": [1]}]
    text = html_report(hostile, HOSTILE.encode(), title=HOSTILE, decision=HOSTILE)
    page = Tags(text)
    assert "script" not in {tag for tag, _ in page.found}
    assert "<script" not in text
    assert page.text.count("alert('&')") >= 10


def test_a_notebook_shows_the_report_without_styles_of_its_own(report: Report) -> None:
    hostile = replace(report, method=HOSTILE, warnings=[DataWarning(HOSTILE, "serious", HOSTILE, 1)])
    page = Tags(hostile._repr_html_())
    assert {"style", "body"}.isdisjoint(tag for tag, _ in page.found)
    assert f"{report.difference['nll'].value:+.4f}" in page.text
    assert page.text.count("alert('&')") >= 2
    assert_nothing_is_loaded(page)


def test_a_notebook_shows_a_comparison_with_its_best_values_in_bold() -> None:
    logits, labels = overconfident(300)
    found = compare_methods(["pb", "fc"], check_validation_set(logits, labels), folds=2)
    rows = [replace(found.rows[0], method=HOSTILE), *found.rows[1:]]
    page = Tags(replace(found, rows=rows, left_out={HOSTILE: HOSTILE})._repr_html_())
    assert "script" not in {tag for tag, _ in page.found}
    assert page.text.count("alert('&')") == 3
    assert [tag for tag, _ in page.found].count("strong") >= 6
    assert f"{found.rows[1].scores['nll'].value:.4f}" in page.text


@pytest.mark.parametrize("kind", [BoxCalibrator, BoxCalibratedClassifier])
def test_a_notebook_shows_the_estimator_and_its_fit(kind: Any) -> None:
    rng = np.random.default_rng(0)
    names = np.array(["<b>dog</b>", HOSTILE])
    logits = rng.normal(size=(200, 2))
    y = names[(logits + rng.gumbel(size=(200, 2))).argmax(axis=1)]
    own = kind("ts") if kind is BoxCalibrator else kind(BoxCalibrator("uncalibrated"), "ts")
    assert "<p>Fitted" not in own._repr_html_()
    shown = own.fit(logits[:, [0, 1]], y)._repr_mimebundle_()["text/html"]
    assert f"NLL {own.result_.certificate.uncalibrated_nll:.4f} without calibration" in shown
    assert "<script>alert" not in shown
    assert "<b>dog" not in shown
    found = (DataWarning(HOSTILE, "serious", HOSTILE, 1), DataWarning(HOSTILE, "warning", HOSTILE, 1))
    hostile = replace(own.result_, method=HOSTILE, choice={"why": HOSTILE}, warnings=found)
    page = Tags(fit_fragment(hostile))
    assert "script" not in {tag for tag, _ in page.found}
    assert page.text.count("alert('&')") == 4


@pytest.mark.parametrize("when", ["before", "after"])
def test_the_plotted_points_are_those_of_the_report(report: Report, when: Any) -> None:
    axes = Figure().subplots()
    assert report.plot(axes, when=when) is axes
    (points,) = (one for one in axes.collections if isinstance(one, PathCollection))
    assert np.asarray(points.get_offsets()).tolist() == [
        [one["confidence"], one["accuracy"]] for one in report.reliability[when]["bins"]
    ]
    curve = [
        point
        for line in axes.lines
        if line.get_linewidth() == 2
        for point in np.asarray(line.get_xydata()).tolist()
    ]
    data = report.reliability[when]["curve"]
    assert curve == [list(pair) for pair in zip(data["confidence"], data["accuracy"], strict=True)]


def test_new_axes_are_those_of_pyplot(report: Report) -> None:
    axes = report.plot()
    assert axes.figure is plt.gcf()
    plt.close(axes.figure)


def test_without_matplotlib_the_report_has_no_diagram_and_plot_says_what_to_install() -> None:
    code = """
import sys
sys.modules["matplotlib"] = None
import numpy as np
from boxcal.calibrators.evaluation.report import cross_fitted_report
rng = np.random.default_rng(0)
report = cross_fitted_report("ts", rng.normal(size=(60, 2)), rng.integers(0, 2, 60), folds=2)
assert "<img" not in report._repr_html_()
try:
    report.plot()
except ImportError as error:
    assert "pip install matplotlib" in str(error), error
else:
    raise AssertionError
"""
    subprocess.run([sys.executable, "-c", code], check=True)
