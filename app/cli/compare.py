"""`boxcal compare`: every method on one validation set, side by side, judged on data that no fit has seen."""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from boxcal.app.cli.output import Advance, messages, plain_table, progress_bar, screen, write_json
from boxcal.app.cli.settings import read_settings
from boxcal.app.cli.validation_file import read_validation_set
from boxcal.app.fitting import requirements, validation_set
from boxcal.app.fitting.image_sets import BackboneSource
from boxcal.calibrators.data import ValidationSet, check_validation_set
from boxcal.calibrators.evaluation.comparison import PAPERS_METHODS, Comparison, compare_methods
from boxcal.calibrators.evaluation.tables import LEGEND, TITLES, is_best, mark, markdown, to_csv, value_text
from boxcal.calibrators.method import parse


def run(
    file: Path,
    *,
    test: Path | None,
    methods: Sequence[str],
    markdown_file: Path | None,
    csv_file: Path | None,
    as_json: bool,
) -> None:
    """Fit and judge the methods, save what is asked for, and show the table."""
    for name in methods:
        if name != "auto":
            parse(name)  # a mistyped name is told before a large file is read
    wanted = {requirements.reads(name) for name in methods} if methods else {requirements.FEATURES}
    with tempfile.TemporaryDirectory(prefix="boxcal-") as folder, progress_bar("reading") as advance:
        fitted_to = _read(file, Path(folder) / "validation", advance, wanted)
        judged_on = None if test is None else _read(test, Path(folder) / "test", advance, wanted)
    with progress_bar("comparing") as advance:
        comparison = compare_methods(methods or PAPERS_METHODS, fitted_to, judged_on, progress=advance)
    for path, write in ((markdown_file, markdown), (csv_file, to_csv)):
        if path is not None:
            path.write_text(write(comparison))
            messages.print(f"saved {escape(str(path))}", soft_wrap=True)
    if as_json:
        write_json(comparison.to_dict())
    else:
        _show(comparison)


def _read(file: Path, folder: Path, advance: Advance, wanted: set[str]) -> ValidationSet:
    folder.mkdir()
    data = read_validation_set(file, folder, advance, wanted)
    return check_validation_set(*data.arrays(), **_extras(file, data, wanted))


def _extras(file: Path, data: validation_set.ValidationSet, wanted: set[str]) -> dict[str, Any]:
    """Give what methods read besides logits, if the file holds it and it fits the model of the settings."""
    held = {name for name in wanted if name in requirements.REQUIRED and data.besides(name) is not None}
    if not held:
        return {}
    backbone = BackboneSource.of(read_settings()).load()
    missing_data = {name: missing for name in held if (missing := requirements.missing(name, data, backbone))}
    for missing in missing_data.values():
        messages.print(f"[dim]{escape(file.name)}: {escape(missing)}", soft_wrap=True)
    return requirements.extras(held - missing_data.keys(), data, backbone)


def _show(comparison: Comparison) -> None:
    judged = (
        f"judged on {comparison.test_samples} others"
        if comparison.test_samples
        else f"cross-fitted in {comparison.folds} folds"
    )
    screen.print(
        f"{comparison.classes} classes, fitted to {comparison.fit_samples} samples, {judged}", soft_wrap=True
    )
    screen.print(_table(comparison))
    screen.print(f"[dim]{escape(LEGEND.replace('`', ''))}")
    for method, reason in comparison.left_out.items():
        messages.print(f"[dim]left out: {escape(method)} ({escape(reason)})")


def _table(comparison: Comparison) -> Table:
    table = plain_table("method", *TITLES.values())
    for row in comparison.rows:
        cells = []
        for metric in TITLES:
            score = row.scores[metric]
            text = f"{value_text(metric, score)} {mark(score):<2}"
            cells.append(f"[bold]{text}[/]" if is_best(comparison, metric, score) else text)
        table.add_row(escape(row.method), *cells)
    return table
