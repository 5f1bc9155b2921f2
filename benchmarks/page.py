"""What the web page costs: `python -m benchmarks.page`, with Chromium installed.

Script time of one step of a slider with 10 and with 1,000 classes, requests sent while a bracket is dragged,
the size and the processor time of `GET /stats`, and the processor time of `/predict` and `/calibrate` in
alternating rounds without the page and with two open views.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from http import HTTPStatus
from http.client import HTTPConnection
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from playwright.sync_api import Browser, Page, expect, sync_playwright

from boxcal.models.digits_data import load_digits_split
from tests.app.fitting.service import Service as Process
from tests.app.page.conftest import CHROMIUM
from tests.app.running import Service, running

STEPS = 200
ASKED = 2000
ROUNDS = 5
ROUND_SECONDS = 3.0


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
        service.state.default.stats.read()
    reading = (time.thread_time() - start) / 50
    start = time.thread_time()
    for _ in range(ASKED):
        bytes(service.state.default.stats.response)
    return size, 1000 * (time.thread_time() - start) / ASKED, 1000 * reading


def load(service: Process, path: str, body: bytes, kind: str) -> tuple[float, float]:
    """Send requests one after the other for a round; requests a second, and ms of processor time of each."""
    connection = HTTPConnection(urlsplit(service.url).netloc)
    before, start, count = service.process.cpu_times(), time.perf_counter(), 0
    while time.perf_counter() < start + ROUND_SECONDS:
        connection.request("POST", path, body, {"Content-Type": kind})
        answer = connection.getresponse()
        answer.read()
        if answer.status != HTTPStatus.OK:
            raise SystemExit(f"{path}: status {answer.status}")
        count += 1
    seconds, after = time.perf_counter() - start, service.process.cpu_times()
    connection.close()
    used = after.user + after.system - before.user - before.system
    return count / seconds, 1000 * used / count


def throughput(browser: Browser, folder: Path) -> None:
    """Compare rounds without the page and with two open views, for each route."""
    image = load_digits_split().test.png(0)
    logits = json.dumps({"logits": [[float(n) for n in range(10)]]}).encode()
    requests = {"/predict": (image, "image/png"), "/calibrate": (logits, "application/json")}
    with Process(folder) as service:
        for path, (body, kind) in requests.items():
            load(service, path, body, kind)
            ratios: list[tuple[float, float]] = []
            for number in range(ROUNDS):
                found = {}
                for is_open in (False, True) if number % 2 else (True, False):
                    context = browser.new_context()
                    if is_open:
                        for view in ("service", "monitor"):
                            page = context.new_page()
                            page.goto(f"{service.url}/ui/#/{view}")
                            page.locator(".tile").first.wait_for()
                    found[is_open] = load(service, path, body, kind)
                    context.close()
                ratios.append((found[True][0] / found[False][0], found[True][1] / found[False][1]))
            rate, cost = (statistics.median(values) for values in zip(*ratios, strict=True))
            spread = ", ".join(f"{one:.3f}" for _, one in sorted(ratios, key=lambda pair: pair[1]))
            print(
                f"{path} with the page open: {rate:.3f} of the requests a second, {cost:.3f} of the processor"
                f" time a request (medians of {ROUNDS} rounds; processor time {spread})"
            )


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
        throughput(browser, Path(name) / "throughput")
        browser.close()


if __name__ == "__main__":
    main()
