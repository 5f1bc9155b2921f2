"""Double clicks, views that are left, connections that come back, and what has the focus afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, Route, expect

from boxcal.app.client import BoxcalClient
from tests.app.page.conftest import checked_page
from tests.app.page.test_browser import FIT_MS, open_try, write_bounds

CELLS = """
(area) => {
  const clipboardData = new DataTransfer();
  clipboardData.items.add("1\\t2\\t3", "text/plain");
  clipboardData.items.add(new File([new Uint8Array([137, 80])], "image.png", { type: "image/png" }));
  area.dispatchEvent(new ClipboardEvent("paste", { clipboardData, bubbles: true }));
}
"""


@pytest.fixture
def client(page_url: str) -> Iterator[BoxcalClient]:
    with BoxcalClient(page_url) as client:
        yield client


def focused(page: Page) -> str:
    """Say what has the focus: its name, or the tag of what has none."""
    found: str = page.evaluate(
        "(({ ariaLabel, id, tagName }) => ariaLabel || id || tagName)(document.activeElement)"
    )
    return found


def click_twice(page: Page, name: str, seconds: float = 0.15) -> None:
    """Double-click at the place of a button, as slowly as people do."""
    box = page.get_by_role("button", name=name, exact=True).bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + 10, box["y"] + 10)
    for count in (1, 2):
        page.mouse.down(click_count=count)
        page.mouse.up(click_count=count)
        page.wait_for_timeout(1000 * seconds)


def hold(page: Page, pattern: str) -> list[Route]:
    """Keep requests waiting; gives those that have come."""
    held: list[Route] = []

    def take(route: Route) -> None:
        held.append(route)

    page.route(pattern, take)
    return held


def test_a_double_click_rolls_back_once(
    page: Page, page_url: str, versions: tuple[int, int], client: BoxcalClient
) -> None:
    ts, pb = versions
    for version in (0, ts, pb):
        client.activate(version)
    page.goto(f"{page_url}/ui/#/calibration/{pb}")
    expect(page.get_by_role("button", name=f"Roll back to v{ts}")).to_be_visible()
    click_twice(page, f"Roll back to v{ts}")
    expect(page.locator(".notice")).to_have_text(f"Rolled back: v{ts} ts is active.")
    page.wait_for_timeout(500)
    assert client.ready().calibrator == ts
    assert focused(page) != "BODY"
    client.activate(pb)


def test_all_versions_are_listed_where_there_are_thousands(
    page: Page, page_url: str, versions: tuple[int, int]
) -> None:
    asked: list[str] = []

    def answer(route: Route) -> None:
        asked.append(route.request.url)
        document: dict[str, Any] = route.fetch().json()
        if "before_version" not in route.request.url:
            first = document["calibrators"][0] | {"active": False}
            document["calibrators"] = [first | {"version": 5000 - i} for i in range(1000)]
        route.fulfill(json=document)

    page.route("**/calibrators?*", answer)
    page.goto(f"{page_url}/ui/#/calibration/{versions[0]}")
    expect(page.locator(".rail li")).to_have_count(1000 + versions[1] + 1)
    expect(page.locator(".detail h1")).to_have_text(f"v{versions[0]} ts")
    assert "before_version=4001" in asked[1]


@pytest.mark.parametrize(
    ("view", "there"), [("calibration", ".rail li a"), ("fit", "#method option[value=ts]")]
)
def test_a_view_opened_offline_is_filled_once_the_service_is_back(
    browser: Browser, page_url: str, view: str, there: str
) -> None:
    with checked_page(browser, page_url, expected="ERR_INTERNET_DISCONNECTED") as page:
        page.goto(f"{page_url}/ui/#/{view}")
        expect(page.locator(there).first).to_be_attached()
        page.goto(f"{page_url}/ui/#/service")
        expect(page.locator(".tile").first).to_be_visible()
        page.context.set_offline(True)
        page.evaluate("view => { location.hash = `#/${view}`; }", view)
        expect(page.locator("#view .problem")).to_contain_text("The service is unreachable")
        page.context.set_offline(False)
        expect(page.locator(there).first).to_be_attached()
        expect(page.locator("#view .problem")).to_have_count(0)


def test_an_answer_is_asked_for_again_once_the_service_is_back(browser: Browser, page_url: str) -> None:
    with checked_page(browser, page_url, expected="ERR_INTERNET_DISCONNECTED") as page:
        open_try(page, page_url)
        page.context.set_offline(True)
        page.get_by_role("button", name="Example 2").click()
        expect(page.locator("#view .problem")).to_contain_text("The service is unreachable")
        page.context.set_offline(False)
        expect(page.locator("#view .problem")).to_have_count(0)
        expect(page.locator(".sure")).to_be_visible()


def test_cells_of_a_spreadsheet_are_pasted_as_text(page: Page, page_url: str) -> None:
    open_try(page, page_url)
    page.get_by_text("Logits", exact=True).click()
    page.get_by_label("Logits", exact=True).last.evaluate(CELLS)
    expect(page.get_by_role("radio", name="Logits")).to_be_checked()


def test_a_comparison_is_of_the_file_shown_and_is_found_again(
    page: Page, page_url: str, versions: tuple[int, int], small_file: Path, tmp_path: Path
) -> None:
    held = hold(page, "**/compare?*")
    page.goto(f"{page_url}/ui/#/calibration/{versions[1]}/{versions[0]}")
    page.get_by_text("Compare versions and methods on one file").click()
    page.locator("#compared").set_input_files(small_file)
    page.get_by_role("button", name="Compare", exact=True).click()
    expect(page.locator(".compared .stage")).to_have_text("Uploading")
    page.get_by_role("link", name="Service").click()
    expect(page.locator(".tile").first).to_be_visible()
    page.go_back()
    expect(page.locator(".compared .stage")).to_have_text("Uploading")
    held[0].continue_()
    expect(page.locator(".papers")).to_be_visible(timeout=FIT_MS)
    expect(page.locator(".compared .live")).to_contain_text("small.npz: 150 samples.")
    other = tmp_path / "other.npz"
    other.write_bytes(small_file.read_bytes())
    page.locator("#compared").set_input_files(other)
    expect(page.locator(".papers")).to_have_count(0)


def test_an_upload_is_shown_to_who_comes_back(page: Page, page_url: str, small_file: Path) -> None:
    held = hold(page, "**/fit")
    page.goto(f"{page_url}/ui/#/fit")
    page.locator("#data").set_input_files(small_file)
    page.locator("#method").select_option("ts")
    page.get_by_label("never: only report").check()
    page.get_by_role("button", name="Fit", exact=True).click()
    expect(page.locator(".live .stage")).to_be_visible()
    page.get_by_role("link", name="Service").click()
    expect(page.locator(".tile").first).to_be_visible()
    page.go_back()
    expect(page.locator(".live .stage")).to_contain_text("Uploading")
    expect(page.get_by_role("button", name="Fit", exact=True)).to_be_disabled()
    held[0].continue_()
    expect(page.locator(".done")).to_contain_text("Fitted v", timeout=FIT_MS)


def test_the_keyboard_keeps_its_place(page: Page, page_url: str, versions: tuple[int, int]) -> None:
    ts, pb = versions
    page.goto(f"{page_url}/ui/#/calibration/{pb}")
    chooser = page.get_by_label("Compare with")
    chooser.focus()
    chooser.select_option(str(ts))
    expect(page.locator(".pair figcaption").first).to_contain_text(f"v{ts}")
    assert page.url.endswith(f"#/calibration/{pb}/{ts}")
    assert focused(page) == "Compare with"
    page.locator(".rail li a").first.focus()
    page.keyboard.press("Enter")
    expect(page.locator(".detail h1")).to_be_visible()
    assert focused(page) != "BODY"


def test_bounds_being_written_do_not_lose_the_click_that_removes_them(page: Page, page_url: str) -> None:
    open_try(page, page_url)
    write_bounds(page, '{"upper": 0.7}')
    expect(page.locator(".row.general .wide")).to_have_text("0 % to 70 %")
    page.get_by_label("Bounds as JSON").fill('{"upper": 0.755}')
    page.get_by_role("button", name="remove all bounds").click()
    expect(page.locator(".row.general .wide")).to_have_text("no bounds")
    assert focused(page) == "Upper bound of all classes"


def test_what_is_missing_is_not_rounded_away(page: Page, page_url: str) -> None:
    open_try(page, page_url)
    write_bounds(page, '{"upper": 0.09999}')
    expect(page.locator(".problem")).to_contain_text(
        "add up to 99.99 %. They must add up to at least 100 %: 0.01 % is missing."
    )
    expect(page.locator(".row.general .wide")).to_have_text("0 % to 9.999 %")
