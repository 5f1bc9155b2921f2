"""The first visit to a service with a model of one's own: an answer to an example, and the next step."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import onnx
import pytest
from onnx import TensorProto, helper
from playwright.sync_api import Browser, Page, expect

from tests.app.page.conftest import checked_page
from tests.app.running import running
from tests.models.files import COLOUR_SPEC, declare, write_onnx
from tests.models.test_onnx_exports import of_columns, of_text


def of_images(path: Path) -> None:
    declare(write_onnx(path), preprocessing=COLOUR_SPEC)


def of_large_tensors(path: Path) -> None:
    nodes = [
        helper.make_node("GlobalAveragePool", ["x"], ["pooled"]),
        helper.make_node("Flatten", ["pooled"], ["logits"]),
    ]
    shapes = {"x": ("N", 3, 20, 20), "logits": ("N", 3)}
    read, given = (helper.make_tensor_value_info(name, TensorProto.FLOAT, of) for name, of in shapes.items())
    graph = helper.make_graph(nodes, "mean", [read], [given])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10), path)


MODELS: dict[str, tuple[Callable[[Path], object] | None, str, str]] = {
    "images": (of_images, "Image", "drop an image of yours"),
    "tensors": (write_onnx, "Input", "write yours over it"),
    "large tensors": (
        of_large_tensors,
        "Logits",
        "reads tensors of the shape 3 × 20 × 20: send them to POST /predict",
    ),
    "rows": (of_columns, "Input", "write yours over it"),
    "texts": (of_text, "Input", "write yours over it"),
    "none": (None, "Logits", "This service has no model: paste logits of yours."),
}
"""By what the model reads: how it is made, and the input and the next step that the page shows."""


@pytest.fixture(params=MODELS)
def visit(browser: Browser, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[tuple[Page, str]]:
    make = MODELS[request.param][0]
    path = tmp_path / "own.onnx"
    if make is not None:
        make(path)
    model = "logits:5" if make is None else f"onnx:{path}"
    with (
        running(tmp_path / "data", model=model, device="cpu") as service,
        checked_page(browser, service.url, "status of 422") as page,
    ):
        page.goto(f"{service.url}/ui/")
        yield page, request.param


def test_an_own_model_answers_an_example_of_its_kind(visit: tuple[Page, str]) -> None:
    page, reads = visit
    _, mode, step = MODELS[reads]
    expect(page.locator(".sure")).to_be_visible()
    expect(page.locator(".headline .label")).not_to_be_empty()
    expect(page.locator(".segments label:visible", has=page.locator(":checked"))).to_have_text(mode)
    expect(page.locator(".input")).to_contain_text(step)
    if mode == "Input":
        area = page.get_by_label("Input as JSON")
        own = area.input_value()
        area.fill(own[:-1])
        area.blur()
        expect(page.locator(".trouble")).to_contain_text("The input is not JSON")
        expect(page.locator(".headline")).to_be_hidden()
        area.fill(own)
        area.blur()
        expect(page.locator(".sure")).to_be_visible()
        expect(page.locator(".trouble")).to_be_empty()
    drop = page.evaluate_handle(
        """() => {
          const data = new DataTransfer();
          data.items.add(new File(["a,b"], "notes.csv", { type: "text/csv" }));
          return data;
        }"""
    )
    page.locator(".input").dispatch_event("drop", {"dataTransfer": drop})
    named = {"none": "logits", "large tensors": "tensors", "rows": "rows of features"}.get(reads, reads)
    expect(page.locator(".trouble")).to_contain_text(
        f"This model reads {named}; notes.csv is of the type text/csv."
    )
    expect(page.locator(".headline")).to_be_hidden()
    assert not re.search("cells", page.locator("main").inner_text())


@pytest.mark.long
def test_more_classes_than_a_call_takes_arguments_are_answered(browser: Browser, tmp_path: Path) -> None:
    """Math.max of 150,000 arguments is "Maximum call stack size exceeded"."""
    with (
        running(tmp_path / "data", model="logits:150000", device="cpu") as service,
        checked_page(browser, service.url) as page,
    ):
        page.goto(f"{service.url}/ui/")
        expect(page.locator(".sure")).to_be_visible(timeout=120_000)
