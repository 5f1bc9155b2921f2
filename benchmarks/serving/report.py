"""Computes percentiles of the rounds; writes a table and a plot of latency against load."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib import pyplot

from benchmarks.serving.contestants import OURS, TASKS

PERCENTILES = (50, 99)


def condense(round_: dict[str, Any]) -> dict[str, Any]:
    """Replace every list of latencies by its count and percentiles in milliseconds."""
    servers = {}
    for name, server in round_["servers"].items():
        phases = []
        for phase in server["phases"]:
            milliseconds = 1000 * np.array(phase["latencies"] or [np.nan])
            phases.append(
                {
                    "name": phase["name"],
                    "rate": phase["rate"],
                    "answered": len(phase["latencies"]),
                    "throughput": len(phase["latencies"]) / phase["elapsed"],
                    "failures": phase["failures"],
                    **{f"p{p}_ms": float(np.percentile(milliseconds, p)) for p in PERCENTILES},
                }
            )
        servers[name] = {"phases": phases}
    return {"limits": round_["limits"], "servers": servers}


def _phases(results: dict[str, Any], server: str, phase: str) -> list[dict[str, Any]]:
    return [
        {**each, "of_limit": each["throughput"] / round_["limits"]["limit"]}
        for round_ in results["rounds"]
        if server in round_["servers"]
        for each in round_["servers"][server]["phases"]
        if each["name"] == phase
    ]


def _servers(results: dict[str, Any]) -> list[str]:
    names = dict.fromkeys(name for round_ in results["rounds"] for name in round_["servers"])
    return sorted(names, key=lambda name: -_median(_phases(results, name, "saturation"), "throughput"))


def _median(phases: list[dict[str, Any]], key: str) -> float:
    return float(median(phase[key] for phase in phases))


def table(task: str, results: dict[str, Any]) -> str:
    limits = {
        key: median(r["limits"][key] for r in results["rounds"]) for key in results["rounds"][0]["limits"]
    }
    told = ", ".join(f"{key.replace('_', ' ')} {value:,.1f}/s" for key, value in limits.items())
    lines = [
        f"{task}: {len(results['rounds'])} rounds; {told}",
        "",
        "| server | req/s | of the limit | round by round | p50 ms | p99 ms | lone p50 ms | failures "
        "| memory MiB |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name in _servers(results):
        saturated, lone = _phases(results, name, "saturation"), _phases(results, name, "lone")
        memory = results["memory_bytes"][name]
        failures = sum(sum(phase["failures"].values()) for phase in [*saturated, *lone])
        shown = f"**{name}**" if name == OURS else name
        shares = ", ".join(f"{phase['of_limit']:.3f}" for phase in saturated)
        lines.append(
            f"| {shown} | {_median(saturated, 'throughput'):,.1f} | {_median(saturated, 'of_limit'):.3f} "
            f"| {shares} | {_median(saturated, 'p50_ms'):.1f} | {_median(saturated, 'p99_ms'):.1f} "
            f"| {_median(lone, 'p50_ms'):.2f} | {failures} | {memory / 2**20:,.0f} |"
        )
    return "\n".join(lines)


def plot(folder: Path, target: Path) -> None:
    """Plot p50 and p99 against the load as a share of the limit, one file per task."""
    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "serving"
    files = [(task, folder / f"serving-{task}.json") for task in TASKS]
    found = [(task, json.loads(file.read_text())) for task, file in files if file.exists()]
    if not found:
        return
    names = sorted({name for _, results in found for name in _servers(results)})
    figure, axes = pyplot.subplots(1, len(found), figsize=(6.2 * len(found), 4.6), squeeze=False)
    for axis, (task, results) in zip(axes[0], found, strict=True):
        for name in _servers(results):
            rates = [
                phase["name"]
                for phase in next(r for r in results["rounds"] if name in r["servers"])["servers"][name][
                    "phases"
                ]
                if phase["rate"] is not None
            ]
            shares = [float(rate.partition("%")[0]) / 100 for rate in rates]
            style = {"color": f"C{names.index(name)}", "linewidth": 2.4 if name == OURS else 1.2}
            for percentile, line in (("p50_ms", "-"), ("p99_ms", "--")):
                values = [_median(_phases(results, name, rate), percentile) for rate in rates]
                label = name if percentile == "p50_ms" else None
                axis.plot(shares, values, line, marker=".", label=label, **style)
        axis.set_yscale("log", subs=(2, 5))
        axis.yaxis.set_major_formatter("{x:g}")
        axis.yaxis.set_minor_formatter("{x:g}")
        axis.set(xlabel="offered load, share of the offline limit", ylabel="latency, ms")
        axis.set_title({"images": "JPEG → top 5", "logits": "1000 logits → 1000 probabilities"}[task])
        axis.grid(visible=True, which="both", alpha=0.25)
        axis.legend(title="p50 —, p99 - -", fontsize=8)
    figure.tight_layout()
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, metadata={"Date": None})
    pyplot.close(figure)
