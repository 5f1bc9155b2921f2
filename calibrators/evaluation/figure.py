"""Reliability diagrams as pictures: the data of `reliability.py` drawn by matplotlib's object interface.

No pyplot and no global state, so threads may draw at once; matplotlib is imported on the first drawing only.
"""

from __future__ import annotations

import io
from typing import Any, Literal

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

Format = Literal["svg", "png"]

INK = "#1f2933"
FAINT = "#9aa5b1"
BAND = "#d9dee4"
BLUE = "#1f6fb4"
GREEN = "#2a8f5b"
ORANGE = "#c8601b"
PURPLE = "#7b4fa3"
METRIC_NAMES = {"ece_width": "ewECE", "ece_mass": "emECE", "smooth_ece": "smECE"}


def draw_report(report: dict[str, Any], form: Format = "svg") -> bytes:
    """Draw a report's top-label reliability, before beside after.

    Parameters
    ----------
    report : dict
        What `Report.to_dict` gives.
    form : "svg" or "png"

    Returns
    -------
    bytes
        The picture.
    """
    figure = Figure(figsize=(11.0, 7.4), facecolor="white")
    grid = figure.add_gridspec(
        2, 2, height_ratios=(4.2, 1), hspace=0.09, wspace=0.16, left=0.07, right=0.985, top=0.86, bottom=0.135
    )
    titles = {"before": "Before: softmax of the logits", "after": f"After: {report['method']}"}
    tallest = max(max(report["reliability"][when]["histogram"]["counts"]) for when in titles)
    for column, (when, title) in enumerate(titles.items()):
        diagram = figure.add_subplot(grid[0, column])
        histogram = figure.add_subplot(grid[1, column], sharex=diagram)
        data = report["reliability"][when]
        draw_diagram(diagram, data)
        draw_histogram(histogram, data, tallest)
        diagram.set_title(title, loc="left", fontsize=13, fontweight="bold", color=INK, pad=8)
        if when == "after":
            draw_bounds(diagram, report["bounds"], report["classes"])
        metrics = {name: values[when] for name, values in report["metrics"].items()}
        write_metrics(diagram, metrics)
        if column == 0:
            diagram.set_ylabel("accuracy", color=INK)
            histogram.set_ylabel("samples", color=INK)
    figure.text(
        0.07,
        0.945,
        f"Top-label reliability, {report['samples']:,} samples, {report['classes']:,} classes,"
        f" cross-fitted in {report['folds']} folds",
        fontsize=11,
        color=INK,
    )
    add_legend(figure)
    return render(figure, form)


def draw_diagram(axes: Axes, data: dict[str, Any]) -> None:
    """Draw bin means, smooth curve and the band of perfect calibration into square axes."""
    curve = data["curve"]
    axes.fill_between(curve["confidence"], curve["band_low"], curve["band_high"], color=BAND, lw=0, zorder=1)
    axes.plot([0, 1], [0, 1], color=FAINT, lw=1, ls=(0, (4, 3)), zorder=2)
    axes.plot(curve["confidence"], curve["accuracy"], color=BLUE, lw=2, zorder=4)
    for part in data["bins"]:
        axes.plot(
            [part["confidence"]] * 2,
            [part["accuracy_low"], part["accuracy_high"]],
            color=ORANGE,
            lw=1.2,
            alpha=0.75,
            zorder=3,
        )
        axes.plot(
            part["confidence"],
            part["accuracy"],
            marker="o",
            ms=4 + 7 * (part["count"] / data["samples"]) ** 0.5,
            color=ORANGE,
            mec="white",
            mew=0.8,
            zorder=5,
        )
    axes.set(xlim=(0, 1), ylim=(0, 1))
    axes.tick_params(labelbottom=False, colors=INK)
    _plain(axes)


