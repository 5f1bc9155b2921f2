"""The report as a web page: complete, escaped, and without anything that a browser would have to fetch."""

import json
import re
from html.parser import HTMLParser
from typing import Any

import pytest

from boxcal.calibrators.evaluation.html_report import html_report
from boxcal.calibrators.evaluation.reliability import reliability_svg
from boxcal.calibrators.evaluation.report import cross_fitted_report
from tests.calibrators.evaluation.test_report import METRICS, overconfident

HOSTILE = "<script>alert('&')</script>\""


class Tags(HTMLParser):
    """Collects tags, their attributes and the text between them."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    return cross_fitted_report("pb", *overconfident(300), folds=2).to_dict()


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


def test_what_auto_found_is_shown(document: dict[str, Any]) -> None:
    candidates = [{"method": "ts", "nll": 0.5123456789, "parameters": 1}, {"method": "pb", "nll": None}]
    choice = {"chosen": "ts", "why": "ts has the lowest NLL", "candidates": candidates}
    text = Tags(html_report({**document, "fit": {"choice": choice}}, b"<svg/>")).text
    assert "ts has the lowest NLL" in text
    assert "0.512346" in text
    assert "Method auto, which chose ts. 300 samples" in text


def test_what_is_seriously_wrong_with_the_data_comes_first(document: dict[str, Any]) -> None:
    found = [
        {"code": "a", "severity": "warning", "message": "few samples"},
        {"code": "b", "severity": "serious", "message": "labels are shifted"},
    ]
    text = Tags(html_report({**document, "warnings": found}, b"<svg/>")).text
    places = [text.index(one) for one in ("labels are shifted", "Correct the data first: NLL", "few samples")]
    assert places == sorted(places)


def test_nothing_is_loaded(document: dict[str, Any]) -> None:
    page = Tags(html_report(document, reliability_svg(document)))
    assert {"script", "link", "iframe", "object", "form"}.isdisjoint(tag for tag, _ in page.found)
    (source,) = [attributes["src"] for tag, attributes in page.found if tag == "img"]
    assert source is not None
    assert source.startswith("data:image/svg+xml;base64,")
    assert not any("href" in attributes for _, attributes in page.found)
    assert not re.search(r"url\(|@import|http", page.text)


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


def test_an_infinite_loss_has_a_place(document: dict[str, Any]) -> None:
    changed = json.loads(json.dumps(document))
    for side in ("before", "difference"):
        changed["metrics"]["nll"][side] |= {"value": None, "low": None, "high": None}
    assert "infinite" in Tags(html_report(changed, b"<svg/>")).text
