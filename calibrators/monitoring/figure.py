"""Draws what a monitor has seen: the evidence against the calibrator, and accuracy beside confidence."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from matplotlib.figure import Figure

from boxcal.calibrators.evaluation.figure import BLUE, FAINT, GREEN, INK, ORANGE, Format, render
from boxcal.calibrators.monitoring.calibration_test import MATERIAL_ALPHA, STRICT_ALPHA
from boxcal.calibrators.monitoring.state import Array

BLOCKS = 40
"""Points of the curves of accuracy and confidence."""


@dataclass
class Trace:
    """What is drawn of a replay.

    Attributes
    ----------
    labels
        How many labels were seen at each point of `strict` and `material`.
    strict, material
        Log E of both tests at these points.
    confidence, right
        Of each labelled answer.
    marks
        Points at which something happened, with what it was.
    """

    labels: list[int] = field(default_factory=list)
    strict: list[float] = field(default_factory=list)
    material: list[float] = field(default_factory=list)
    confidence: list[Array] = field(default_factory=list)
    right: list[Array] = field(default_factory=list)
    marks: list[tuple[int, str]] = field(default_factory=list)


def draw(trace: Trace, form: Format = "svg") -> bytes:
    """Draw the evidence over the labels, and accuracy and mean confidence below.

    Parameters
    ----------
    trace
        Of at least one label.
    form : "svg" or "png"
    """
    figure = Figure(figsize=(8.0, 5.6), facecolor="white", layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    for name, values, colour, alpha in (
        ("strict", trace.strict, BLUE, STRICT_ALPHA),
        ("material", trace.material, ORANGE, MATERIAL_ALPHA),
    ):
        above.plot(trace.labels, _log10(values), color=colour, label=f"{name} (alarm at 1/{alpha:g})")
        above.axhline(-math.log10(alpha), color=colour, linestyle=":", linewidth=1)
    above.set_yscale("symlog", linthresh=2.0)
    for position, text in trace.marks:
        for axes in (above, below):
            axes.axvline(position, color=FAINT, linewidth=1)
        above.annotate(
            text, (position, 1.0), (3, -4), xycoords=("data", "axes fraction"), textcoords="offset points",
            rotation=90, va="top", fontsize=8, color=INK,
        )  # fmt: skip
    above.set_ylabel("evidence, log₁₀ E (linear up to 2)")
    above.legend(loc="upper left", frameon=False)
    confidence, right = np.concatenate(trace.confidence), np.concatenate(trace.right)
    edges = np.linspace(0, len(right), min(BLOCKS, len(right)) + 1).astype(int)
    centres = (edges[:-1] + edges[1:]) / 2
    for name, each, colour in (("mean confidence", confidence, GREEN), ("accuracy", right, INK)):
        below.plot(centres, _means(each, edges), color=colour, label=name, drawstyle="steps-mid")
    below.set_xlabel("labels")
    below.legend(loc="lower left", frameon=False)
    return render(figure, form)


def _means(values: Array, edges: Array) -> Array:
    sums: Array = np.add.reduceat(values.astype(float), edges[:-1]) / np.diff(edges)
    return sums


def _log10(values: Sequence[float]) -> Array:
    found: Array = np.asarray(values) / math.log(10.0)
    return found
