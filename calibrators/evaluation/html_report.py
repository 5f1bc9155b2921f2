"""Reports, comparisons and fits as HTML, without scripts and without anything that must be fetched."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from boxcal.calibrators.evaluation.verdict import sentence

if TYPE_CHECKING:
    from boxcal.calibrators.fitting import FitResult

NAMES = {
    "nll": "NLL, nats",
    "brier": "Brier score",
    "error_rate": "Error rate",
    "smooth_ece": "Smooth ECE",
    "ece_width": "ECE, bins of equal width",
    "ece_mass": "ECE, bins of equal mass",
    "debiased_ece": "Debiased ECE",
    "classwise_ece": "Classwise ECE",
    "mce": "Largest gap of a bin",
    "ks": "Kolmogorov-Smirnov error",
    "brier_calibration": "Brier score: calibration",
    "brier_refinement": "Brier score: refinement",
}

STYLE = """
:root { color-scheme: light dark; --line: #d9dee4; --soft: #f4f6f8; --faint: #5f6b78; --good: #1c7a4a;
  --bad: #b3261e; }
@media (prefers-color-scheme: dark) {
  :root { --line: #3a424c; --soft: #22272e; --faint: #9aa5b1; --good: #58c08b; --bad: #ff8a80; } }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; margin-bottom: .2rem; } h2 { font-size: 1.15rem; margin-top: 2rem; }
.verdict { border-left: .3rem solid var(--faint); background: var(--soft); padding: .7rem 1rem; }
.better { border-color: var(--good); } .serious { color: var(--bad); font-weight: 600; }
.lower { color: var(--good); } .higher { color: var(--bad); } .faint { color: var(--faint); }
.table { overflow-x: auto; } table { border-collapse: collapse; width: 100%; font-size: .93rem; }
th, td { padding: .35rem .6rem; border-bottom: 1px solid var(--line); }
th, td { text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
img { width: 100%; height: auto; background: white; border: 1px solid var(--line); }
"""


def html_report(
    report: Mapping[str, Any], diagram: bytes, *, title: str = "Calibration report", decision: str = ""
) -> str:
    """Write a report as a self-contained HTML page.

    `report`: what `Report.to_dict` gives; where it has `fit.choice`, the choice of `auto` is shown. Returns
    HTML with all text escaped. It needs no more than the content security policy `default-src 'none';
    style-src 'unsafe-inline'; img-src data:`.
    """
    parts = _parts(report, diagram, title, decision)
    head = (
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style>"
    )
    body = "\n".join(parts)
    return f'<!doctype html>\n<html lang="en"><head>{head}</head><body>\n{body}\n</body></html>\n'


EVENTS = {
    "Observed / expected events": "ratio",
    "Calibration intercept": "intercept",
    "Calibration slope": "slope",
    "Spiegelhalter's z": "spiegelhalter",
}
"""What a report shows of two classes, by their titles."""


def report_fragment(report: Mapping[str, Any], diagram: bytes | None) -> str:
    """Write a report as a part of a page, such as the output of a notebook's cell, in the style of that page.

    Without a diagram, its place stays empty.
    """
    return f"<div>{chr(10).join(_parts(report, diagram, 'Calibration report', ''))}</div>"


def fit_fragment(result: FitResult) -> str:
    """Write what a fit found as a part of a page."""
    before, after = result.certificate.uncalibrated_nll, result.nll
    serious = [warning.to_dict() for warning in result.warnings if warning.severity == "serious"]
    parts = [
        f"<p>Fitted <code>{escape(result.method)}</code>: NLL {before:.4f} without calibration,"
        f" {after:.4f} with it, on the data of the fit.</p>",
        *([f"<p>{_prose(why)}</p>"] if (why := result.choice.get("why")) else ()),
        *_warnings("Correct the data", serious),
        *_warnings("Warnings", [one.to_dict() for one in result.warnings if one.severity != "serious"]),
    ]
    return f"<div>{''.join(parts)}</div>"


def _parts(report: Mapping[str, Any], diagram: bytes | None, title: str, decision: str) -> list[str]:
    choice = (report.get("fit") or {}).get("choice") or {}
    warnings = report.get("warnings") or ()
    serious = [one for one in warnings if one.get("severity") == "serious"]
    return [
        f"<h1>{escape(title)}</h1>",
        *_warnings("Correct the data", serious),
        *_verdict(report, choice, decision),
        f'<p class="faint">{_summary(report, choice)}</p>',
        *_warnings("Warnings", [one for one in warnings if one not in serious]),
        *_reliability(diagram),
        *_metrics(report),
        *_events(report.get("events")),
        *_changes(report),
        *_candidates(choice.get("candidates") or ()),
    ]


def _reliability(diagram: bytes | None) -> Iterable[str]:
    if diagram is not None:
        image = base64.b64encode(diagram).decode("ascii")
        yield "<h2>Reliability</h2>"
        yield f'<img alt="Reliability before and after calibration" src="data:image/svg+xml;base64,{image}">'


def _summary(report: Mapping[str, Any], choice: Mapping[str, Any]) -> str:
    chosen = choice.get("chosen")
    method = f"Method <code>{escape(str(chosen or report['method']))}</code>"
    if chosen:
        method = method.replace("Method", "Method <code>auto</code>, which chose", 1)
    return (
        f"{method}. {report['samples']:,} samples, {report['classes']:,} classes; every sample is judged by a"
        f" fit that never saw it ({report['folds']} folds)."
    )


def _verdict(report: Mapping[str, Any], choice: Mapping[str, Any], decision: str) -> Iterable[str]:
    said = sentence(report)
    kind = "verdict better" if said.startswith("Use it") else "verdict"
    yield f'<p class="{kind}"><strong>{_prose(said)}</strong></p>'
    reason = f"{report['against']['reason']}."
    for name, text in (("Why", reason), ("Choice", choice.get("why")), ("Activation", decision)):
        if text:
            yield f"<p><strong>{name}:</strong> {_prose(text)}</p>"


def _warnings(title: str, warnings: Sequence[Mapping[str, Any]]) -> Iterable[str]:
    if not warnings:
        return
    yield f"<h2>{title}</h2><ul>"
    for warning in warnings:
        severity = escape(str(warning.get("severity", "")))
        kind = ' class="serious"' if severity == "serious" else ""
        yield f"<li><span{kind}>{severity}</span>: {_prose(warning.get('message', ''))}</li>"
    yield "</ul>"


def _metrics(report: Mapping[str, Any]) -> Iterable[str]:
    yield "<h2>Metrics</h2>"
    yield '<p class="faint">Lower is better. In brackets: 95 % intervals. Differences are paired.</p>'
    rows = []
    for name, values in report["metrics"].items():
        change = values["difference"]
        kind = ""
        if change["high"] is not None and change["high"] < 0:
            kind = "lower"
        elif change["low"] is not None and change["low"] > 0:
            kind = "higher"
        cells = [escape(NAMES.get(name, name)), _interval(values["before"]), _interval(values["after"])]
        is_over = change["value"] is None and values["after"]["value"] is not None
        shown = "no longer infinite" if is_over else _interval(change, sign="+")
        rows.append([*cells, f'<span class="{kind}">{shown}</span>'])
    yield table(["Metric", "Before", "After", "Difference"], rows)


def _events(events: Mapping[str, Any] | None) -> Iterable[str]:
    if not events:
        return
    yield "<h2>Probability of the second class</h2>"
    yield (
        '<p class="faint">Calibrated: a ratio of 1, an intercept of 0, a slope of 1. A slope below 1:'
        " probabilities are too extreme. In brackets: 95 % intervals.</p>"
    )
    rows = []
    for title, name in EVENTS.items():
        sides = [events[side][name] for side in ("before", "after")]
        if name == "spiegelhalter":
            cells = [
                "-" if one["z"] is None else f"{one['z']:.2f} (p = {one['p_value']:.3f})" for one in sides
            ]
        else:
            cells = ["-" if one["value"] is None else _interval(one) for one in sides]
        rows.append([title, *cells])
    yield table(["", "Before", "After"], rows)


def _changes(report: Mapping[str, Any]) -> Iterable[str]:
    yield "<h2>What changed</h2><ul>"
    yield f"<li>Predicted labels that changed: {report['changed_labels']:,}</li>"
    yield f"<li>Samples whose largest probability several classes share: {report['ties']:,}</li>"
    for side, bound in report["bounds"].items():
        if 0 < bound["mean"] < 1:
            yield (
                f"<li>Learned {escape(side)} bound: {bound['mean']:.4g} on average; it holds"
                f" {bound['probabilities']:,} probabilities of {bound['samples']:,} samples</li>"
            )
    limit = report.get("smooth_calibration_bound")
    if limit and limit["bound"] <= 1:
        yield (
            f"<li>The smooth calibration error is at most {limit['bound']:.4g} with probability"
            f" {1 - limit['delta']:.0%} (a theorem on probability bounding)</li>"
        )
    yield "</ul>"


def _candidates(candidates: Sequence[Mapping[str, Any]]) -> Iterable[str]:
    if not candidates:
        return
    columns = list(dict.fromkeys(name for candidate in candidates for name in candidate))
    yield "<h2>Candidates</h2>"
    rows = [[_cell(candidate.get(name)) for name in columns] for candidate in candidates]
    yield table([name.replace("_", " ") for name in columns], rows)


def _prose(text: object) -> str:
    """Escape a sentence, and set what stands in backticks as code."""
    return re.sub("`([^`]*)`", r"<code>\1</code>", escape(str(text)))


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.6g}" if isinstance(value, float) else escape(str(value))


def _interval(values: Mapping[str, Any], sign: str = "") -> str:
    if values["value"] is None:
        return "infinite"
    text = f"{values['value']:{sign}.4f}"
    if values["low"] is None or values["high"] is None:
        return text
    return f'{text} <span class="faint">[{values["low"]:{sign}.4f}, {values["high"]:{sign}.4f}]</span>'


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Lay out cells that are escaped already under a head that is not."""
    top = "".join(f"<th>{escape(name)}</th>" for name in head)
    lines = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    return f'<div class="table"><table><thead><tr>{top}</tr></thead><tbody>{lines}</tbody></table></div>'
