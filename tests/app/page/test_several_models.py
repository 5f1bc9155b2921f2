"""The page of a service with several models, with default bounds, or restarted with other labels."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest
from playwright.sync_api import Browser, Page, Route, expect

from boxcal.app.client import BoxcalClient
from tests.app.page.conftest import checked_page
from tests.app.page.test_answers import run_shown_command, write_logits
from tests.app.page.test_browser import write_bounds
from tests.app.running import Service, running

MODELS = """
[site]
model = "logits:4"
upper = 0.9

[other]
model = "logits:3"
"""


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """Serve `site`, whose requests are bounded unless they say otherwise, and `other`."""
    folder = tmp_path_factory.mktemp("models")
    (folder / "models.toml").write_text(MODELS)
    with running(folder / "data", model=str(folder / "models.toml")) as service:
        yield service


@pytest.fixture
def visit(browser: Browser, service: Service) -> Iterator[Page]:
    with checked_page(browser, service.url) as page:
        yield page


def test_the_default_bounds_of_the_service_are_shown_and_can_be_removed(
    visit: Page, service: Service, tmp_path: Path
) -> None:
    visit.goto(f"{service.url}/ui/")
    write_logits(visit, "4, 1, 0, 0")
    big, area = visit.locator(".headline .big"), visit.get_by_label("Bounds as JSON")
    expect(big).to_have_text("90.0 %")
    expect(visit.locator(".sure")).to_be_visible()
    assert json.loads(area.input_value()) == {"upper": 0.9}
    assert visit.get_by_label("Upper bound of 0").input_value() == "0.9"
    visit.get_by_role("button", name="remove all bounds").click()
    expect(big).to_have_text("92.0 %")
    expect(visit.locator(".sure")).to_be_visible()
    assert json.loads(area.input_value()) == {}
    write_logits(visit, "4, 1, 0, 0.0")
    expect(big).to_have_text("92.0 %")
    expect(visit.locator(".sure")).to_be_visible()
    shown = run_shown_command(visit, tmp_path)["predictions"][0]["probabilities"]
    assert round(shown[0], 4) == 0.9205
    write_bounds(visit, '{"upper": 0.8}')
    expect(big).to_have_text("80.0 %")
    expect(visit.locator(".sure")).to_be_visible()
    described = httpx.get(f"{service.url}/model").json()
    assert described["bounds"] == {"lower": 0.0, "upper": 0.9}


def test_the_first_visit_lists_the_calibrators_of_the_model_shown(
    visit: Page, service: Service, tmp_path: Path
) -> None:
    random = np.random.default_rng(0)
    file = tmp_path / "other.npz"
    np.savez(file, logits=random.normal(size=(200, 3)), labels=random.integers(0, 3, 200))
    with BoxcalClient(service.url, model="other", timeout=240.0) as client:
        version = client.wait_for_fit(client.fit(file, method="ts", activate="never").id).version
    assert version == 1
    visit.goto(f"{service.url}/ui/#/calibration")
    expect(visit.locator(".rail li .version")).to_have_text(["v0"])
    visit.goto(f"{service.url}/ui/#/try")
    expect(visit.locator(".sure")).to_be_visible()
    expect(visit.locator("#which option")).to_have_text(["active: v0 uncalibrated", "v0 uncalibrated"])
    visit.locator("#status select").select_option("other")
    expect(visit.locator("#which option")).to_have_count(3)
    visit.goto(f"{service.url}/ui/#/calibration")
    expect(visit.locator(".rail li .version")).to_have_text(["v1", "v0"])


def test_a_chosen_model_that_is_gone_is_forgotten(visit: Page, service: Service) -> None:
    visit.goto(f"{service.url}/ui/")
    expect(visit.locator(".sure")).to_be_visible()
    visit.evaluate("sessionStorage.model = 'gone'")
    visit.reload()
    expect(visit.locator("#status select")).to_have_value("site")
    expect(visit.locator(".sure")).to_be_visible()
    assert visit.evaluate("sessionStorage.length") == 0


ANSWERS = re.compile("/calibrate|/model")
LABELS = ("cat\ndog\nfox", "urgent\nroutine\nnormal")


def test_the_labels_are_those_of_the_service_after_a_restart(browser: Browser, tmp_path: Path) -> None:
    with (
        running(tmp_path / "a", model="logits", labels=named(tmp_path, 0)) as service,
        running(tmp_path / "b", model="logits", labels=named(tmp_path, 1)) as another,
        checked_page(browser, service.url) as page,
    ):
        label = page.locator(".headline .label")
        page.goto(f"{service.url}/ui/")
        write_logits(page, "1, 5, 2")
        expect(label).to_have_text("dog")

        def restarted(route: Route) -> None:
            url = route.request.url.replace(service.url, another.url)
            headers = {**route.request.headers, "origin": another.url}
            route.fulfill(response=route.fetch(url=url, headers=headers))

        page.route(ANSWERS, restarted)
        write_logits(page, "1, 6, 2")
        expect(label).to_have_text("routine")
        expect(page.locator(".sure")).to_be_visible()
        expect(page.locator(".row .name").nth(1)).to_have_text("routine")
        page.unroute(ANSWERS)
        page.get_by_role("link", name="Service").click()
        page.get_by_role("link", name="Try", exact=True).click()
        expect(label).to_have_text("dog")
        page.route(ANSWERS, restarted)
        page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")
        expect(label).to_have_text("routine")


def named(folder: Path, index: int) -> Path:
    (file := folder / f"{index}.txt").write_text(LABELS[index])
    return file
