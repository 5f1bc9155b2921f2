"""Signing in on the page, what it shows to a key with few scopes, and pages of other origins."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler
from pathlib import Path

import httpx
import pytest
from playwright.sync_api import Browser, Page, expect

from boxcal.app.http.scopes import Scope
from tests.app.access.conftest import TESTER, Guarded, guarded
from tests.app.answering import Quiet, answering
from tests.app.page.conftest import checked_page
from tests.app.waiting import until

__all__ = ["guarded"]

HOSTILE = """async ([url, id]) => {
  const tries = [
    ["POST", "/calibrators/rollback"], ["POST", "/calibrators/0/activate"], ["DELETE", `/fits/${id}`],
    ["POST", "/fit"], ["POST", "/calibrate"],
  ];
  const found = [];
  for (const [method, path] of tries)
    for (const mode of ["cors", "no-cors"]) {
      if (mode === "no-cors" && method === "DELETE") continue;
      try { found.push((await fetch(url + path, { method, mode })).type); }
      catch (error) { found.push("failed"); }
    }
  return found;
}"""


@pytest.fixture
def signed_out(browser: Browser, guarded: Guarded) -> Iterator[Page]:
    with checked_page(browser, guarded.url, "status of 40") as page:  # refusals
        yield page


def sign_in(page: Page, key: str) -> None:
    page.get_by_label("API key").fill(key)
    page.get_by_role("button", name="Use this key").click()


def test_sign_in_with_a_key_and_sign_out(signed_out: Page, guarded: Guarded) -> None:
    page = signed_out
    page.goto(f"{guarded.url}/ui/")
    expect(page.get_by_role("dialog")).to_contain_text("The request has no API key")
    sign_in(page, guarded.keys["wrong"])
    expect(page.get_by_role("dialog")).to_contain_text("The API key is not valid")
    sign_in(page, guarded.keys["admin"])
    expect(page.locator(".sure")).to_be_visible()
    assert guarded.keys["admin"] not in page.url
    expect(page.locator(".bar nav a:visible")).to_have_text(
        ["Try", "Calibration", "Fit", "Monitor", "Service"]
    )
    page.goto(f"{guarded.url}/ui/#/calibration")
    expect(page.get_by_role("link", name="Fit a new one")).to_be_visible()
    page.get_by_role("button", name="Sign out").click()
    expect(page.get_by_role("dialog")).to_contain_text("The request has no API key")
    assert page.evaluate("sessionStorage.length") == 0


@pytest.mark.parametrize(
    ("scope", "views"),
    [
        ("predict", ["Try"]),
        ("read", ["Calibration", "Monitor", "Service"]),
        ("fit", ["Fit"]),
        ("activate", []),
    ],
)
def test_views_and_buttons_follow_the_scopes(
    signed_out: Page, guarded: Guarded, scope: str, views: list[str]
) -> None:
    page = signed_out
    page.goto(f"{guarded.url}/ui/")
    sign_in(page, guarded.keys[scope])
    expect(page.get_by_role("button", name="Sign out")).to_be_visible()
    expect(page.locator(".bar nav a:visible")).to_have_text(views)
    if scope == "predict":
        expect(page.locator(".sure")).to_be_visible()
    if scope == "read":
        expect(page.get_by_role("heading", name="Calibrators")).to_be_visible()
        expect(page.get_by_role("link", name="Fit a new one")).to_have_count(0)
    if scope == "fit":
        expect(page.get_by_label("always")).to_be_disabled()
        expect(page.get_by_label("never: only report")).to_be_checked()
    expect(page.get_by_role("dialog")).to_have_count(0)


class Files(Quiet, SimpleHTTPRequestHandler):
    """Serves a folder."""


@pytest.fixture
def other_origin(tmp_path: Path) -> Iterator[str]:
    (tmp_path / "index.html").write_text("<!doctype html><title>another</title>")
    with answering(partial(Files, directory=str(tmp_path))) as url:
        yield f"{url.replace('127.0.0.1', 'localhost')}/index.html"


def test_a_page_of_another_origin_changes_nothing(browser: Browser, page_url: str, other_origin: str) -> None:
    with httpx.Client(base_url=page_url) as http:
        before = [http.get(path).json() for path in ("/activations", "/fits", "/audit")]
        context = browser.new_context()
        page = context.new_page()
        page.goto(other_origin)
        refused: list[int] = []
        page.on("response", lambda response: refused.append(response.status))
        found = page.evaluate(HOSTILE, [page_url, "0000"])
        context.close()
        assert len(found) == 9
        # `no-cors` requests reach the service, and the page cannot read the answer.
        assert set(found) == {"failed", "opaque"}
        assert refused.count(403) >= 4
        assert set(refused) <= {403, 405}  # 405: the preflight of DELETE
        assert [http.get(path).json() for path in ("/activations", "/fits", "/audit")] == before


def test_a_key_that_opens_no_view_is_told_which_scopes_the_views_need(
    signed_out: Page, guarded: Guarded
) -> None:
    page = signed_out
    page.goto(f"{guarded.url}/ui/")
    sign_in(page, guarded.keys["activate"])
    expect(page.locator("main")).to_have_text(
        "No view for this key. The views need scopes: "
        "Try predict, Calibration read, Fit fit, Monitor read, Service read."
    )


def test_a_key_that_was_copied_in_part_is_asked_for_again(signed_out: Page, guarded: Guarded) -> None:
    """Its ellipsis cannot be part of a header as it is."""
    page = signed_out
    page.goto(f"{guarded.url}/ui/#/monitor")
    sign_in(page, f"{guarded.keys['read'][:8]}…")
    expect(page.get_by_role("dialog")).to_contain_text("The API key is not valid")
    sign_in(page, guarded.keys["read"])
    expect(page.locator(".tile").first).to_be_visible()


def status_of(guarded: Guarded, key: str) -> int:
    return httpx.get(f"{guarded.url}/stats", headers={"Authorization": f"Bearer {key}"}).status_code


def test_a_key_that_ends_is_asked_for_once(signed_out: Page, guarded: Guarded) -> None:
    page = signed_out
    record, key = guarded.store.create("ends", {Scope.READ}, TESTER)
    until(lambda: status_of(guarded, key) == 200)
    page.clock.install()
    page.goto(f"{guarded.url}/ui/#/monitor")
    sign_in(page, key)
    expect(page.locator(".tile").first).to_be_visible()
    guarded.store.revoke(record.id, TESTER)
    until(lambda: status_of(guarded, key) == 401)
    page.clock.run_for(5000)
    expect(page.get_by_role("dialog")).to_contain_text("The API key is not valid")
    page.get_by_role("button", name="Cancel").click()
    for _ in range(3):
        with page.expect_response("**/monitor"):
            page.clock.run_for(5000)
        page.wait_for_timeout(200)
        expect(page.get_by_role("dialog")).to_have_count(0)
    expect(page.locator("main .problem")).to_contain_text("The API key is not valid")
    page.get_by_role("button", name="Sign in").click()
    expect(page.get_by_role("dialog")).to_contain_text("The API key is not valid")
    sign_in(page, guarded.keys["read"])
    expect(page.locator("#status")).to_contain_text("v0 uncalibrated")
