"""The browser and the library give the same probabilities for every method and any feasible bounds."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from playwright.sync_api import Page

from boxcal.app.page.routes import assets
from boxcal.calibrators import Bounds, Calibrator, fit
from boxcal.calibrators.data import check_validation_set
from boxcal.calibrators.method import catalogue
from tests.calibrators.monitoring.streams import answers, drawn

COUNT = 200
CLASSES = 6
FEATURES = 8
QUICK = ("uncalibrated", "ts", "pb", "ts+pb", "ta", "nc")

IN_THE_BROWSER = """async ([path, cases]) => {
  const { boxSoftmax, effectiveBox } = await import(path);
  const number = (g) => g ?? -Infinity;
  return cases.map(({ logits, fitted, request }) => {
    const { lower, upper, relaxed } = effectiveBox(fitted, request);
    return { probabilities: boxSoftmax(logits.map(number), lower, upper), relaxed };
  });
}"""


def fitted(method: str) -> tuple[Calibrator, torch.Tensor]:
    """Fit a method to overconfident answers, and give what it reads of 200 others."""
    random = np.random.default_rng(7)
    if catalogue()[method].logit_map.reads == "logits":
        law = answers(random, 100 + COUNT, CLASSES)
        logits = torch.from_numpy(1.8 * np.log(law))
        return fit(method, logits[:100], drawn(law[:100], random)).calibrator, logits[100:]
    inputs = random.normal(size=(100 + COUNT, FEATURES)).astype(np.float32)
    weight, bias = random.normal(size=(CLASSES, FEATURES)), random.normal(size=CLASSES)
    honest = inputs @ weight.T + bias
    labels = (honest + random.gumbel(size=honest.shape)).argmax(axis=1)
    head = (1.8 * weight, 1.8 * bias)
    layer = [torch.from_numpy(part).float() for part in head]

    def part(rows: slice) -> dict[str, Any]:
        return {
            "logits": 1.8 * honest[rows],
            "labels": labels[rows],
            "features": inputs[rows],
            "head": head,
            "inputs": inputs[rows],
            "backbone": lambda batch: batch @ layer[0].T + layer[1],
        }

    calibrator = fit(method, **part(slice(100))).calibrator
    read = calibrator.on_arrays.source(check_validation_set(**part(slice(100, None))))
    return calibrator, torch.from_numpy(read)


def feasible(random: np.random.Generator) -> Bounds:
    """Draw bounds that some distribution satisfies: they surround a random one."""
    inside = random.dirichlet(np.full(CLASSES, 0.7))
    lower = inside * random.uniform(0.0, 1.0, CLASSES) * (random.random(CLASSES) < 0.5)
    upper = inside + (1.0 - inside) * random.uniform(0.0, 1.0, CLASSES) ** 3
    upper[random.random(CLASSES) < 0.3] = 1.0
    return Bounds(torch.from_numpy(lower), torch.from_numpy(upper))


@pytest.mark.parametrize(
    "method",
    [pytest.param(name, marks=() if name in QUICK else pytest.mark.long) for name in catalogue()],
)
def test_the_browser_agrees_with_the_library(page: Page, page_url: str, method: str) -> None:
    """On `COUNT` rows, each with bounds of its own."""
    calibrator, logits = fitted(method)
    random = np.random.default_rng(11)
    rows = [logits[n : n + 1] for n in range(COUNT)]
    bounds = [feasible(random) for _ in rows]
    plain = [calibrator.calibrate(row) for row in rows]
    expected = [calibrator.calibrate(row, own) for row, own in zip(rows, bounds, strict=True)]

    def listed(bound: torch.Tensor) -> list[float]:
        return bound.expand(1, CLASSES)[0].tolist()

    cases = [
        {
            "logits": [g if np.isfinite(g) else None for g in one.logits[0].tolist()],
            "fitted": {"lower": listed(one.lower), "upper": listed(one.upper)},
            "request": {"lower": own.lower.tolist(), "upper": own.upper.tolist()},
        }
        for one, own in zip(plain, bounds, strict=True)
    ]
    page.goto(f"{page_url}/ui/")
    found = page.evaluate(IN_THE_BROWSER, [f"./{assets()[0]}/box.js", cases])
    for one, right in zip(found, expected, strict=True):
        assert np.abs(np.array(one["probabilities"]) - right.probabilities[0].numpy()).max() < 1e-9
        assert one["relaxed"] == bool(right.relaxed[0])
