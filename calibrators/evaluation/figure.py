"""Draws the data of `reliability.py` with the object interface of matplotlib.

Only `plot_reliability` without axes uses pyplot; no other figure stays in memory. Threads can draw
concurrently; only the serialisation is locked, because its settings are global in matplotlib.
"""

from __future__ import annotations

import io
import threading
from collections.abc import Iterable
from itertools import pairwise
from typing import Any, Literal

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

Format = Literal["svg", "png"]

INK = "#1f2933"
FAINT = "#9aa5b1"
BAND = "#d9dee4"
BLUE = "#1f6fb4"
GREEN = "#2a8f5b"
ORANGE = "#c8601b"
PURPLE = "#7b4fa3"
_writing = threading.Lock()
FARTHEST = 1e-6
"""Probabilities nearer to 0 and 1 are not shown along log odds."""
ODDS_TICKS = [1e-5, 1e-4, 1e-3, 0.01, 0.1, 0.5, 0.9, 0.99, 0.999, 1 - 1e-4, 1 - 1e-5]
METRIC_NAMES = {"ece_width": "ewECE", "ece_mass": "emECE", "smooth_ece": "smECE"}


def draw_report(report: dict[str, Any]) -> Figure:
    """Draw the reliability of a report, before and after calibration.

    It is that of the predicted label, or that of the second of two classes along its log odds. `report`: what
    `Report.to_dict` gives.
    """
    events = report.get("events")
    figure = Figure(figsize=(11.0, 8.6), facecolor="white")
    grid = figure.add_gridspec(
        2,
        2,
        height_ratios=(4.4, 1),
        hspace=0.08,
        wspace=0.14,
        left=0.065,
        right=0.985,
        top=0.79,
        bottom=0.125,
    )
    titles = {"before": "Before: softmax", "after": f"After: {report['method']}"}
    tallest = max(max(report["reliability"][when]["histogram"]["counts"]) for when in titles)
    for column, (when, title) in enumerate(titles.items()):
        diagram = figure.add_subplot(grid[0, column])
        histogram = figure.add_subplot(grid[1, column], sharex=diagram)
        data = report["reliability"][when]
        if events:
            draw_events(diagram, events[when], event_limits(events.values()))
            draw_event_histogram(histogram, events[when]["histogram"])
        else:
            draw_diagram(diagram, data)
            draw_histogram(histogram, data, tallest)
        write_heading(diagram, title, {name: values[when] for name, values in report["metrics"].items()})
        if when == "after":
            draw_bounds(diagram, report["bounds"], report["classes"])
        if column == 0:
            diagram.set_ylabel("observed share of the second class" if events else "accuracy", color=INK)
            histogram.set_ylabel("samples", color=INK)
    write_caption(figure, report)
    marks = bound_marks(report["bounds"], report["classes"])
    add_legend(figure, EVENT_MARKS if events else BAR_MARKS, height=0.022 if marks else 0.0)
    if marks:
        add_legend(figure, marks)
    return figure


def plot_reliability(data: dict[str, Any], axes: Axes | None, title: str) -> Axes:
    """Draw one reliability diagram, without its histogram, in the axes given or in new ones of pyplot."""
    if axes is None:
        import matplotlib.pyplot as plt  # noqa: PLC0415 - selects a backend

        axes = plt.subplots()[1]
    draw_diagram(axes, data)
    axes.tick_params(labelbottom=True)
    axes.set(title=title, xlabel="confidence", ylabel="accuracy")
    return axes


def draw_curve(axes: Axes, curve: dict[str, Any]) -> None:
    """Draw the diagonal, a smooth curve and its band, where there are enough samples."""
    axes.plot([0, 1], [0, 1], color=FAINT, lw=1, ls=(0, (4, 3)), zorder=2)
    for run in _runs(curve["confidence"]):
        confidence = curve["confidence"][run]
        limits = curve["band_low"][run], curve["band_high"][run]
        axes.fill_between(confidence, *limits, color=BAND, lw=0, zorder=1)
        axes.plot(confidence, curve["accuracy"][run], color=BLUE, lw=2, zorder=4)


def _runs(mesh: list[float]) -> list[slice]:
    """Return the parts of a mesh without gaps."""
    steps = [after - before for before, after in pairwise(mesh)]
    least = min(steps, default=0.0)
    ends = [i + 1 for i, step in enumerate(steps) if step > 1.5 * least]
    return [slice(start, end) for start, end in pairwise([0, *ends, len(mesh)])]


def draw_bins(axes: Axes, bins: list[dict[str, Any]], samples: int) -> None:
    """Draw each bin's mean, larger for more samples, and the interval of its accuracy."""
    confidence, accuracy, low, high, count = (
        [part[name] for part in bins]
        for name in ("confidence", "accuracy", "accuracy_low", "accuracy_high", "count")
    )
    sizes = [(4 + 7 * (each / samples) ** 0.5) ** 2 for each in count]
    axes.vlines(confidence, low, high, colors=ORANGE, lw=1.2, alpha=0.6, zorder=3)
    axes.scatter(confidence, accuracy, sizes, ORANGE, edgecolors="white", lw=0.8, clip_on=False, zorder=5)


