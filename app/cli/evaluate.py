"""`boxcal evaluate`: how well calibrated a model is on labelled data, as it is and with a calibrator."""

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from rich.markup import escape

from boxcal.app.cli.failures import UsageError
from boxcal.app.cli.metrics import judgement_table, metrics_table
from boxcal.app.cli.output import progress_bar, screen, write_json
from boxcal.app.cli.predict import version_of
from boxcal.app.cli.settings import read_settings
from boxcal.app.client import BoxcalClient
from boxcal.app.fitting.worker.reading import holds_images, read_validation_data
from boxcal.calibrators import Calibrator
from boxcal.calibrators.evaluation.crossfit import answers_of
from boxcal.calibrators.evaluation.judgement import Judgement, compare, judge
from boxcal.calibrators.evaluation.outcomes import outcomes, with_weights
from boxcal.calibrators.evaluation.rows import softmax_rows

ROWS_PER_REQUEST = 1000

Floats = npt.NDArray[Any]


def run(file: Path, *, calibrator: str | None, url: str | None, as_json: bool) -> None:
    """Judge the plain softmax and, where there is one, the calibrator, by every metric with its interval."""
    if url is not None and holds_images(file):
        raise UsageError(f"{file} holds images; with --url, evaluate takes logits")
    with tempfile.TemporaryDirectory(prefix="boxcal-") as folder, progress_bar("reading") as advance:
        data = read_validation_data(file, Path(folder), read_settings(), advance)
        logits, labels = data.arrays()
        weights = data.grouping.get("sample_weight", np.ones(len(labels)))
    name, probabilities, predicted = _calibrated(logits, calibrator, url)
    before = judge(with_weights(outcomes(softmax_rows(torch.from_numpy(logits)), labels), weights))
    document: dict[str, Any] = {"samples": len(labels), "classes": logits.shape[1], "calibrator": name}
    if probabilities is None:
        document["metrics"] = before.to_dict()
        table = judgement_table(document["metrics"])
    else:
        document["metrics"] = _sides(
            before, judge(with_weights(outcomes(probabilities, labels, predicted), weights))
        )
        table = metrics_table(document["metrics"])
    if as_json:
        write_json(document)
        return
    screen.print(f"{len(labels)} samples, {logits.shape[1]} classes, {escape(name or 'uncalibrated')}")
    screen.print(table)


def _calibrated(
    logits: Floats, calibrator: str | None, url: str | None
) -> tuple[str | None, Floats | None, Floats | None]:
    """Name a calibrator and return its probabilities (N, K) and labels (N,); None for each without one."""
    if url is not None:
        return _through_service(logits, calibrator, url)
    if calibrator is None:
        return None, None, None
    loaded = Calibrator.from_bytes(Path(calibrator).read_bytes())
    answer = answers_of(loaded, torch.from_numpy(logits))
    return loaded.method, answer.probabilities.numpy(), answer.predicted.numpy()


def _through_service(logits: Floats, calibrator: str | None, url: str) -> tuple[str, Floats, Floats]:
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
    return (
        f"{answer.calibrator.version} ({answer.calibrator.method})",
        np.array(probabilities),
        np.array(predicted),
    )


def _sides(before: Judgement, after: Judgement) -> dict[str, Any]:
    differences = compare(after, before)
    left, right = before.to_dict(), after.to_dict()
    return {
        name: {"before": left[name], "after": right[name], "difference": difference.to_dict()}
        for name, difference in differences.items()
    }
