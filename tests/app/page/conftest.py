"""A real Chromium on the page of a real service; what it should not ask for or complain of fails a test."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest
from playwright.sync_api import (
    Browser,
    BrowserContext,
    ConsoleMessage,
    Page,
    Request,
    expect,
    sync_playwright,
)

from boxcal.app.client import BoxcalClient
from boxcal.models.digits_data import Digits
from boxcal.models.loading.specifications import load_backbone
from tests.app.running import running

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Start Chromium for the tests of one file: Playwright keeps an event loop running until it stops."""
    if CHROMIUM is None:
        pytest.skip("needs Chromium: `apt-get install chromium`")
    expect.set_options(timeout=60_000)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def page_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with running(tmp_path_factory.mktemp("page")) as service:
        yield service.url


class Problems:
    def __init__(self, url: str) -> None:
        self.found: list[str] = []
        self.expected = ""
        self._host = urlsplit(url).netloc

    def watch(self, context: BrowserContext) -> None:
        context.on("console", self._console)
        context.on("request", self._request)
        context.on("weberror", lambda error: self.found.append(f"error: {error.error}"))

    def _console(self, message: ConsoleMessage) -> None:
        if message.type in {"error", "warning"} and not (self.expected and self.expected in message.text):
            self.found.append(f"{message.type}: {message.text}")

    def _request(self, request: Request) -> None:
        parts = urlsplit(request.url)
        if parts.scheme in {"http", "https"} and parts.netloc != self._host:
            self.found.append(f"foreign request: {request.url}")


@pytest.fixture
def problems(page_url: str) -> Iterator[Problems]:
    """Collect problems, and fail on any at the end; `expected` is a part of console errors to let pass."""
    problems = Problems(page_url)
    yield problems
    assert problems.found == []


@pytest.fixture
def page(browser: Browser, problems: Problems) -> Iterator[Page]:
    with watched_page(browser, problems) as page:
        yield page


@contextmanager
def watched_page(browser: Browser, problems: Problems, **options: Any) -> Iterator[Page]:
    """Open an empty page of 1280 × 760 in a context of its own."""
    context = browser.new_context(**{"viewport": {"width": 1280, "height": 760}, **options})
    problems.watch(context)
    page = context.new_page()
    page.set_default_timeout(60_000)
    try:
        yield page
    finally:
        context.close()


@contextmanager
def checked_page(browser: Browser, url: str, expected: str = "", **options: Any) -> Iterator[Page]:
    """As `watched_page`, and the fixture `problems` at its end."""
    problems = Problems(url)
    problems.expected = expected
    with watched_page(browser, problems, **options) as page:
        yield page
    assert problems.found == []


@pytest.fixture(scope="session")
def versions(page_url: str, small_file: Path) -> tuple[int, int]:
    with BoxcalClient(page_url, timeout=240.0) as client:
        ts, pb = (
            client.wait_for_fit(client.fit(small_file, method=method, activate="always").id).version
            for method in ("ts", "pb")
        )
    return ts, pb


@pytest.fixture(scope="session")
def validation_file(tmp_path_factory: pytest.TempPathFactory, digits: Digits) -> Path:
    logits = np.asarray(load_backbone("digits", device="cpu")(digits.levels))
    path = tmp_path_factory.mktemp("validation") / "validation.npz"
    np.savez(path, logits=logits, labels=digits.labels)
    return path


@pytest.fixture(scope="session")
def small_file(tmp_path_factory: pytest.TempPathFactory, validation_file: Path) -> Path:
    path = tmp_path_factory.mktemp("validation") / "small.npz"
    with np.load(validation_file) as arrays:
        np.savez(path, **{name: array[:150] for name, array in arrays.items()})
    return path
