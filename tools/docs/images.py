"""Make the images of the documents, each from a real run: `python -m tools.docs.images`.

digit.png        the handwritten digit of the examples, from the test split
reliability.svg  the digits model before and after the default fit, cross-fitted on its validation split
bounds.svg       one prediction: as softmax gives it, inside fitted bounds, inside a request's as well
monitoring-evidence.svg  the evidence on a stream whose answers become too confident half-way
"""

import tempfile
from pathlib import Path

import matplotlib as mpl
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from boxcal.app.demo.__main__ import SHOWN_DIGIT
from boxcal.calibrators import Bounds, box_constrained_softmax, fit
from boxcal.calibrators.evaluation.reliability import reliability_svg
from boxcal.calibrators.evaluation.report import cross_fitted_report
from boxcal.calibrators.monitoring.calibration_test import CalibrationTest
from boxcal.calibrators.monitoring.figure import Trace, draw
from boxcal.models.digits_data import load_digits_split
from boxcal.models.loading.specifications import load_backbone
from tools.docs.conversation import ROOT

IMAGES = ROOT / "docs" / "images"
BAR, BOX, INK = "#1f6fb4", "#d9dee4", "#1f2933"

CLASSES = ("card", "cash", "loan", "other", "fraud")
LOGITS = torch.tensor([[4.6, 1.2, 0.9, 0.2, -1.6]], dtype=torch.float64)
FITTED = Bounds(lower=torch.tensor(0.012), upper=torch.tensor(0.88))
REQUEST = Bounds(lower=torch.tensor([0.0, 0.0, 0.0, 0.0, 0.05]), upper=torch.tensor(0.75))


def main() -> None:
    """Write every image."""
    split = load_digits_split()
    (IMAGES / "digit.png").write_bytes(split.test.png(SHOWN_DIGIT))
    (IMAGES / "bounds.svg").write_bytes(bounds_image())
    (IMAGES / "monitoring-evidence.svg").write_bytes(evidence_image())
    logits = load_backbone("digits", device="cpu")(split.validation.levels)
    method = fit("auto", logits, split.validation.labels).method
    report = cross_fitted_report(method, logits, split.validation.labels)
    (IMAGES / "reliability.svg").write_bytes(reliability_svg(report.to_dict()))


def bounds_image() -> bytes:
    """Draw the three stages of one prediction, each with its box behind the bars."""
    both, _ = FITTED.yielding_to(REQUEST, len(CLASSES))
    stages = {
        "softmax: no bounds": Bounds(),
        "inside fitted bounds": FITTED,
        "and inside this request's bounds": both,
    }
    figure = Figure(figsize=(11.0, 3.6), facecolor="white", layout="constrained")
    for axes, (title, box) in zip(figure.subplots(1, len(stages), sharey=True), stages.items(), strict=True):
        draw_stage(axes, title, box)
    figure.axes[0].set_ylabel("probability", color=INK)
    return svg(figure)


def evidence_image() -> bytes:
    """Draw a stream whose answers become too confident half-way."""
    random = np.random.default_rng(7)
    logits = random.normal(size=(8000, 10))
    logits[np.arange(8000), random.integers(0, 10, 8000)] += random.exponential(4.0, 8000)
    temperature = np.where(np.arange(8000) < 4000, 1.0, 1.6)[:, None]
    labels = (logits / temperature + random.gumbel(size=logits.shape)).argmax(axis=1)
    rows = np.exp(logits - logits.max(1, keepdims=True))
    rows /= rows.sum(1, keepdims=True)
    test, trace = CalibrationTest(10), Trace()
    for first in range(0, 8000, 50):
        piece = slice(first, first + 50)
        test.update(rows[piece], labels[piece])
        strict, material = test.log_evidence
        trace.labels.append(first + 50)
        trace.strict.append(strict)
        trace.material.append(material)
        if test.alarms[0] and not trace.marks:
            trace.marks.append((first + 50, "strict alarm"))
    trace.confidence, trace.right = [rows.max(1)], [rows.argmax(1) == labels]
    return draw(trace)


def draw_stage(axes: Axes, title: str, box: Bounds) -> None:
    """Draw one answer: what each class may be in grey, what it is in blue."""
    probabilities = box_constrained_softmax(LOGITS, box.lower, box.upper)[0].numpy()
    lower, upper = (np.broadcast_to(side.numpy(), len(CLASSES)) for side in (box.lower, box.upper))
    places = np.arange(len(CLASSES))
    axes.bar(places, upper - lower, bottom=lower, width=0.8, color=BOX)
    axes.bar(places, probabilities, width=0.5, color=BAR)
    for place, probability in zip(places, probabilities, strict=True):
        axes.annotate(
            f"{probability:.3f}",
            (place, probability),
            (0, 3),
            textcoords="offset points",
            ha="center",
            fontsize=9,
            color=INK,
        )
    axes.set_title(title, loc="left", fontsize=11, color=INK)
    axes.set_xticks(places, CLASSES)
    axes.set_ylim(0, 1.05)
    axes.spines[["top", "right"]].set_visible(False)


def svg(figure: Figure) -> bytes:
    """Write a figure that comes out the same every time."""
    with tempfile.NamedTemporaryFile(suffix=".svg") as file, mpl.rc_context({"svg.hashsalt": "boxcal"}):
        figure.savefig(file.name, metadata={"Date": None, "Creator": None})
        return Path(file.name).read_bytes()


if __name__ == "__main__":
    main()
