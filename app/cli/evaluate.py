"""`boxcal evaluate`: how well calibrated a model is on labelled data, as it is and with a calibrator."""

# ruff: noqa: PLC0415 - what asks a service is imported late

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from boxcal.app.cli.output import (
    UsageError,
    escape,
    evaluation_table,
    messages,
    metrics_table,
    naming,
    progress_bar,
    screen,
    show_warnings,
    write_json,
)
from boxcal.app.cli.predict import version_of
from boxcal.app.cli.validation import read_checked, saved_calibrator
from boxcal.app.fitting.worker.reading import holds_images
from boxcal.app.tables.labels import Declared
from boxcal.calibrators.array_calibrator import ArrayCalibrator
from boxcal.calibrators.checks import check_known
from boxcal.calibrators.data import ValidationSet
from boxcal.calibrators.evaluation.crossfit import answers_on
from boxcal.calibrators.evaluation.evaluate import Evaluation, compare, judge
from boxcal.calibrators.evaluation.outcomes import outcomes, softmax_rows
from boxcal.calibrators.evaluation.verdict import sentence
from boxcal.calibrators.row_statistics import Sketch

ROWS_PER_REQUEST = 1000
SIGNIFICANT = 0.05

Floats = npt.NDArray[Any]


def run(
    file: Path,
    labels: Path | None,
    *,
    calibrator: str | None,
    declared: Declared,
    url: str | None,
    as_json: bool,
) -> None:
    """Judge the plain softmax and, where there is one, the calibrator, by every metric with its interval."""
    if url is not None and holds_images(file):
        raise UsageError(f"{file} holds images; with --url, evaluate takes logits")
    loaded = None if calibrator is None or url is not None else saved_calibrator(calibrator)
    wanted = set() if loaded is None else {loaded.reads}
    with progress_bar("reading") as advance:
        read = read_checked(file, labels, advance, wanted, declared=declared, classes=_classes(loaded, url))
    checked, columns, warnings = read.data, read.columns, read.warnings
    with naming(file):
        name, probabilities, predicted, known = _calibrated(checked, loaded, calibrator, url)
    if known is not None:
        effect = "its metrics are better than on new data"
        found = check_known(checked.sketch, known, "the calibrator was", effect)
        warnings = warnings + [one.to_dict() for one in found]

    def judged(rows: Any, labels: Floats | None = None) -> Evaluation:
        return judge(outcomes(rows, checked.labels, labels, checked.units, weights=checked.weights))

    before = judged(softmax_rows(checked.logits))
    document: dict[str, Any] = {"samples": len(checked), "classes": checked.num_classes, "calibrator": name}
    if probabilities is None:
        document["metrics"] = before.to_dict()
        table = evaluation_table(document["metrics"])
    else:
        document["metrics"] = _sides(before, judged(probabilities, predicted))
        table = metrics_table(document["metrics"])
    document |= {"columns": columns, "warnings": warnings}
    if columns:
        messages().print(f"[dim]{escape(file.name)}: columns {escape(columns)}", soft_wrap=True)
    if as_json:
        write_json(document)
        return
    serious = [warning for warning in warnings if warning["severity"] == "serious"]
    show_warnings(serious)
    screen().print(f"[bold]{escape(_verdict(document, checked.units is not None))}[/]", soft_wrap=True)
    screen().print(f"{len(checked)} samples, {checked.num_classes} classes, {escape(name or 'uncalibrated')}")
    screen().print(table)
    show_warnings(warning for warning in warnings if warning not in serious)


def _classes(loaded: ArrayCalibrator | None, url: str | None) -> Sequence[str] | None:
    """Return the names of the classes of a calibrator or of the model of a service."""
    if url is not None:
        from boxcal.app.client import BoxcalClient

        with BoxcalClient(url) as client:
            return [str(name) for name in client.model()["labels"]]
    return None if loaded is None else loaded.classes


def _verdict(document: dict[str, Any], has_groups: bool) -> str:
    """Say in one sentence how well calibrated the model is, or whether to use the calibrator."""
    metrics = document["metrics"]
    if document["calibrator"] is None:
        found = metrics["smooth_ece"]
        known, is_significant = f"p = {found['p_value']:.3f}", found["p_value"] < SIGNIFICANT
        if is_significant and has_groups and found["low"] == 0:
            is_significant = False
            known += " if samples were independent; the interval, which counts groups, begins at 0"
        said = "is not calibrated" if is_significant else "shows no error of calibration"
        return (
            f"The model {said}: smooth ECE {found['value']:.4f}, where perfect calibration shows "
            f"{found['perfect']:.4f} ({known})."
        )
    return sentence(document)


def _calibrated(
    data: ValidationSet, loaded: ArrayCalibrator | None, calibrator: str | None, url: str | None
) -> tuple[str | None, Floats | None, Floats | None, Sketch | None]:
    """Give a calibrator's name, probabilities (N, K), labels (N,) and sketch; None without one."""
    if url is not None:
        return _through_service(data.logits, calibrator, url)
    if loaded is None:
        return None, None, None, None
    answer = answers_on(loaded, data)
    return loaded.method, answer.probabilities, answer.predicted, loaded.sketch


def _through_service(
    logits: Floats, calibrator: str | None, url: str
) -> tuple[str, Floats, Floats, Sketch | None]:
    from boxcal.app.client import BoxcalClient

    version = None if calibrator is None else version_of(calibrator)
    probabilities: list[Any] = []
    predicted: list[int] = []
    with BoxcalClient(url) as client, progress_bar("calibrating") as advance:
        for first in range(0, len(logits), ROWS_PER_REQUEST):
            rows = logits[first : first + ROWS_PER_REQUEST]
            answer = client.calibrate(
                rows, probabilities=True, calibrator="active" if version is None else version
            )
            version = answer.calibrator.version  # one run, one calibrator
            probabilities += [prediction.probabilities for prediction in answer.predictions]
            predicted += [prediction.index for prediction in answer.predictions]
            advance((first + len(rows)) / len(logits), "")
        known = client.report(version).get("sketch") if version else None
    return (
        f"{answer.calibrator.version} ({answer.calibrator.method})",
        np.array(probabilities),
        np.array(predicted),
        None if known is None else Sketch.read(known),
    )


def _sides(before: Evaluation, after: Evaluation) -> dict[str, Any]:
    differences = compare(after, before)
    left, right = before.to_dict(), after.to_dict()
    return {
        name: {"before": left[name], "after": right[name], "difference": difference.to_dict()}
        for name, difference in differences.items()
    }
