"""What the web page costs: `python -m benchmarks.page`, with Chromium installed.

Script time of one step of a slider with 10 and with 1,000 classes, requests sent while a bracket is dragged,
and the size and the processor time of `GET /stats`.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from pathlib import Path

import httpx
import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from playwright.sync_api import Page, expect, sync_playwright

from tests.app.page.conftest import CHROMIUM
from tests.app.running import Service, running

STEPS = 200
ASKED = 2000


def large_model(folder: Path, classes: int) -> str:
    """Write an ONNX model with so many classes that reads four numbers."""
    values = np.random.default_rng(0).normal(0, 3, (4, classes)).astype(np.float32)
    weight = numpy_helper.from_array(values, "weight")
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["input", "weight"], ["logits"])],
        "linear",
        [helper.make_tensor_value_info("input", TensorProto.FLOAT, ["N", 4])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["N", classes])],
        [weight],
    )
    path = folder / "linear.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return f"onnx:{path}"


def drag(page: Page, url: str, logits: list[float]) -> tuple[float, float, int]:
    """Drag the upper bound of all classes; p50 and p95 of a step in ms, and the requests sent meanwhile."""
    page.goto(f"{url}/ui/")
    page.get_by_text("Logits", exact=True).click()
    page.get_by_label("Logits", exact=True).last.fill(json.dumps(logits))
    expect(page.locator(".sure")).to_be_visible()
    box = page.locator(".row.general .track").bounding_box()
    assert box is not None  # noqa: S101 - the row is visible
    sent: list[str] = []
    page.on("request", lambda request: sent.append(request.url))
    page.evaluate("performance.clearMeasures()")
    y = box["y"] + box["height"] / 2
    page.mouse.move(box["x"] + box["width"] - 1, y)
    page.mouse.down()
    for step in range(STEPS):
        page.mouse.move(box["x"] + box["width"] * (0.9 - 0.3 * (step % 50) / 50), y)
    count = len(sent)
    page.mouse.up()
    times = page.evaluate("performance.getEntriesByName('boxcal-move', 'measure').map((e) => e.duration)")
    return statistics.median(times), float(np.quantile(times, 0.95)), count


def stats(service: Service) -> tuple[int, float, float]:
    """Return the size of the summary, and ms of processor time of one request and of one reading."""
    with httpx.Client(base_url=service.url) as http:
        size = len(http.get("/stats").content)
    start = time.thread_time()
    for _ in range(50):
        service.state.stats.read()
    reading = (time.thread_time() - start) / 50
    start = time.thread_time()
    for _ in range(ASKED):
        bytes(service.state.stats.response)
    return size, 1000 * (time.thread_time() - start) / ASKED, 1000 * reading


def main() -> None:
    """Print every figure."""
    random = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as name, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        for classes in (10, 1000):
            model = "digits" if classes == 10 else large_model(Path(name), classes)
            with running(Path(name) / str(classes), model=model) as service:
                page = browser.new_page(viewport={"width": 1280, "height": 760})
                middle, slow, sent = drag(page, service.url, random.normal(0, 3, classes).round(3).tolist())
                page.close()
                print(
                    f"K = {classes}: a step of a slider p50 {middle:.2f} ms, p95 {slow:.2f} ms;"
                    f" {sent} requests in {STEPS} steps"
                )
                size, answer, reading = stats(service)
                print(
                    f"  /stats {size} bytes, {answer:.4f} ms a response, {reading:.2f} ms a reading every 5 s"
                )
        browser.close()


if __name__ == "__main__":
    main()
