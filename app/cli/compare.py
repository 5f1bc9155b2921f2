"""`boxcal compare`: every method on one validation set, side by side, judged on data that no fit has seen."""

# ruff: noqa: PLC0415 - help needs none of what is imported late

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from boxcal.app.cli import options
from boxcal.app.cli.output import (
    check_outputs,
    escape,
    messages,
    plain_table,
    progress_bar,
    screen,
    show_warnings,
    write_json,
)
from boxcal.app.cli.validation import read_checked

if TYPE_CHECKING:
    from rich.table import Table

    from boxcal.calibrators.evaluation.comparison import MethodComparison

WIDEST = 1000
NOT_SHOWN = "a wider terminal shows standard errors"


def compare(
    file: options.ValidationFile,
    *,
    test: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            readable=True,
            help="Evaluate on this file (default: cross-fitting).",
        ),
    ] = None,
    method: Annotated[
        list[str] | None,
        typer.Option(
            help="Method to compare; can be repeated. Default: the methods of the paper, except `nc`."
        ),
    ] = None,
    markdown: Annotated[Path | None, typer.Option(help="Save the table to this file (Markdown).")] = None,
    csv: Annotated[Path | None, typer.Option(help="Save all numbers to this file (CSV).")] = None,
    labels: options.Labels = None,
    scores: options.Scores = None,
    label: options.LabelColumn = None,
    group: options.GroupColumn = None,
    classes: options.ClassColumns = None,
    ignore: options.Ignored = None,
    labels_as: options.LabelsAs = None,
    class_mix: options.ClassMix = None,
    as_json: options.Json = False,
) -> None:
    """Fit several methods to the same data and compare them."""
    from boxcal.app.fitting.worker.requirements import FEATURES
    from boxcal.calibrators.checks import check_known
    from boxcal.calibrators.evaluation import comparison as comparing
    from boxcal.calibrators.method import parse, reads_of_methods

    declared = options.declared_of(
        scores=scores,
        label=label,
        group=group,
        classes=classes,
        ignore=ignore,
        labels_as=labels_as,
        class_mix=class_mix,
    )
    check_outputs([markdown, csv], file, test, labels)
    methods = method or []
    for name in methods:
        if name != "auto":
            parse(name)  # a mistyped name is told before a large file is read
    wanted = {reads_of_methods()[name] for name in methods} if methods else {FEATURES}
    with progress_bar("reading") as advance:
        sets = [read_checked(file, labels, advance, wanted, declared=declared)]
        if test is not None:
            names = sets[0].classes
            sets.append(read_checked(test, None, advance, wanted, declared=declared, classes=names))
            known = check_known(
                sets[1].data.sketch,
                sets[0].data.sketch,
                "the methods are",
                "the comparison shows how well they fit, not how well they do on new data",
            )
            sets[1].warnings.extend(one.to_dict() for one in known)
    files = [file, *([] if test is None else [test])]
    for path, one in zip(files, sets, strict=True):
        show_warnings(one.warnings, path)
    with progress_bar("comparing") as advance:
        comparison = comparing.compare_methods(
            methods or comparing.PAPERS_METHODS, *(one.data for one in sets), progress=advance
        )
    for output, write in ((markdown, comparing.markdown), (csv, comparing.to_csv)):
        if output is not None:
            output.write_text(write(comparison), encoding="utf-8")
            messages().print(f"saved {escape(str(output))}", soft_wrap=True)
    if as_json:
        pairs = zip(files, sets, strict=True)
        warned = [{"file": path.name} | warning for path, one in pairs for warning in one.warnings]
        write_json(comparison.to_dict() | {"warnings": warned})
    else:
        _show(comparison)


def _show(comparison: MethodComparison) -> None:
    from boxcal.calibrators.evaluation.comparison import IN_BRACKETS, LEGEND

    judged = (
        f"judged on {comparison.test_samples} test samples"
        if comparison.test_samples
        else f"cross-fitted in {comparison.folds} folds"
    )
    screen().print(f"[bold]{escape(_verdict(comparison))}[/]", soft_wrap=True)
    screen().print(
        f"{comparison.classes} classes, fitted to {comparison.fit_samples} samples, {judged}", soft_wrap=True
    )
    table, legend = _table(comparison), LEGEND.replace("`", "")
    if screen().measure(table, options=screen().options.update(width=WIDEST)).maximum > screen().width:
        table, legend = _table(comparison, errors=False), legend.replace(IN_BRACKETS, NOT_SHOWN)
    screen().print(table)
    screen().print(f"[dim]{escape(legend)}")
    for method, reason in comparison.left_out.items():
        messages().print(f"[dim]left out: {escape(method)} ({escape(reason)})")


def _verdict(comparison: MethodComparison) -> str:
    """Say in one sentence which method has the lowest NLL, and by how much."""
    best = min(comparison.rows, key=lambda row: row.scores["nll"].value)
    change = best.scores["nll"].change
    if change is None:
        return f"No method has a lower NLL than {best.method}."
    if not math.isfinite(change.value):
        return f"{best.method} has the lowest NLL; that of {best.base} is infinite."
    clear = "" if change.high < 0 else ", which is not clear"
    return (
        f"{best.method} has the lowest NLL, {change.value:+.4f} against {best.base}{clear} "
        f"(95 % interval {change.low:+.4f} to {change.high:+.4f})."
    )


def _table(comparison: MethodComparison, *, errors: bool = True) -> Table:
    """Lay out the metrics of every method; without standard `errors` for 80 columns."""
    from boxcal.calibrators.evaluation.comparison import TITLES, is_best, mark, value_text

    table = plain_table(
        "method", *(title if errors else title.replace(" rate", "") for title in TITLES.values())
    )
    table.columns[0].no_wrap = True
    for row in comparison.rows:
        cells = []
        for metric in TITLES:
            score = row.scores[metric]
            value = value_text(metric, score)
            text = f"{value if errors else value.partition(' ')[0]} {mark(score):<2}"
            cells.append(f"[bold]{text}[/]" if is_best(comparison, metric, score) else text)
        table.add_row(escape(row.method), *cells)
    return table
