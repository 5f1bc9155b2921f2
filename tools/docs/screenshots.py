"""Take the screenshots of the documentation: `python -m tools.docs.screenshots`, with Chromium installed.

A real service is started, `ts` is fitted to the validation split of the digits and activated, and traffic
with labels changes until the monitor proposes another version. Then each view is captured in light and dark:
`docs/images/page-VIEW-SCHEME.png`.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import httpx
import numpy as np
from playwright.sync_api import Page, expect, sync_playwright

from boxcal.app.client import BoxcalClient
from boxcal.app.demo import __main__ as demo_shift
from boxcal.models.backends.backbone import Backbone
from boxcal.models.digits_data import Digits, load_digits_split
from boxcal.models.inputs.images import GREY_LEVELS
from boxcal.models.loading.specifications import load_backbone
from tests.app.page.conftest import CHROMIUM
from tests.app.running import running
from tools.docs.conversation import ROOT

IMAGES = ROOT / "docs" / "images"
READY = {
    "try": ".view-try .sure",
    "calibration": ".view-calibration table.metrics",
    "compare": ".view-calibration table.papers",
    "fit": ".view-fit table.fits",
    "monitor": ".view-monitor svg.evidence",
    "service": ".view-service svg.lines",
}
"""What a view has once it is complete; `compare` is a part of the view Calibration."""
PLACES = {view: view for view in READY} | {"compare": "calibration/2/1"}

REQUESTS = 300
NOISE = 4.0
MOST_ROUNDS = 20


def write(part: Digits, backbone: Backbone, path: Path) -> None:
    """Write the logits and labels of a part of the digits."""
    np.savez(path, logits=backbone(part.levels), labels=part.labels)


def prepare(url: str, folder: Path) -> None:
    """Fit calibrators, and send requests and labels, so that every view has something to show."""
    split, backbone = load_digits_split(), load_backbone("digits", device="cpu")
    write(split.validation, backbone, folder / "validation.npz")
    write(split.test, backbone, folder / "test.npz")
    random = np.random.default_rng(0)
    with BoxcalClient(url) as client, httpx.Client(base_url=url) as http:
        for method in ("pb", "ts"):
            uploaded = client.fit(str(folder / "validation.npz"), method=method, activate="always")
            client.wait_for_fit(uploaded.id)
        state = demo_shift.play(client, split.test.levels, split.test.labels)
        rounds = 0
        while state["phase"] != "proposed" and rounds < MOST_ROUNDS:
            noisy = split.test.levels + random.normal(0.0, NOISE, split.test.levels.shape)
            levels = np.clip(noisy, 0, GREY_LEVELS).astype(np.float32)
            demo_shift.play(client, levels, split.test.labels)
            state = demo_shift.settled(client, lambda now: now["phase"] != "fitting")
            rounds += 1
        for n in range(REQUESTS):
            http.post("/predict", content=split.test.png(n), headers={"Content-Type": "image/png"})


def show(page: Page, view: str, folder: Path) -> None:
    """Bring a view to the state that the image shows."""
    if view == "try":
        page.get_by_text("Exact bounds as JSON").click()
        area = page.get_by_label("Bounds as JSON")
        area.fill('{"upper": 0.75, "lower": {"8": 0.02}}')
        area.blur()
        expect(page.locator(".sure")).to_be_visible()
        page.get_by_text("Exact bounds as JSON").click()
    if view == "compare":
        page.get_by_text("Compare versions and methods on one file").click()
        page.locator("#compared").set_input_files(folder / "test.npz")
        page.get_by_text("Methods", exact=True).click()
        page.get_by_role("button", name="choose pb, ts, ts+pb").click()
        page.get_by_text("Methods", exact=True).click()
        page.get_by_role("button", name="Compare", exact=True).click()
        expect(page.locator(READY[view])).to_be_visible(timeout=120_000)
    expect(page.locator(READY[view]).first).to_be_visible()


def capture(page: Page, view: str, path: Path) -> None:
    """Write the image: the whole card of the comparison, all of the monitor, else what the window shows."""
    if view == "compare":
        page.locator(".compared").screenshot(path=path)
    else:
        page.screenshot(path=path, full_page=view == "monitor")


def main(folder: Path) -> None:
    """Write every image into a folder."""
    with (
        tempfile.TemporaryDirectory() as name,
        running(Path(name)) as service,
        sync_playwright() as playwright,
    ):
        prepare(service.url, Path(name))
        service.state.default.stats.read()
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        for scheme in ("light", "dark"):
            context = browser.new_context(
                viewport={"width": 1280, "height": 760}, color_scheme="dark" if scheme == "dark" else "light"
            )
            page = context.new_page()
            for view in READY:
                page.goto(f"{service.url}/ui/#/{PLACES[view]}")
                show(page, view, Path(name))
                capture(page, view, folder / f"page-{view}-{scheme}.png")
            context.close()
        browser.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else IMAGES)