def draw_diagram(axes: Axes, data: dict[str, Any]) -> None:
    """Draw bin means, the smooth curve and the band of perfect calibration in square axes."""
    draw_curve(axes, data["curve"])
    draw_bins(axes, data["bins"], data["samples"])
    axes.set(xlim=(0, 1), ylim=(0, 1))
    axes.tick_params(labelbottom=False, colors=INK)
    _plain(axes)


def draw_histogram(axes: Axes, data: dict[str, Any], tallest: int) -> None:
    """Draw the histogram of the confidence, the accuracy and the mean confidence."""
    counts = data["histogram"]["counts"]
    width = 1 / len(counts)
    corners = ((0.05, 0), (0.05, 1), (0.95, 1), (0.95, 0))
    bars = [[((i + x) * width, y * count) for x, y in corners] for i, count in enumerate(counts)]
    axes.add_collection(PolyCollection(bars, facecolors=FAINT, linewidths=0, zorder=2))
    accuracy, confidence = data["accuracy"], data["mean_confidence"]
    axes.axvline(accuracy, color=GREEN, lw=1.8, zorder=3)
    axes.axvline(confidence, color=PURPLE, lw=1.8, ls=(0, (3, 1.5)), zorder=3)
    gap = confidence - accuracy
    side = "right" if max(accuracy, confidence) > 0.5 else "left"
    edge = min(accuracy, confidence) - 0.012 if side == "right" else max(accuracy, confidence) + 0.012
    axes.text(
        edge,
        tallest * 1.0,
        f"accuracy {accuracy:.3f}\nmean confidence {confidence:.3f}\n({gap:+.3f})",
        ha=side,
        va="top",
        fontsize=8.5,
        color=INK,
        linespacing=1.3,
        bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1.5},
        zorder=4,
    )
    axes.set(ylim=(0, tallest * 1.12))
    axes.set_xlabel("confidence (probability of the predicted label)", color=INK)
    axes.tick_params(colors=INK)
    _plain(axes)


def event_limits(sides: Iterable[dict[str, Any]]) -> tuple[float, float]:
    """Give the range of an axis of log odds that shows every bin and interval, of rare events too."""
    bins = [part for side in sides for part in side["bins"]]
    shown = [
        part[name] for part in bins for name in ("probability", "observed", "observed_low", "observed_high")
    ]
    inside = [value for value in shown if FARTHEST < value < 1.0 - FARTHEST]
    low, high = min([0.25, *inside]), max([0.75, *inside])
    return low / (low + 2.0 * (1.0 - low)), high / (high + 0.5 * (1.0 - high))


def draw_events(axes: Axes, side: dict[str, Any], limits: tuple[float, float]) -> None:
    """Draw the bins of an event's probability along its log odds; a share of 0 or 1 stands at the edge."""
    axes.set(xscale="logit", yscale="logit", xlim=limits, ylim=limits)
    axes.plot(limits, limits, color=FAINT, lw=1, ls=(0, (4, 3)), zorder=2)
    total = sum(part["count"] for part in side["bins"])
    names = {"confidence": "probability", "accuracy": "observed"}
    names |= {f"accuracy_{end}": f"observed_{end}" for end in ("low", "high")}
    shown = [
        {name: min(max(part[of], limits[0]), limits[1]) for name, of in names.items()}
        | {"count": part["count"]}
        for part in side["bins"]
    ]
    draw_bins(axes, shown, total)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(FixedLocator([tick for tick in ODDS_TICKS if limits[0] <= tick <= limits[1]]))
        axis.set_major_formatter(FuncFormatter(lambda tick, _: f"{100 * tick:g} %"))
        axis.set_minor_locator(NullLocator())
    axes.tick_params(labelbottom=False, colors=INK)
    _plain(axes)


def draw_event_histogram(axes: Axes, histogram: dict[str, Any]) -> None:
    """Draw how many samples with and without the event have which probability, on a logarithmic scale."""
    for name, color in (("others", FAINT), ("events", GREEN)):
        axes.stairs(histogram[name], histogram["edges"], color=color, fill=name == "others", lw=1.6, zorder=3)
    axes.set_yscale("log")
    axes.set_ylim(bottom=0.7)
    axes.set_xlabel("probability of the second class", color=INK)
    axes.tick_params(colors=INK)
    _plain(axes)