def draw_histogram(axes: Axes, data: dict[str, Any], tallest: int) -> None:
    """Draw how many samples have which confidence, with the accuracy and the mean confidence marked."""
    counts = data["histogram"]["counts"]
    width = 1 / len(counts)
    axes.bar(
        [(i + 0.5) * width for i in range(len(counts))], counts, width=width * 0.9, color=FAINT, zorder=2
    )
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
    )
    axes.set(ylim=(0, tallest * 1.12))
    axes.set_xlabel("confidence (probability of the predicted label)", color=INK)
    axes.tick_params(colors=INK)
    _plain(axes)


def draw_bounds(axes: Axes, bounds: dict[str, Any], classes: int) -> None:
    """Draw the learned upper bound, and the ceiling that the lower bounds of the other classes leave."""
    upper = bounds["upper"]["mean"]
    ceiling = 1 - (classes - 1) * bounds["lower"]["mean"]
    if upper < 1:
        axes.axvline(upper, color=INK, lw=1.1, ls=":", zorder=3)
        axes.text(
            upper - 0.012,
            0.02,
            f"upper bound {upper:.4g}",
            rotation=90,
            ha="right",
            va="bottom",
            fontsize=8.5,
        )
    if bounds["lower"]["mean"] > 0 and ceiling < 1:
        axes.axvline(ceiling, color=INK, lw=1.1, ls="-.", zorder=3)
        axes.text(
            ceiling - 0.012,
            0.98 if False else 0.02,
            f"ceiling {ceiling:.4g} left by lower bound {bounds['lower']['mean']:.3g}",
            rotation=90,
            ha="right",
            va="bottom",
            fontsize=8.5,
        )


def write_metrics(axes: Axes, metrics: dict[str, dict[str, Any]]) -> None:
    """Write each calibration error with its interval and its value under perfect calibration."""
    lines = []
    for name, label in METRIC_NAMES.items():
        values = metrics[name]
        lines.append(
            f"{label}  {percent(values['value'])}  [{percent(values['low'])}, {percent(values['high'])}]"
            f"   perfect: {percent(values['perfect'])}"
        )
    lines.append(f"error rate  {percent(metrics['error_rate']['value'])}")
    nll = metrics["nll"]["value"]
    lines.append(f"NLL  {nll:.4f}" if nll is not None else "NLL  infinite")
    axes.text(
        0.03,
        0.97,
        "\n".join(lines),
        transform=axes.transAxes,
        va="top",
        fontsize=9,
        color=INK,
        linespacing=1.5,
        bbox={"boxstyle": "round,pad=0.45", "facecolor": "white", "edgecolor": BAND, "alpha": 0.92},
        zorder=6,
    )


def add_legend(figure: Figure) -> None:
    """Explain the marks, below the diagrams."""
    figure.legend(
        handles=[
            Line2D([], [], color=ORANGE, marker="o", mec="white", lw=1.2, label="bin mean, 95 % interval"),
            Line2D([], [], color=BLUE, lw=2, label="smoothed accuracy"),
            Patch(color=BAND, label="95 % band if perfectly calibrated"),
            Line2D([], [], color=GREEN, lw=1.8, label="accuracy"),
            Line2D([], [], color=PURPLE, lw=1.8, ls=(0, (3, 1.5)), label="mean confidence"),
        ],
        loc="lower center",
        ncols=5,
        frameon=False,
        fontsize=9,
        labelcolor=INK,
    )


def percent(share: float | None) -> str:
    """Write a share as a percentage with two decimals."""
    return "-" if share is None else f"{100 * share:.2f} %"


def render(figure: Figure, form: Format) -> bytes:
    """Return the figure as the bytes of an SVG document (the same for the same data) or a PNG picture."""
    stream = io.BytesIO()
    with mpl.rc_context({"svg.hashsalt": "boxcal", "svg.fonttype": "path"}):
        figure.savefig(stream, format=form, dpi=150, metadata={"Date": None} if form == "svg" else None)
    return stream.getvalue()


def _plain(axes: Axes) -> None:
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(FAINT)
    axes.grid(color="#eef1f4", lw=0.8, zorder=0)
    axes.set_axisbelow(True)
