"""Each answer on the page belongs to the inputs that it was asked for, also where the service fails."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, Route, expect

from boxcal.models.digits_data import Digits
from tests.app.page.conftest import Problems, checked_page
from tests.app.page.test_browser import open_try, write_bounds
from tests.app.running import running

HOSTILE = (
    "x'; touch F; echo '",
    "it's",
    '$(touch F) `touch F` "; touch F; "',
    "a\\' ; touch F # %s !! é 猫",
    "-- @F & <b>",
)
"""Labels that would run a command, or end a word, where a command does not quote them."""
PREDICTIONS = re.compile("/predict|/calibrate")


def write_logits(page: Page, text: str) -> None:
    page.get_by_text("Logits", exact=True).click()
    page.get_by_label("Logits", exact=True).last.fill(text)


class Held:
    """Requests for predictions that wait until they are let go."""

    def __init__(self, page: Page) -> None:
        self.routes: list[Route] = []
        self._page = page
        self._holds = True
        page.route(PREDICTIONS, self._take)

    def _take(self, route: Route) -> None:
        if self._holds:
            self.routes.append(route)
        else:
            route.continue_()

    def wait_for(self, count: int) -> None:
        """Wait until so many have come."""
        for _ in range(600):
            if len(self.routes) >= count:
                return
            self._page.wait_for_timeout(100)
        raise AssertionError(f"{len(self.routes)} requests, not {count}")

    def let_go(self) -> None:
        """Let the first go on, and those to come; the others never get an answer."""
        self._holds = False
        self.routes[0].continue_()


class Answered:
    """What the page sent for predictions, and the last answer."""

    def __init__(self, page: Page) -> None:
        page.route(PREDICTIONS, self._take)

    def _take(self, route: Route) -> None:
        answer, sent = route.fetch(), route.request
        self.sent = str(sent.post_data) if "json" in sent.headers["content-type"] else sent.url
        self.predictions = answer.json()["predictions"]
        route.fulfill(response=answer)


def answers(route: Route, status: int) -> None:
    """Answer as the service does when it cannot."""
    problem = {"type": "about:blank", "title": "Queue full", "detail": "Try again later.", "status": status}
    route.fulfill(status=status, content_type="application/problem+json", body=json.dumps(problem))


def test_an_earlier_answer_is_marked_while_the_next_is_asked_for(page: Page, page_url: str) -> None:
    open_try(page, page_url)
    result = page.locator(".result")
    expect(result).to_have_attribute("aria-busy", "false")
    held = Held(page)
    page.get_by_role("button", name="Example 3: digit 3").click()
    expect(result).to_have_attribute("aria-busy", "true")
    expect(result).to_have_class(re.compile(r"\bstale\b"))
    expect(page.locator(".sure")).to_have_count(0)
    page.get_by_label("Upper bound of 9").press("ArrowLeft")
    expect(page.locator(".unsure")).to_contain_text("an earlier answer")
    held.wait_for(1)
    page.wait_for_timeout(300)
    assert len(held.routes) == 1  # bounds of an earlier answer are not confirmed
    held.let_go()
    expect(page.locator(".sure")).to_be_visible()
    expect(page.locator(".headline .label")).to_have_text("3")
    expect(result).to_have_attribute("aria-busy", "false")


def test_a_late_confirmation_does_not_confirm_another_input(page: Page, page_url: str) -> None:
    open_try(page, page_url)
    held = Held(page)
    page.get_by_label("Upper bound of 9").press("ArrowLeft")
    expect(page.locator(".unsure")).to_contain_text("computed in the browser")
    held.wait_for(1)
    page.get_by_role("button", name="Example 3: digit 3").click()
    expect(page.locator(".unsure")).to_contain_text("an earlier answer")
    held.wait_for(2)
    with page.expect_response(PREDICTIONS):
        held.let_go()
    page.wait_for_timeout(100)
    expect(page.locator(".unsure")).to_contain_text("an earlier answer")
    held.routes[1].continue_()
    expect(page.locator(".headline .label")).to_have_text("3")
    expect(page.locator(".sure")).to_be_visible()


def test_an_image_can_be_chosen_again_and_again_after_it_has_changed(
    page: Page, page_url: str, problems: Problems, tmp_path: Path, digits: Digits
) -> None:
    problems.expected = "ERR_UPLOAD_FILE_CHANGED"
    (image := tmp_path / "a.png").write_bytes(digits.png(0))
    open_try(page, page_url)
    page.locator("#image").set_input_files(image)
    expect(page.locator(".thumb")).to_have_attribute("alt", "a.png")
    expect(page.locator(".sure")).to_be_visible()
    page.get_by_role("button", name="Example 3: digit 3").click()
    with page.expect_file_chooser() as chooser:
        page.locator("label[for=image]").click()
    chooser.value.set_files(image)
    expect(page.locator(".thumb")).to_have_attribute("alt", "a.png")
    image.write_bytes(b"another")
    os.utime(image, (2e9, 2e9))  # Chromium compares whole seconds
    write_bounds(page, '{"upper": 0.5}')
    expect(page.locator(".trouble")).to_contain_text(
        "The file has changed since you chose it. Choose it again."
    )


def test_an_input_that_is_refused_has_no_answer(
    page: Page, page_url: str, problems: Problems, tmp_path: Path
) -> None:
    problems.expected = "status of 4"
    text = tmp_path / "a.txt"
    text.write_text("no image")
    open_try(page, page_url)
    page.locator("#image").set_input_files(text)
    expect(page.locator(".trouble")).to_contain_text(
        "This model reads images; a.txt is of the type text/plain"
    )
    expect(page.locator(".headline")).to_be_hidden()
    expect(page.locator(".sure")).to_be_hidden()
    page.get_by_role("button", name="Example 3: digit 3").click()
    expect(page.locator(".sure")).to_be_visible()
    expect(page.locator(".trouble")).to_be_empty()
    for wrong, reason in (("1, two", "Logits are finite numbers"), ("1, 2, 3", "3")):
        write_logits(page, wrong)
        expect(page.locator(".trouble")).to_contain_text(reason)
        expect(page.locator(".headline")).to_be_hidden()
    write_logits(page, "9, 1, 1, 1, 1, 1, 1, 1, 1, 1")
    expect(page.locator(".sure")).to_be_visible()
    write_logits(page, "")
    expect(page.locator(".result")).to_be_hidden()


@pytest.mark.parametrize("status", [503, None])
def test_a_service_that_fails_or_is_gone_confirms_nothing(
    page: Page, page_url: str, problems: Problems, status: int | None
) -> None:
    problems.expected = "Failed to load resource"
    open_try(page, page_url)
    page.route(PREDICTIONS, lambda route: answers(route, status) if status else route.abort())
    reason = "Queue full" if status else "The service is unreachable"
    page.get_by_label("Upper bound of 9").press("ArrowLeft")
    expect(page.locator(".trouble")).to_contain_text(reason)
    expect(page.locator(".foot")).to_contain_text("not confirmed by the service")
    expect(page.locator(".result")).to_have_class(re.compile(r"\bstale\b"))
    page.get_by_role("button", name="Example 3: digit 3").click()
    expect(page.locator(".headline")).to_be_hidden()
    expect(page.locator(".trouble")).to_contain_text(reason)
    page.unroute(PREDICTIONS)
    page.get_by_role("button", name="Ask again").click()
    expect(page.locator(".headline .label")).to_have_text("3")
    expect(page.locator(".sure")).to_be_visible()
    expect(page.locator(".trouble")).to_be_empty()


NOT_VALID = {
    '{"uper": 0.3}': "uper",
    "[]": "object",
    "null": "lower and upper",
    "0.3": "object",
    '{"upper": null}': "a bound is a number",
    '{"lower": {"9": true}}': "a bound is a number",
    '{"lower": {"9": 0.5}, "upper": {"9": 0.4}}': "is above its upper bound",
    '{"upper": 0.3': "JSON",
}


def test_bounds_that_are_not_valid_are_refused(page: Page, page_url: str, problems: Problems) -> None:
    problems.expected = "status of 422"
    open_try(page, page_url)
    for bounds, reason in NOT_VALID.items():
        write_bounds(page, bounds)
        expect(page.locator(".trouble")).to_contain_text(reason)
        expect(page.locator(".sure")).to_have_count(0)
        expect(page.locator(".foot")).to_contain_text("not confirmed")
        expect(page.get_by_label("Bounds as JSON")).to_have_value(bounds)
        write_bounds(page, '{"upper": 0.6}')
        expect(page.locator(".headline .big")).to_have_text("60.0 %")
        expect(page.locator(".sure")).to_be_visible()
        expect(page.locator(".trouble")).to_be_empty()


@pytest.mark.parametrize(
    ("bounds", "reason"), [('{"upper": 0.3', "These bounds are not valid"), ('{"uper": 0.3}', "uper")]
)
def test_bounds_that_are_not_valid_stay_so_with_the_next_input(
    page: Page, page_url: str, problems: Problems, bounds: str, reason: str
) -> None:
    problems.expected = "status of 422"
    open_try(page, page_url)
    area = page.get_by_label("Bounds as JSON")
    write_bounds(page, '{"upper": 0.6}')
    expect(page.locator(".sure")).to_be_visible()
    write_bounds(page, bounds)

    def check() -> None:
        expect(page.locator(".trouble")).to_contain_text(reason)
        page.wait_for_timeout(300)
        expect(page.locator(".sure")).to_have_count(0)
        expect(page.locator(".foot")).to_contain_text("not confirmed")
        expect(area).to_have_value(bounds)

    check()
    page.get_by_role("button", name="Example 3: digit 3").click()
    expect(page.locator(".headline .label")).to_have_text("3")
    check()
    page.get_by_role("link", name="Service").click()
    expect(page.locator(".tile")).to_have_count(6)
    page.get_by_role("link", name="Try", exact=True).click()
    page.get_by_text("Exact bounds as JSON").click()
    check()
    page.get_by_label("Upper bound of 9").press("ArrowLeft")
    expect(page.locator(".sure")).to_be_visible()
    expect(area).to_have_value(re.compile('"upper"'))
    expect(page.locator(".trouble")).to_be_empty()


@pytest.fixture(scope="module")
def labels_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("labels")
    (folder / "labels.txt").write_text("\n".join(HOSTILE))
    with running(folder, model="logits", labels=folder / "labels.txt") as service:
        yield service.url


@pytest.fixture
def hostile(browser: Browser, labels_url: str) -> Iterator[Page]:
    with checked_page(browser, labels_url, "status of 422") as page:
        page.goto(f"{labels_url}/ui/")
        yield page


def test_wrong_logits_are_explained_before_the_first_answer(hostile: Page) -> None:
    write_logits(hostile, "1, 2")
    expect(hostile.locator(".trouble")).to_be_visible()
    expect(hostile.locator(".trouble")).to_contain_text("2")
    expect(hostile.get_by_label("Bounds as JSON")).to_be_hidden()


def run_shown_command(page: Page, folder: Path) -> Any:
    """Paste the shown command into a shell."""
    page.get_by_text("This request as curl").click()
    shown = page.locator(".request pre").inner_text()
    ran = subprocess.run(["bash", "-c", shown], cwd=folder, capture_output=True, check=True, timeout=60)
    return json.loads(ran.stdout)


@pytest.mark.parametrize("label", HOSTILE[::2])
def test_the_shown_command_sends_what_the_page_sent(hostile: Page, tmp_path: Path, label: str) -> None:
    answered = Answered(hostile)
    write_logits(hostile, "1.25, -0.1, 1e-7, 2, 0.3333333333333333")
    expect(hostile.locator(".sure")).to_be_visible()
    hostile.locator("#which").select_option("0")
    expect(hostile.locator(".foot")).to_contain_text("uncalibrated")
    write_bounds(hostile, json.dumps({"lower": {label: 0.9}}))
    expect(hostile.locator(".chip", has_text="at least 90.0 %")).to_be_visible()
    expect(hostile.locator(".sure")).to_be_visible()
    assert run_shown_command(hostile, tmp_path)["predictions"] == answered.predictions
    assert answered.predictions[0]["probabilities"][HOSTILE.index(label)] == 0.9
    assert list(tmp_path.iterdir()) == []
    shown = hostile.locator(".request pre").inner_text()
    body = shown.split("'", 1)[1].rsplit("' |", 1)[0].replace(r"'\''", "'")
    assert body == answered.sent
    assert json.loads(body)["options"]["calibrator"] == 0


def test_the_shown_command_sends_an_image(
    page: Page, page_url: str, tmp_path: Path, versions: tuple[int, int]
) -> None:
    answered = Answered(page)
    open_try(page, page_url)
    page.locator("#which").select_option(str(versions[0]))
    expect(page.locator(".foot")).to_contain_text(f"v{versions[0]} ts")
    write_bounds(page, '{"upper": {"9": 0.4}}')
    expect(page.locator(".chip", has_text="at most 40.0 %")).to_be_visible()
    expect(page.locator(".sure")).to_be_visible()
    assert run_shown_command(page, tmp_path)["predictions"] == answered.predictions
    assert answered.sent in page.locator(".request pre").inner_text()
    named = tmp_path / "it's a digit.png"
    named.write_bytes((Path(__file__).parents[3] / "docs" / "images" / "digit.png").read_bytes())
    page.locator("#image").set_input_files(named)
    expect(page.locator(".thumb")).to_have_attribute("alt", named.name)
    expect(page.locator(".sure")).to_be_visible()
    page.get_by_text("This request as curl").click()
    assert run_shown_command(page, tmp_path)["predictions"] == answered.predictions