def learned_bounds(bounds: dict[str, Any], classes: int) -> list[tuple[float, str, str]]:
    """Return position, line style and name of each learned bound on the confidence.

    An upper bound applies to every class. Lower bounds of the other classes limit the predicted one from
    above.
    """
    upper, lower = bounds["upper"], bounds["lower"]
    found = []
    if upper["mean"] < 1:
        name = f"upper bound {upper['mean']:.4g}: holds {upper['samples']:,} samples"
        found.append((upper["mean"], ":", name))
    ceiling = 1 - (classes - 1) * lower["mean"]
    if lower["mean"] > 0 and ceiling > 0:
        name = f"lower bound {lower['mean']:.3g} (leaves {ceiling:.4g}): lifts {lower['samples']:,} samples"
        found.append((ceiling, "-.", name))
    return found


def draw_bounds(axes: Axes, bounds: dict[str, Any], classes: int) -> None:
    """Draw the learned bounds on the confidence, as their mean over folds and samples."""
    for position, style, _ in learned_bounds(bounds, classes):
        # A ceiling on the probability of either of two classes is a floor under that of the other.
        for place in (position, 1.0 - position) if classes == 2 else (position,):
            axes.axvline(place, color=INK, lw=1.2, ls=style, zorder=6)


def bound_marks(bounds: dict[str, Any], classes: int) -> list[Line2D]:
    """Legend entries of the learned bounds."""
    return [
        Line2D([], [], color=INK, lw=1.2, ls=style, label=name)
        for _, style, name in learned_bounds(bounds, classes)
    ]


def write_heading(axes: Axes, title: str, metrics: dict[str, dict[str, Any]]) -> None:
    """Write a panel's title, and each calibration error with its interval and its value if calibrated."""
    place: dict[str, Any] = {"transform": axes.transAxes, "color": INK}
    axes.text(0, 1.225, title, fontsize=13, fontweight="bold", va="bottom", **place)
    for line, (name, label) in enumerate(METRIC_NAMES.items()):
        values = metrics[name]
        text = (
            f"{percent(values['value'])}  [{percent(values['low'])}, {percent(values['high'])}];"
            f"  {percent(values['perfect'])} if calibrated"
        )
        height = 1.165 - 0.055 * line
        axes.text(0, height, label, fontsize=9.5, fontweight="bold", **place)
        axes.text(0.12, height, text, fontsize=9.5, **place)
    nll = metrics["nll"]["value"]
    loss = f"NLL {nll:.4f}" if nll is not None else "NLL infinite"
    side = f"error rate {percent(metrics['error_rate']['value'])}   {loss}"
    axes.text(1, 1.225, side, fontsize=9.5, ha="right", va="bottom", **place)


def write_caption(figure: Figure, report: dict[str, Any]) -> None:
    """Write the caption above all panels."""
    of = "Reliability of the second class" if report.get("events") else "Top-label reliability"
    text = (
        f"{of}: {report['samples']:,} samples, {report['classes']:,} classes,"
        f" each judged by a fit that never saw it ({report['folds']} folds)"
    )
    figure.text(0.065, 0.965, text, fontsize=11, color=INK)


BAR_MARKS = [
    Line2D([], [], color=ORANGE, marker="o", mec="white", lw=1.2, label="bin mean, 95 % interval"),
    Line2D([], [], color=BLUE, lw=2, label="smoothed accuracy"),
    Patch(color=BAND, label="95 % band if calibrated"),
    Line2D([], [], color=GREEN, lw=1.8, label="accuracy"),
    Line2D([], [], color=PURPLE, lw=1.8, ls=(0, (3, 1.5)), label="mean confidence"),
]
EVENT_MARKS = [
    BAR_MARKS[0],
    Line2D([], [], color=FAINT, ls=(0, (4, 3)), label="calibrated"),
    Line2D([], [], color=GREEN, lw=1.6, label="samples of the second class"),
    Patch(color=FAINT, label="samples of the first class"),
]


def add_legend(figure: Figure, marks: list[Any], height: float = 0.0) -> None:
    """Add the legend below the diagrams."""
    figure.legend(
        handles=marks,
        loc="lower center",
        bbox_to_anchor=(0.5, height),
        ncols=5,
        frameon=False,
        fontsize=9,
        labelcolor=INK,
    )


def percent(share: float | None) -> str:
    """Write a share as a percentage with two decimals."""
    return "-" if share is None else f"{100 * share:.2f} %"


def render(figure: Figure, form: Format) -> bytes:
    """Return the figure as the bytes of an SVG document (the same for the same data) or a PNG image."""
    stream = io.BytesIO()
    with _writing, mpl.rc_context({"svg.hashsalt": "boxcal", "svg.fonttype": "path"}):
        settings = {"metadata": {"Date": None}} if form == "svg" else {"pil_kwargs": {"compress_level": 3}}
        figure.savefig(stream, format=form, dpi=150, **settings)
    return stream.getvalue()


def _plain(axes: Axes) -> None:
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(FAINT)
    axes.grid(color="#eef1f4", lw=0.8, zorder=0)
    axes.set_axisbelow(True)
