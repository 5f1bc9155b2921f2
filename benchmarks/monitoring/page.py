"""Recorded results, the tables that `docs/monitoring.md` takes from them, and its images."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from boxcal.calibrators.evaluation.figure import BLUE, INK, ORANGE, render
from boxcal.calibrators.monitoring.calibration_test import CalibrationTest
from boxcal.calibrators.monitoring.figure import Trace, draw

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "monitoring.json"
IMAGES = ROOT / "docs" / "images"

TEN, HUNDRED, THOUSAND = (
    "cifar10_densenet40",
    "cifar100_densenetbc100",
    "tinyimagenet_mobilenet_v2_k1000",
)
TITLES = {
    TEN: "CIFAR-10, K = 10",
    HUNDRED: "CIFAR-100, K = 100",
    THOUSAND: "Tiny-ImageNet, K = 1,000",
    "eurosat_rgb": "EuroSAT, K = 10",
    "tinyimagenet_mobilenet_v2": "Tiny-ImageNet, K = 200",
}
DETECTORS = ("ADWIN on error", "ADWIN on NLL", "Page-Hinkley on error", "Page-Hinkley on NLL")
CHANGES = ("T 1.25", "T 1.5", "T 2", "label shift")
LOOPS = ("T 1.25", "T 1.5", "T 2", "label shift", "slow drift to T 2")
WINDOWS = {"calm": "intact", "T 2": "too confident (T 2)", "concept drift": "concept drift"}


def read() -> dict[str, Any]:
    """Give the recorded results: a figure by part, data set and name."""
    results: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    return results


def record(part: str, name: str, found: dict[str, Any]) -> None:
    """Record the results of a part on a data set, None where a median is infinite or there is none."""
    results = read()
    results.setdefault(part, {})[name] = {
        key: None if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in found.items()
    }
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")


def write() -> None:
    """Draw the images."""
    IMAGES.joinpath("monitoring-evidence.svg").write_bytes(_evidence())
    IMAGES.joinpath("monitoring-feedback.svg").write_bytes(_feedback())


def table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Write a Markdown table."""
    lines = [headings, ["---"] * len(headings), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def alarms() -> str:
    """List the shares of streams without a change that raise an alarm."""
    found, rows = read().get("null", {}), []
    tests = {
        "this test": ("this test 0.05", "this test 0.01"),
        "z-test every 100 labels": ("z-test 0.05", "z-test 0.01"),
        **{name: (name,) for name in DETECTORS},
    }
    columns = {
        "K = 10": (TEN, "calm"),
        "K = 10, harder inputs": (TEN, "harder"),
        "K = 100": (HUNDRED, "calm"),
        "K = 100, harder inputs": (HUNDRED, "harder"),
        "K = 1,000": (THOUSAND, "calm"),
    }
    columns = {title: column for title, column in columns.items() if column[0] in found}
    for title, keys in tests.items():
        cells = [
            " / ".join(_share(found[name].get(f"{inputs}, {key}")) for key in keys)
            for name, inputs in columns.values()
        ]
        rows.append([title, *cells])
    headings = ["", *columns]
    return table(headings, rows)


def delays() -> str:
    """List the median delays."""
    found, rows = read().get("delays", {}), []
    for name in [name for name in (TEN, HUNDRED) if name in found]:
        lines = {
            "this test": "this test",
            "this test, 9 unlabelled rows a label": "this test, unlabelled",
            "this test, after 10,000 calm labels": "this test, after calm",
            "plain product of bettors, after 10,000": "product, after calm",
            "z-test every 100 labels": "z-test",
            **{f"{one}, after 10,000": f"{one}, after calm" for one in DETECTORS},
        }
        for title, key in lines.items():
            cells = [_delay(found[name], f"{change}, {key}") for change in CHANGES]
            rows.append([f"K = {10 if name == TEN else 100}", title, *cells])
    return table(["", "", *CHANGES], rows)


def material() -> str:
    """List the labels to both alarms where the true test labels arrive."""
    found, rows = read().get("material", {}), []
    for name, own in found.items():
        for title in ("ts", "softmax"):
            cells = [_delay(own, f"{title}, {test}") for test in ("strict", "material")]
            rows.append([TITLES[name], f"`{title}`", f"{own[f'{title}, labels']:,.0f}", *cells])
    return table(["", "answers of", "labels", "strict", "material"], rows)


def duels() -> str:
    """List what duels decide."""
    found = read().get("duels", {})
    return table(
        ["", "duels of equals that were decided", "labels until `ts` wins against `softmax`"],
        (
            [TITLES[name], _share(own["equal NLL decided"]), _delay(own, "softmax against ts, median labels")]
            for name, own in found.items()
        ),
    )


def loops() -> str:
    """List what the loop makes of changes."""
    found, rows = read().get("loop", {}), []
    for name in [name for name in (TEN, HUNDRED) if name in found]:
        own = found[name]
        rows.append(
            [TITLES[name], f"{own['no change, streams with an activation']} of {own['streams']}"]
            + [_share(own[f"{title}, gap closed"]) for title in LOOPS]
            + [_share(own[f"{title} and back, first version again"]) for title in ("T 1.5", "label shift")]
        )
    headings = ["", "activations without a change", *LOOPS, "T 1.5, rolled back", "label shift, rolled back"]
    return table(headings, rows)


def intervals() -> str:
    """List the coverage of the interval of the accuracy."""
    found, rows = read().get("intervals", {}), []
    for name in [name for name in (TEN, HUNDRED) if name in found]:
        for key, title in WINDOWS.items():
            own = found[name]
            rows.append(
                [
                    TITLES[name], title, _share(own[f"{key}, accuracy"]), _share(own[f"{key}, width"]),
                    _share(own[f"{key}, error of mean confidence"]),
                ]
            )  # fmt: skip
    return table(["", "calibration", "coverage", "mean width", "mean error without labels"], rows)


def prior() -> str:
    """List the change of the NLL by prior adjustment."""
    found, rows = read().get("prior", {}), []
    for name in [name for name in (TEN, HUNDRED) if name in found]:
        for title in ("no shift", "label shift"):
            cells = [found[name][f"{title}, {key}"] for key in ("prior adjustment", "plain EM", "oracle")]
            rows.append([TITLES[name], title, *(f"{cell:+.4f}" for cell in cells)])
    return table(["", "", "prior adjustment", "plain EM", "true frequencies"], rows)


def feedback() -> str:
    """List the shares of false alarms by kind of feedback."""
    own = read().get("feedback", {}).get(TEN, {})
    return table(
        ["labels that arrive", "false alarms at .05"],
        ([title, _share(value)] for title, value in own.items() if title != "streams"),
    )


def speed() -> str:
    """List the time that the test takes for a label."""
    found = read().get("speed", {})
    return table(
        ["", "µs per label"],
        (
            [TITLES[name], f"{found[name]['microseconds']:.1f}"]
            for name in (TEN, HUNDRED, THOUSAND)
            if name in found
        ),
    )


TABLES: Mapping[str, Callable[[], str]] = {
    "monitoring_alarms": alarms,
    "monitoring_delays": delays,
    "monitoring_material": material,
    "monitoring_duels": duels,
    "monitoring_loops": loops,
    "monitoring_intervals": intervals,
    "monitoring_prior": prior,
    "monitoring_feedback": feedback,
    "monitoring_speed": speed,
}
"""Generated parts of `docs/monitoring.md`, by name."""


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def _delay(found: Mapping[str, Any], key: str) -> str:
    """Write a median; a detector that raised an alarm before the change in most streams detects nothing."""
    false = found.get(f"{key}: alarm before the change", 0.0)
    if false > 0.5:
        return f"false alarm before in {false:.0%}"
    value = found.get(key, math.nan)
    if key not in found:
        return ""
    return "never" if value is None else f"{value:,.0f}"


def _evidence() -> bytes:
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


def _feedback() -> bytes:
    own = read().get("feedback", {}).get(TEN, {})
    titles = [title for title in own if title != "streams"]
    shares = [own[title] for title in titles]
    figure = Figure(figsize=(8.0, 4.4), facecolor="white", layout="constrained")
    axes = figure.subplots()
    axes.barh(titles, shares, color=[BLUE if share <= 0.064 else ORANGE for share in shares])
    axes.axvline(0.05, color=INK, linestyle=":", linewidth=1)
    axes.invert_yaxis()
    axes.set_xlabel("share of streams with a false alarm; dotted: the level of the test, .05")
    return render(figure, "svg")
