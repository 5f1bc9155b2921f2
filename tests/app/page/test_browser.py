"""What people do on the page, in a real browser against a real service."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal
from urllib.parse import unquote

import httpx
import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, Route, expect

from boxcal.app.page.routes import assets
from tests.app.page.conftest import Problems, checked_page, watched_page

FIT_MS = 240_000
"""A worker may start on a busy machine."""
READY = {
    "try": ".sure",
    "calibration": ".rail li",
    "fit": "#method option[value=ts]",
    "monitor": ".tile",
    "service": ".tile",
}
"""What a view shows once it has its data."""
VIEWS = ("try", "calibration", "fit", "monitor", "service")


def open_try(page: Page, url: str) -> None:
    """Open the first view and wait for the confirmed answer to the first example."""
    page.goto(f"{url}/")
    expect(page).to_have_url(re.compile(r"/ui/$"))
    expect(page.locator(".sure")).to_be_visible()


def write_bounds(page: Page, text: str) -> None:
    area = page.get_by_label("Bounds as JSON")
    if not area.is_visible():
        page.get_by_text("Exact bounds as JSON").click()
    area.fill(text)
    area.blur()


def test_the_first_view_answers_an_example_within_bounds(page: Page, page_url: str) -> None:
    open_try(page, page_url)
    expect(page.locator(".headline .label")).to_have_text("9")
    expect(page.locator(".row:not(.head):not(.general)")).to_have_count(10)
    assert page.title() == "Try · boxcal"
    row = page.locator(".row", has=page.get_by_label("Lower bound of 8"))
    page.get_by_label("Lower bound of 8").focus()
    for _ in range(5):
        page.keyboard.press("ArrowRight")
    expect(row.locator(".n").last).to_have_text("5.0 %")
    expect(row.locator(".chip")).to_have_text("at least 5.0 %")
    expect(page.locator(".sure")).to_be_visible()
    write_bounds(page, '{"upper": 0.6}')
    expect(page.locator(".headline .big")).to_have_text("60.0 %")
    expect(page.locator(".sure")).to_be_visible()
    with page.expect_request(lambda request: '"bounds":{"upper":0.6}' in unquote(request.url)):
        page.get_by_role("button", name="Example 3: digit 3").click()
    expect(page.locator(".headline .label")).to_have_text("3")
    expect(page.locator(".headline .big")).to_have_text("60.0 %")
    expect(page.locator(".sure")).to_be_visible()


def test_a_bound_is_dragged_with_the_pointer_and_confirmed(page: Page, page_url: str) -> None:
    open_try(page, page_url)
    track = page.locator(".row.general .track")
    box = track.bounding_box()
    assert box is not None
    middle = box["y"] + box["height"] / 2
    page.mouse.move(box["x"] + box["width"] - 1, middle)
    page.mouse.down()
    page.mouse.move(box["x"] + 0.8 * box["width"], middle, steps=5)
    page.mouse.move(box["x"] + 0.6 * box["width"], middle, steps=5)
    page.mouse.up()
    expect(page.locator(".headline .big")).to_have_text("60.0 %")
    expect(page.locator(".sure")).to_be_visible()
    expect(page.locator(".headline")).to_contain_text("held by its upper bound")
    assert float(page.locator(".result").get_attribute("data-difference") or "nan") < 1e-9


def test_the_keyboard_removes_an_upper_bound_and_moves_one_beyond_the_bars(page: Page, page_url: str) -> None:
    open_try(page, page_url)
    page.get_by_text("Logits", exact=True).click()
    page.get_by_label("Logits", exact=True).last.fill("0.1, 0, 0, 0, 0, 0, 0, 0, 0, 0")
    expect(page.locator(".headline .label")).to_have_text("0")
    page.get_by_text("Exact bounds as JSON").click()
    area, upper = page.get_by_label("Bounds as JSON"), page.get_by_label("Upper bound of 0", exact=True)
    expect(page.locator(".head .scale i").last).to_have_text("20")

    def press(key: str, bounds: Any) -> None:
        upper.press(key)
        expect(page.locator(".sure")).to_be_visible()
        assert json.loads(area.input_value()) == bounds

    press("ArrowLeft", {"upper": {"0": 0.198}})
    press("End", {})
    write_bounds(page, '{"upper": {"0": 0.9}}')
    press("ArrowLeft", {"upper": {"0": 0.89}})
    press("End", {})


@pytest.mark.parametrize(
    ("classes", "lower", "relaxed"), [(10, 0.2, 0.1), (1000, 0.0015, 0.000999), (20_000, 0.001, 0.00005)]
)
def test_lower_bounds_are_lowered_to_100_percent_in_total(
    page: Page, page_url: str, classes: int, lower: float, relaxed: float
) -> None:
    page.goto(f"{page_url}/ui/")
    called = """async ([box, K, lower]) => {
      const chosen = new (await import(box)).ChosenBounds();
      chosen.set("lower", null, lower);
      chosen.relax("lower", K);
      return chosen.all.lower;
    }"""
    found = page.evaluate(called, [f"./{assets()[0]}/box.js", classes, lower])
    assert found == pytest.approx(relaxed, rel=1e-3)


def test_infeasible_bounds_are_explained_and_corrected_in_one_click(page: Page, page_url: str) -> None:
    open_try(page, page_url)
    write_bounds(page, '{"upper": 0.05}')
    trouble = page.locator(".trouble")
    expect(trouble).to_contain_text("The upper bounds of the 10 classes add up to 50 %")
    expect(trouble).to_contain_text("50 % is missing")
    trouble.get_by_role("button", name="Raise the upper bounds").click()
    expect(trouble).to_be_empty()
    expect(page.locator(".sure")).to_be_visible()
    write_bounds(page, '{"lower": {"1": 0.7, "2": 0.7}}')
    expect(trouble).to_contain_text("add up to 140 %")
    trouble.get_by_role("button", name="Remove all bounds").click()
    expect(trouble).to_be_empty()


def test_a_calibrator_is_fitted_activated_compared_and_rolled_back(
    page: Page, page_url: str, versions: tuple[int, int], small_file: Path
) -> None:
    ts, pb = versions
    page.goto(f"{page_url}/ui/#/fit")
    page.locator("#data").set_input_files(small_file)
    page.locator("#method").select_option("uncalibrated")
    page.get_by_label("always").check()
    page.get_by_role("button", name="Fit", exact=True).click()
    expect(page.locator(".done")).to_contain_text("Fitted v", timeout=FIT_MS)
    new = int(re.findall(r"Fitted v(\d+)", page.locator(".done").inner_text())[0])
    expect(page.locator("#status")).to_contain_text(f"v{new} uncalibrated")
    expect(page.locator("table.fits tbody tr")).not_to_have_count(0)
    page.get_by_role("link", name="Open the report").click()
    expect(page.locator(".lead").first).to_contain_text("samples that the fit did not see")
    expect(page.locator(".lead").first).to_contain_text("after, which is not clearly different")
    expect(page.locator("svg.reliability")).to_have_count(2)
    expect(page.locator("table.metrics tbody tr").first).to_be_visible()
    page.get_by_label("Compare with").select_option(str(ts))
    expect(page.locator("figcaption").first).to_have_text(f"v{ts} ts")
    target = httpx.get(f"{page_url}/activations").json()["rollback_to"]
    page.get_by_role("button", name=f"Roll back to v{target}").click()
    expect(page.locator(".notice")).to_contain_text(f"Rolled back: v{target}")
    expect(page.locator("#status")).to_contain_text(f"v{target}")
    other, method = (ts, "ts") if target == pb else (pb, "pb")
    page.goto(f"{page_url}/ui/#/calibration/{other}")
    page.get_by_role("button", name=f"Activate v{other}").click()
    expect(page.locator(".notice")).to_have_text(f"v{other} {method} is active.")
    assert httpx.get(f"{page_url}/health/ready").json()["calibrator"] == other


def test_a_slow_view_says_that_it_loads_and_yields_to_the_next(page: Page, page_url: str) -> None:
    held: list[Route] = []
    page.route("**/monitor.js", lambda route: held.append(route))  # noqa: PLW0108 - a built-in has no attributes
    open_try(page, page_url)
    page.get_by_role("link", name="Monitor").click()
    expect(page.locator("main")).to_have_text("The view Monitor is loading …")
    assert (page.title(), page.url) == ("Monitor · boxcal", f"{page_url}/ui/#/monitor")
    page.get_by_role("link", name="Service").click()
    expect(page.locator(".tile")).to_have_count(6)
    expect(page.locator("svg.lines")).to_have_count(2)
    expect(page.locator("table.stages tbody tr")).to_have_count(4)
    with page.expect_response("**/monitor.js"):
        held[0].continue_()
    page.wait_for_timeout(200)
    assert (page.title(), page.url) == ("Service · boxcal", f"{page_url}/ui/#/service")
    expect(page.get_by_role("heading", name="Latency", exact=True)).to_be_visible()
    expect(page.get_by_role("heading", name="Decisions")).to_have_count(0)
    page.goto(f"{page_url}/ui/#/nonsense")
    expect(page).to_have_url(f"{page_url}/ui/#/try")


@pytest.mark.parametrize("asset", ["monitor.js", "charts.js"])
def test_a_view_that_could_not_be_loaded_says_why_and_is_tried_again(
    page: Page, page_url: str, problems: Problems, asset: str
) -> None:
    problems.expected = "Failed to load resource"
    page.route(f"**/{asset}", lambda route: route.abort(), times=1)
    page.goto(f"{page_url}/ui/#/monitor")
    expect(page.locator("main .problem")).to_contain_text("The view Monitor could not be loaded. Failed to")
    assert page.title() == "Monitor · boxcal"
    page.get_by_role("button", name="Try again").click()
    expect(page.get_by_role("heading", name="Decisions")).to_be_visible()
    expect(page.locator(".tile").first).to_be_visible()


@pytest.mark.parametrize("status", [503, None])
def test_a_service_that_does_not_answer_at_the_start_is_asked_again(
    page: Page, page_url: str, problems: Problems, status: int | None
) -> None:
    problems.expected = "Failed to load resource"
    reason = "Service not ready. The service is starting." if status else "The service is unreachable."
    body = json.dumps({"title": "Service not ready", "detail": "The service is starting."})
    page.route(
        "**/whoami", lambda route: route.fulfill(status=status, body=body) if status else route.abort()
    )
    page.goto(f"{page_url}/ui/#/service")
    expect(page.locator("main .problem")).to_contain_text(reason)
    expect(page.locator("main")).to_contain_text("asks again every two seconds")
    expect(page.get_by_text("Sign in")).to_have_count(0)
    page.unroute("**/whoami")
    expect(page.locator(".tile")).to_have_count(6)
    expect(page.locator("main .problem")).to_have_count(0)


QUICKER = """
const after = AbortSignal.timeout.bind(AbortSignal);
AbortSignal.timeout = (ms) => after((globalThis.waited = ms) / 10);
"""
"""Waits a tenth of the time for an answer, and keeps the time that was asked for."""


def test_a_service_that_is_silent_at_the_start_is_named(page: Page, page_url: str) -> None:
    page.clock.install()
    page.add_init_script(QUICKER)
    page.route("**/whoami", lambda _: None)
    page.goto(f"{page_url}/ui/")
    expect(page.locator("main")).to_contain_text("Waiting for the service …")
    expect(page.get_by_role("link", name="Reload")).to_be_visible()
    expect(page.locator("main .problem")).to_contain_text("The service is unreachable")
    assert page.evaluate("waited") == 10_000
    page.unroute("**/whoami")
    page.clock.run_for(2000)
    expect(page.locator(".sure")).to_be_visible()


def test_small_probabilities_stay_in_their_card_on_a_narrow_screen(
    browser: Browser, page_url: str, problems: Problems
) -> None:
    with watched_page(browser, problems, viewport={"width": 320, "height": 700}) as page:
        open_try(page, page_url)
        page.get_by_text("Logits", exact=True).click()
        page.get_by_label("Logits", exact=True).last.fill("90, 30, 0, 0, 0, 0, 0, 0, 0, 0")
        expect(page.locator(".row .n", has_text="< 0.0001 %").last).to_be_visible()
        beyond = """(numbers) => numbers.filter((n) => {
          const { left, right } = n.closest(".card").getBoundingClientRect();
          const own = n.getBoundingClientRect();
          return n.scrollWidth > n.clientWidth + 1 || own.left < left || own.right > right;
        }).map((n) => n.textContent)"""
        assert page.locator(".row:not(.head) .n").evaluate_all(beyond) == []
        assert page.locator(".row .name").evaluate_all("(all) => all.every((n) => n.clientWidth > 8)")
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


@pytest.fixture
def colleague(page_url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=page_url) as http:
        yield http


def test_two_tabs_follow_a_colleague_and_undo_nothing_of_theirs(
    page: Page, page_url: str, versions: tuple[int, int], problems: Problems, colleague: httpx.Client
) -> None:
    problems.expected = "Failed to load resource"
    ts, pb = versions
    for version in (ts, pb):
        colleague.post(f"/calibrators/{version}/activate")
    other = page.context.new_page()
    for tab in (page, other):
        tab.goto(f"{page_url}/ui/#/calibration/{ts}")
        expect(tab.get_by_role("button", name=f"Roll back to v{ts}")).to_be_enabled()
    open_try(try_it := page.context.new_page(), page_url)

    page.get_by_role("button", name=f"Activate v{ts}").click()
    expect(page.locator(".notice")).to_have_text(f"v{ts} ts is active.")
    for tab in (page, other):
        expect(tab.locator("#status .badge")).to_have_text(f"v{ts} ts")
        expect(tab.locator(".rail li", has=tab.locator(".badge"))).to_contain_text(f"v{ts}")
        expect(tab.get_by_role("button", name=f"Roll back to v{pb}")).to_be_enabled()
    expect(try_it.locator("#which option").first).to_have_text(f"active: v{ts} ts")
    expect(try_it.locator(".foot")).to_contain_text(f"v{ts} ts")

    page.route("**/monitor/events", lambda route: route.abort())
    page.reload()
    button = page.get_by_role("button", name=f"Roll back to v{pb}")
    expect(button).to_be_enabled()
    with page.expect_response("**/calibrators/rollback?expected=*") as refused:
        page.route(
            "**/calibrators/rollback*",
            lambda route: (colleague.post("/calibrators/0/activate"), route.continue_()),
        )
        button.click()
    assert refused.value.status == 409
    expect(page.locator(".said")).to_contain_text(f"Version 0 is active, not version {ts} as expected")
    for tab in (page, other):
        expect(tab.locator("#status .badge")).to_have_text("v0 uncalibrated")
        expect(tab.locator(".rail li", has=tab.locator(".badge"))).to_contain_text("v0")
        expect(tab.get_by_role("button", name=f"Roll back to v{ts}")).to_be_enabled()
    assert colleague.get("/health/ready").json()["calibrator"] == 0
    colleague.post(f"/calibrators/{pb}/activate")


@pytest.fixture
def narrow(browser: Browser, page_url: str) -> Iterator[Page]:
    with checked_page(browser, page_url, viewport={"width": 390, "height": 800}, bypass_csp=True) as page:
        yield page


def test_two_versions_and_methods_are_compared_on_one_file(
    narrow: Page, page_url: str, versions: tuple[int, int], small_file: Path
) -> None:
    page, (ts, pb) = narrow, versions
    page.goto(f"{page_url}/ui/#/calibration/{pb}/{ts}")
    page.get_by_text("Compare versions and methods on one file").click()
    card = page.locator(".compared")
    expect(card.get_by_label(f"v{ts} ts")).to_be_checked()
    expect(card.get_by_label(f"v{pb} pb")).to_be_checked()
    expect(card.get_by_role("button", name="Compare", exact=True)).to_be_disabled()
    card.locator("#compared").set_input_files(small_file)
    card.get_by_text("Methods", exact=True).click()
    card.get_by_label("ts", exact=True).check()
    card.get_by_role("button", name="Compare", exact=True).click()
    expect(card.locator("table.papers tbody tr")).to_have_count(4, timeout=FIT_MS)
    expect(card.locator(".live .lead").last).to_contain_text(
        f"Version {pb} (pb), compared with version {ts} (ts): "
    )
    expect(card.locator(".warnings")).to_contain_text(f"version {ts} (ts) was fitted to")
    expect(card.locator(".differences").last).to_contain_text("95 % interval")
    assert serious(page) == []
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def serious(page: Page) -> list[str]:
    return [
        f"{violation['id']}: {node['html'][:120]}"
        for violation in Axe().run(page).response["violations"]
        if violation["impact"] in {"serious", "critical"}
        for node in violation["nodes"]
    ]


def test_a_time_limit_for_auto_is_sent_and_an_invalid_one_is_explained(
    page: Page, page_url: str, validation_file: Path, problems: Problems
) -> None:
    problems.expected = "status of 422"
    page.goto(f"{page_url}/ui/#/fit")
    page.locator("#data").set_input_files(validation_file)
    limit = page.get_by_label("Time to compare methods, seconds")
    limit.fill("0")
    page.get_by_role("button", name="Fit", exact=True).click()
    expect(page.locator(".live .problem")).to_contain_text("budget_seconds")
    page.locator("#method").select_option("ts")
    expect(limit).to_be_hidden()


def test_panels_of_classes_have_their_names(page: Page, page_url: str, versions: tuple[int, int]) -> None:
    def named(route: Route) -> None:
        model = route.fetch().json()
        route.fulfill(json={**model, "labels": [f"digit {k}" for k in range(10)]})

    page.route("**/model", named)
    page.goto(f"{page_url}/ui/#/calibration/{versions[0]}")
    page.get_by_text("Reliability of every class").click()
    expect(page.locator(".multiples figcaption").nth(9)).to_contain_text("digit 9 ")


def test_the_content_that_is_skipped_to_is_shown_after_a_reload(page: Page, page_url: str) -> None:
    open_try(page, page_url)
    page.locator(".skip").focus()
    page.keyboard.press("Enter")
    expect(page).to_have_url(re.compile("#view$"))
    page.reload()
    expect(page.locator(".sure")).to_be_visible()


def test_a_file_that_has_changed_is_to_be_chosen_again(
    page: Page, page_url: str, small_file: Path, problems: Problems, tmp_path: Path
) -> None:
    problems.expected = "ERR_UPLOAD_FILE_CHANGED"
    (changed := tmp_path / "changed.npz").write_bytes(small_file.read_bytes())
    page.goto(f"{page_url}/ui/#/fit")
    page.locator("#data").set_input_files(changed)
    changed.write_bytes(b"corrected")
    os.utime(changed, (2e9, 2e9))  # Chromium compares whole seconds
    page.get_by_role("button", name="Fit", exact=True).click()
    expect(page.locator(".live .problem")).to_contain_text("changed since you chose it. Choose it again.")
    with page.expect_file_chooser():
        page.locator("label[for=data]").click()
    expect(page.locator("#data")).to_have_value("")


@pytest.mark.parametrize(
    ("value", "digits", "shown"),
    [
        (0.0014, 1, "0.14 %"),
        (0.004, 0, "0.4 %"),
        (0.996, 0, "99.6 %"),
        (0.9994, 0, "99.9 %"),
        (0.25, 0, "25 %"),
        (1, 0, "100 %"),
    ],
)
def test_a_percentage_is_not_rounded_to_none_or_all(
    page: Page, page_url: str, value: float, digits: int, shown: str
) -> None:
    page.goto(f"{page_url}/ui/")
    script = page.locator("script[type=module]").get_attribute("src") or ""
    dom = f"{page_url}/ui/{script.replace('main.js', 'dom.js')}"
    called = "async ([dom, ...given]) => (await import(dom)).percent(...given)"
    assert page.evaluate(called, [dom, value, digits]) == shown


def test_how_the_samples_were_drawn_is_sent(page: Page, page_url: str, validation_file: Path) -> None:
    page.goto(f"{page_url}/ui/#/fit")
    page.locator("#data").set_input_files(validation_file)
    page.locator("#method").select_option("ts")
    page.get_by_label("never: only report").check()
    page.get_by_label("Classes in these data").select_option("drawn by class")
    page.get_by_role("button", name="Fit", exact=True).click()
    expect(page.locator(".warnings")).to_contain_text("weights make classes as frequent as the logits expect")
    assert serious(page) == []


def test_a_fit_is_cancelled_and_a_reload_resumes_following(
    page: Page, page_url: str, validation_file: Path
) -> None:
    page.goto(f"{page_url}/ui/#/fit")
    page.locator("#data").set_input_files(validation_file)
    page.locator("#method").select_option("ts+pb-mlp")
    page.get_by_label("never: only report").check()
    page.get_by_role("button", name="Fit", exact=True).click()
    expect(page.get_by_role("button", name="Cancel")).to_be_visible()
    page.reload()
    page.get_by_role("button", name="Cancel").click()
    expect(page.locator(".live .problem")).to_contain_text("The fit has been cancelled.")


def test_the_fit_shown_is_the_last_one_and_is_the_one_cancelled(
    page: Page, page_url: str, validation_file: Path, small_file: Path, colleague: httpx.Client
) -> None:
    page.goto(f"{page_url}/ui/#/fit")
    page.get_by_label("never: only report").check()
    go, file = page.get_by_role("button", name="Fit", exact=True), page.locator("#data")
    held: list[Route] = []
    page.route("**/fit", lambda route: held.append(route), times=1)  # noqa: PLW0108 - a built-in has no attributes
    file.set_input_files(validation_file)
    page.locator("#method").select_option("ts+pb-mlp")
    go.click()
    expect(page.locator(".live .stage")).to_contain_text("Uploading")
    file.set_input_files(small_file)
    expect(go).to_be_disabled()  # one upload at a time
    with page.expect_response("**/fit") as first:
        held[0].continue_()
    expect(page.get_by_role("button", name="Cancel")).to_be_visible()
    page.locator("#method").select_option("pb-mlp")
    with page.expect_response("**/fit") as second:
        go.click()
    long, shown = (one.value.json()["id"] for one in (first, second))
    for _ in range(10):
        expect(page.locator(".live .stage span").first).to_have_text("pb-mlp: waiting")
        page.wait_for_timeout(100)
    page.get_by_role("button", name="Cancel").click()
    expect(page.locator(".live .problem")).to_contain_text("The fit has been cancelled.")
    states = [colleague.get(f"/fits/{one}").json()["state"] for one in (long, shown)]
    assert states == ["running", "cancelled"]
    colleague.delete(f"/fits/{long}")


@pytest.mark.parametrize("view", ["try", "monitor"])
def test_nothing_is_asked_while_the_tab_is_hidden(page: Page, page_url: str, view: str) -> None:
    page.clock.install()
    page.goto(f"{page_url}/ui/#/{view}")
    page.locator(READY[view]).first.wait_for(state="attached")
    show_tab(page, hidden=True)
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.clock.run_for(60_000)
    assert asked == []
    show_tab(page, hidden=False)
    page.clock.run_for(11_000)
    assert asked != []


def show_tab(page: Page, *, hidden: bool) -> None:
    """Let the page believe that its tab is hidden, or not any more."""
    page.evaluate(
        """(hidden) => {
          Object.defineProperty(document, "hidden", { get: () => hidden, configurable: true });
          document.dispatchEvent(new Event("visibilitychange"));
        }""",
        hidden,
    )


def test_dragging_sends_at_most_one_request_per_120_ms(page: Page, page_url: str) -> None:
    open_try(page, page_url)
    box = page.locator(".row.general .track").bounding_box()
    assert box is not None
    middle = box["y"] + box["height"] / 2
    page.evaluate("performance.clearResourceTimings()")
    page.mouse.move(box["x"] + box["width"] - 1, middle)
    page.mouse.down()
    pauses = (0, 20, 60, 110, 130, 0, 10, 200, 90, 30)
    for step, pause in enumerate(pauses * 3):
        page.mouse.move(box["x"] + box["width"] * (0.9 - 0.3 * (step % 25) / 25), middle)
        page.wait_for_timeout(pause)
    page.mouse.up()
    expect(page.locator(".sure")).to_be_visible()
    entries = "performance.getEntriesByType('resource').filter((e) => /predict/.test(e.name))"
    sent = page.evaluate(f"{entries}.map((e) => e.startTime)")
    assert len(sent) >= 2
    assert min(after - before for before, after in pairwise(sent)) >= 119.0


def test_the_api_documentation_works_offline(page: Page, page_url: str) -> None:
    page.goto(f"{page_url}/docs")
    expect(page.locator(".opblock-summary-path", has_text="/predict").first).to_be_visible()


@pytest.mark.parametrize(("scheme", "width"), [("light", 320), ("dark", 1280)])
def test_every_view_is_accessible(
    browser: Browser,
    page_url: str,
    problems: Problems,
    width: int,
    scheme: Literal["light", "dark"],
) -> None:
    """axe-core finds nothing serious or critical, and nothing scrolls sideways."""
    size = {"width": width, "height": 800}
    with watched_page(browser, problems, viewport=size, color_scheme=scheme, bypass_csp=True) as page:
        for view in VIEWS:
            page.goto(f"{page_url}/ui/#/{view}")
            page.locator(READY[view]).first.wait_for(state="attached")
            found = serious(page)
            assert not found, f"{view}: {found}"
            assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), view
