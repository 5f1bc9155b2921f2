"""`boxcal compare`: every method on one validation set, side by side, judged on data that no fit has seen."""

import tempfile
from collections.abc import Sequence
from pathlib import Path

from rich.markup import escape
from rich.table import Table

from boxcal.app.cli.failures import naming
from boxcal.app.cli.output import (
    Advance,
    messages,
    plain_table,
    progress_bar,
    screen,
    show_warnings,
    write_json,
)
from boxcal.app.cli.settings import read_settings
from boxcal.app.fitting.worker.reading import extras_of, read_validation_data
from boxcal.app.fitting.worker.requirements import FEATURES
from boxcal.app.tables.labels import Declared
from boxcal.calibrators.checks import check_data
from boxcal.calibrators.data import ValidationSet, check_validation_set
from boxcal.calibrators.evaluation.comparison import (
    LEGEND,
    PAPERS_METHODS,
    TITLES,
    MethodComparison,
    compare_methods,
    is_best,
    mark,
    to_csv,
    value_text,
)
from boxcal.calibrators.evaluation.comparison import markdown as as_markdown
from boxcal.calibrators.method import parse, reads_of_methods


def run(
    file: Path,
    *,
    test: Path | None,
    method: Sequence[str] | None,
    markdown: Path | None,
    csv: Path | None,
    declared: Declared,
    as_json: bool,
) -> None:
    """Fit and judge the methods, save what is asked for, and show the table."""
    methods = method or []
    for name in methods:
        if name != "auto":
            parse(name)  # a mistyped name is told before a large file is read
    wanted = {reads_of_methods()[name] for name in methods} if methods else {FEATURES}
    with tempfile.TemporaryDirectory(prefix="boxcal-") as folder, progress_bar("reading") as advance:
        fitted_to, classes = _read(file, Path(folder) / "validation", advance, wanted, declared=declared)
        judged_on = None
        if test is not None:
            place = Path(folder) / "test"
            judged_on, _ = _read(test, place, advance, wanted, declared=declared, classes=classes)
    with progress_bar("comparing") as advance:
        comparison = compare_methods(methods or PAPERS_METHODS, fitted_to, judged_on, progress=advance)
    for path, write in ((markdown, as_markdown), (csv, to_csv)):
        if path is not None:
            path.write_text(write(comparison))
            messages.print(f"saved {escape(str(path))}", soft_wrap=True)
    if as_json:
        write_json(comparison.to_dict())
    else:
        _show(comparison)


def _read(
    file: Path,
    folder: Path,
    advance: Advance,
    wanted: set[str],
    *,
    declared: Declared,
    classes: Sequence[str] | None = None,
) -> tuple[ValidationSet, list[str] | None]:
    """Read a file, its columns in the order of `classes`, and show what is wrong with its data."""
    folder.mkdir()
    with naming(file):
        data = read_validation_data(
            file, folder, read_settings(), advance, reads=wanted, declared=declared, classes=classes
        )
    extras, notes = extras_of(data, wanted, read_settings())
    for note in notes:
        messages.print(f"[dim]{escape(file.name)}: {escape(note)}", soft_wrap=True)
    logits, labels = data.arrays()
    checked = check_validation_set(logits, labels, **extras, **data.grouping)
    show_warnings(data.notes + [one.to_dict() for one in check_data(logits, labels, checked.facts)], file)
    return checked, data.classes


def _show(comparison: MethodComparison) -> None:
    judged = (
        f"judged on {comparison.test_samples} others"
        if comparison.test_samples
        else f"cross-fitted in {comparison.folds} folds"
    )
    screen.print(f"[bold]{escape(_verdict(comparison))}[/]", soft_wrap=True)
    screen.print(
        f"{comparison.classes} classes, fitted to {comparison.fit_samples} samples, {judged}", soft_wrap=True
    )
    screen.print(_table(comparison))
    screen.print(f"[dim]{escape(LEGEND.replace('`', ''))}")
    for method, reason in comparison.left_out.items():
        messages.print(f"[dim]left out: {escape(method)} ({escape(reason)})")


def _verdict(comparison: MethodComparison) -> str:
    """Say in one sentence which method has the lowest NLL, and by how much."""
    best = min(comparison.rows, key=lambda row: row.scores["nll"].value)
    change = best.scores["nll"].change
    if change is None:
        return f"No method has a lower NLL than {best.method}."
    clear = "" if change.high < 0 else ", which is not clear"
    return (
        f"{best.method} has the lowest NLL, {change.value:+.4f} against {best.base}{clear} "
        f"(95 % interval {change.low:+.4f} to {change.high:+.4f})."
    )


def _table(comparison: MethodComparison) -> Table:
    table = plain_table("method", *TITLES.values())
    for row in comparison.rows:
        cells = []
        for metric in TITLES:
            score = row.scores[metric]
            text = f"{value_text(metric, score)} {mark(score):<2}"
            cells.append(f"[bold]{text}[/]" if is_best(comparison, metric, score) else text)
        table.add_row(escape(row.method), *cells)
    return table
