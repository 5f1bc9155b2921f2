"""The view Monitor in a real browser: calm, an alarm, its acknowledgement and a proposal."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.sync_api import Browser, Page, Route, expect

from tests.app.monitoring.test_refits import until
from tests.app.monitoring.traffic import client_of, folded, play, stream
from tests.app.page.conftest import checked_page
from tests.app.page.test_browser import serious
from tests.app.running import Service, running


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    with running(tmp_path) as service:
        yield service


@pytest.fixture
def client(service: Service) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=service.url, timeout=60) as client:
        yield client


@pytest.fixture
def monitor(browser: Browser, service: Service) -> Iterator[Page]:
    with checked_page(browser, service.url, bypass_csp=True) as page:
        page.goto(f"{service.url}/ui/#/monitor")
        yield page
        page.unroute_all(behavior="ignoreErrors")  # a refresh may be on its way


def propose(route: Route) -> None:
    """Change the state of the monitor on its way: version 0 is proposed."""
    document: dict[str, Any] = route.fetch().json()
    active = {"version": 0, "method": "uncalibrated"}
    route.fulfill(body=json.dumps({**document, "calibrator": active, "phase": "proposed", "challenger": 0}))


def test_an_alarm_is_shown_as_it_comes_and_acknowledged(monitor: Page, client: httpx.Client) -> None:
    page = monitor
    expect(page.locator(".signal")).to_have_text("… Not enough labels")
    expect(page.locator(".state")).to_contain_text("No label has arrived")
    folded(client, play(client, *stream(400)))
    expect(page.locator(".signal")).to_have_text("✓ Calm")
    expect(page.locator(".tile").first).to_contain_text("400")
    expect(page.locator("svg.evidence")).to_be_visible()
    expect(page.get_by_role("button", name="Acknowledge")).to_have_count(0)
    folded(client, play(client, *stream(500, 3.0, seed=1)))
    expect(page.locator(".signal")).to_have_text("▲ Alarm: material")
    expect(page.locator(".lead")).to_contain_text("the answers are too confident")
    expect(page.locator("dl")).to_contain_text("too confident")
    expect(page.locator("dl")).to_contain_text("recoverable NLL")
    expect(page.locator("table.decisions tbody")).to_contain_text("no longer calibrated")
    expect(page.locator(".tiles")).to_contain_text("from labels")
    assert serious(page) == []
    page.get_by_label("Note").fill("A camera was ")
    lead = page.locator(".lead").text_content()
    folded(client, play(client, *stream(50, 3.0, seed=2)))
    expect(page.locator(".lead")).not_to_have_text(lead or "")  # drawn anew, and the note keeps the focus
    page.keyboard.type("replaced.")
    page.get_by_role("button", name="Acknowledge").focus()
    lead = page.locator(".lead").text_content()
    folded(client, play(client, *stream(50, 3.0, seed=3)))
    expect(page.locator(".lead")).not_to_have_text(lead or "")
    page.keyboard.press("Enter")
    expect(page.locator("table.decisions tbody tr").first).to_contain_text("A camera was replaced.")
    expect(page.locator(".signal")).to_have_text("… Not enough labels")
    expect(page.locator(".state")).to_contain_text("Alarms were acknowledged")
    assert client.get("/monitor").json()["labels"] == 0


def test_a_proposed_version_is_activated(monitor: Page, client: httpx.Client) -> None:
    monitor.route("**/monitor", propose)
    monitor.reload()
    expect(monitor.locator(".state")).to_contain_text("Version 0 is better and is proposed.")
    expect(monitor.get_by_role("button", name="Acknowledge and decline")).to_be_enabled()
    with monitor.expect_response("**/calibrators/0/activate?expected=0") as response:
        monitor.get_by_role("button", name="Activate v0").click()
    assert response.value.ok


@pytest.mark.parametrize(
    ("auto_refit", "next_step"), [("propose", "The next refit needs 300 more labels."), ("off", "")]
)
def test_the_labels_that_a_refit_needs_are_named_where_one_comes(
    browser: Browser, tmp_path: Path, auto_refit: str, next_step: str
) -> None:
    with (
        client_of(tmp_path, auto_refit=auto_refit) as client,
        checked_page(browser, str(client.base_url)) as page,
    ):
        document = folded(client, play(client, *stream(700, 3.0, seed=1)))
        page.goto(f"{client.base_url}/ui/#/monitor")
        expect(page.locator(".signal")).to_have_text("▲ Alarm: material")
        expect(page.locator(".lead")).to_have_text(f"{document['sentence']} {next_step}".strip())


@pytest.mark.long
def test_a_refit_is_followed_to_its_activation(monitor: Page, client: httpx.Client) -> None:
    until(client, "duel_won")
    expect(monitor.locator("table.decisions tbody")).to_contain_text("Activate it.")
    version = client.get("/monitor").json()["challenger"]
    monitor.get_by_role("button", name=f"Activate v{version}").click()
    expect(monitor.locator("#status")).to_contain_text(f"v{version}")
    expect(monitor.locator(".signal")).to_have_text("… Not enough labels")
