"""`boxcal fit`: a validation file to a calibrator and its report, through a service or on this machine."""

# ruff: noqa: PLC0415 - help needs none of what is imported late

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from boxcal.app.cli import options
from boxcal.app.cli.output import (
    UsageError,
    check_outputs,
    escape,
    messages,
    metrics_table,
    naming,
    plain_table,
    progress_bar,
    screen,
    show_warnings,
    write_json,
)
from boxcal.app.cli.validation import joined

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True)
class FinishedFit:
    """What a fit gives, wherever it ran; `fit` is the service's record of it, empty where none took part."""

    method: str
    report: dict[str, Any]
    artifact: bytes
    diagram: bytes
    fit: dict[str, Any]


def fit(
    file: options.ValidationFile,
    *,
    method: Annotated[
        str,
        typer.Option(help="Calibration method, for example `ts+pb`; `auto` mixes some by cross-validation."),
    ] = "auto",
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Save the calibrator to this file (safetensors).")
    ] = None,
    report: Annotated[Path | None, typer.Option(help="Save the report to this file (JSON).")] = None,
    diagram: Annotated[
        Path | None, typer.Option(help="Save the reliability diagram to this file (SVG).")
    ] = None,
    html: Annotated[Path | None, typer.Option(help="Save the report to this file as a web page.")] = None,
    activate: Annotated[
        Literal["if_better", "always", "never"],
        typer.Option(help="With --url: when to activate the new calibrator."),
    ] = "if_better",
    budget_seconds: Annotated[
        float,
        typer.Option(
            min=0.001, max=3600, help="Processor seconds after which `auto` begins no further method."
        ),
    ] = 120.0,
    labels: options.Labels = None,
    scores: options.Scores = None,
    label: options.LabelColumn = None,
    group: options.GroupColumn = None,
    classes: options.ClassColumns = None,
    ignore: options.Ignored = None,
    labels_as: options.LabelsAs = None,
    class_mix: options.ClassMix = None,
    url: options.Url = None,
    as_json: options.Json = False,
) -> None:
    """Fit a calibrator to validation data and report its effect on data that the fit did not use."""
    declared = options.declared_of(
        scores=scores,
        label=label,
        group=group,
        classes=classes,
        ignore=ignore,
        labels_as=labels_as,
        class_mix=class_mix,
    )
    check_outputs([output, report, diagram, html], file, labels)
    with joined(file, labels) as source:
        if url is None:
            with naming(file):
                fitted = _here(
                    source,
                    method,
                    draws=bool(diagram or html),
                    budget_seconds=budget_seconds,
                    declared=declared,
                )
        elif classes is not None:
            raise UsageError("--classes names columns where there is no model; the service has one")
        else:
            fitted = _through_service(
                source,
                url,
                method=method,
                activate=activate,
                budget_seconds=budget_seconds,
                scores=scores,
                label=label,
                group=group,
                ignore=declared.ignore,
                labels_as=labels_as,
                class_mix=class_mix,
            )
    saved = [
        (path, content)
        for path, content in (
            (output, fitted.artifact),
            (report, json.dumps(fitted.report, indent=1, allow_nan=False).encode()),
            (diagram, fitted.diagram),
            (html, _page(fitted) if html else b""),
        )
        if path is not None
    ]
    for path, content in saved:
        path.write_bytes(content)
        messages().print(f"saved {escape(str(path))}", soft_wrap=True)
    if columns := fitted.report["fit"].get("columns"):
        messages().print(f"[dim]{escape(file.name)}: columns {escape(columns)}", soft_wrap=True)
    if as_json:
        write_json({"method": fitted.method, "fit": fitted.fit or None, "report": fitted.report})
    else:
        _show(fitted)


def _page(fitted: FinishedFit) -> bytes:
    from boxcal.calibrators.evaluation.html_report import html_report

    version, decision = fitted.fit.get("calibrator"), str(fitted.fit.get("decision") or "")
    title = "Calibration report" if version is None else f"Calibrator {version}"
    return html_report(fitted.report, fitted.diagram, title=title, decision=decision).encode()


def _here(file: Path, method: str, *, draws: bool, **asked: Any) -> FinishedFit:
    from boxcal.app.cli.settings import read_settings
    from boxcal.app.fitting.worker.reading import fit_file
    from boxcal.calibrators.evaluation.reliability import reliability_svg
    from boxcal.calibrators.method import parse

    if method != "auto":
        parse(method)  # a mistyped name is told before a large file is read
    with tempfile.TemporaryDirectory(prefix="boxcal-") as folder, progress_bar("fitting") as advance:
        fitted = fit_file(file, Path(folder), read_settings(), method, advance, **asked)
    svg = reliability_svg(fitted.report) if draws else b""
    return FinishedFit(fitted.method, fitted.report, fitted.artifact, svg, {})


def _through_service(file: Path, url: str, **asked: Any) -> FinishedFit:
    from boxcal.app.client import BoxcalClient

    with BoxcalClient(url) as client:
        queued = client.fit(file, **asked)
        with progress_bar("fitting") as advance:
            done = client.wait_for_fit(queued.id, lambda fit: advance(fit.progress, fit.stage or ""))
        version = done.version
        return FinishedFit(
            client.calibrator(version).method,
            client.report(version),
            client.artifact(version),
            client.reliability_diagram(version),
            done.model_dump(mode="json"),
        )


def _candidates_table(candidates: Sequence[dict[str, Any]]) -> Table:
    table = plain_table("candidate", "parameters", "cross-validated NLL", "weight", "status")
    for one in candidates:
        nll = "" if one["nll"] is None else f"{one['nll']:.4f}"
        weight = f"{one['weight']:.2f}" if one["weight"] else ""
        table.add_row(escape(one["method"]), str(one["parameters"]), nll, weight, one["status"])
    return table


def _events_table(events: dict[str, Any]) -> Table:
    """Lay out the calibration of the probability of the second of two classes."""
    table = plain_table("second class", "before", "after")
    for title, name in (("observed / expected", "ratio"), ("intercept", "intercept"), ("slope", "slope")):
        cells = []
        for side in ("before", "after"):
            found = events[side][name]
            known = found["value"] is not None
            shown = (
                f"{found['value']:.3f} ({found['low']:.3f} to {found['high']:.3f})" if known else "unknown"
            )
            cells.append(shown)
        table.add_row(title, *cells)
    return table


def _show(fitted: FinishedFit) -> None:
    from boxcal.calibrators.evaluation.verdict import sentence

    report = fitted.report
    serious = [warning for warning in report["warnings"] if warning["severity"] == "serious"]
    show_warnings(serious)
    screen().print(f"[bold]{escape(sentence(report))}[/]", soft_wrap=True)
    unseen = f"judged on {report['samples']} samples, each unseen by the fit that calibrated it"
    screen().print(f"{escape(fitted.method)}, {unseen}", soft_wrap=True)
    screen().print(metrics_table(report["metrics"]))
    if report.get("events"):
        screen().print(_events_table(report["events"]))
    screen().print(f"{report['changed_labels']} labels changed, {report['ties']} ties")
    choice = report["fit"]["choice"]
    if choice:
        screen().print(f"auto: {escape(choice['why'])}", soft_wrap=True)
        screen().print(_candidates_table(choice["candidates"]))
    show_warnings(warning for warning in report["warnings"] if warning not in serious)
    if fitted.fit:
        screen().print(
            f"calibrator {fitted.fit['calibrator']}: {escape(str(fitted.fit.get('decision', '')))}"
        )
