"""Take the screenshots of the documentation: `python -m tests.docs.screenshots`, with Chromium installed.

A real service is started, `ts` is fitted to the validation split of the digits and activated, and each view
is captured in light and dark: `docs/images/page-VIEW-SCHEME.png`.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import httpx
import numpy as np
import torch
from playwright.sync_api import Page, expect, sync_playwright

from boxcal.app.client import BoxcalClient
from boxcal.models.digits_data import load_digits_split
from boxcal.models.loading import load_backbone
from tests.app.page.conftest import CHROMIUM
from tests.app.running import running
from tests.docs.conversation import ROOT

IMAGES = ROOT / "docs" / "images"
READY = {
    "try": ".sure",
    "calibration": "table.metrics",
    "fit": "table.fits",
    "service": "svg.lines",
}
"""What a view has once it is complete."""

REQUESTS = 300


def prepare(url: str, folder: Path) -> None:
    """Fit and activate a calibrator, and send some requests, so that every view has something to show."""
    split = load_digits_split()
    logits = load_backbone("digits", device="cpu")(torch.from_numpy(split.validation.levels)).numpy()
    path = folder / "validation.npz"
    np.savez(path, logits=logits, labels=split.validation.labels)
    with BoxcalClient(url) as client:
        client.wait_for_fit(client.fit(str(path), method="ts", activate="always").id)
    with httpx.Client(base_url=url) as http:
        for n in range(REQUESTS):
            http.post("/predict", content=split.test.png(n), headers={"Content-Type": "image/png"})


def show(page: Page, view: str) -> None:
    """Bring a view to the state that the image shows."""
    if view == "try":
        page.get_by_text("Exact bounds as JSON").click()
        area = page.get_by_label("Bounds as JSON")
        area.fill('{"upper": 0.75, "lower": {"8": 0.02}}')
        area.blur()
        expect(page.locator(".sure")).to_be_visible()
        page.get_by_text("Exact bounds as JSON").click()
    expect(page.locator(READY[view]).first).to_be_visible()


def main() -> None:
    """Write every image."""
    with (
        tempfile.TemporaryDirectory() as name,
        running(Path(name)) as service,
        sync_playwright() as playwright,
    ):
        prepare(service.url, Path(name))
        service.state.stats.read()
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        for scheme in ("light", "dark"):
            context = browser.new_context(
                viewport={"width": 1280, "height": 760}, color_scheme="dark" if scheme == "dark" else "light"
            )
            page = context.new_page()
            for view in READY:
                page.goto(f"{service.url}/ui/#/{view}")
                show(page, view)
                page.screenshot(path=IMAGES / f"page-{view}-{scheme}.png")
            context.close()
        browser.close()


if __name__ == "__main__":
    main()
