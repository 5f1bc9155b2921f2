"""`boxcal monitor`: replays a log of predictions and labels through the monitor of the service."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.markup import escape

from boxcal.app.cli.failures import UsageError
from boxcal.app.cli.output import messages, plain_table, progress_bar, screen, write_json
from boxcal.app.cli.prediction_log import UNLABELLED, Array, PredictionLog, read
from boxcal.app.monitoring.document import document_of
from boxcal.app.monitoring.fold import ActiveVersion, MonitorFold
from boxcal.app.monitoring.records import NONE, entries
from boxcal.calibrators import Calibrator
from boxcal.calibrators.monitoring.candidates import candidates, mean_nll
from boxcal.calibrators.monitoring.decisions import DecisionKind, LoopDecision
from boxcal.calibrators.monitoring.figure import Trace, draw
from boxcal.calibrators.monitoring.refit_loop import INTERVAL
from boxcal.calibrators.monitoring.stored_logits import pack

MARKED = {DecisionKind.ALARM: "strict alarm", DecisionKind.ACTIVATED: "activation"}
UNLABELLED_AT_ONCE = 1000
DECISION_WIDTH = 10


def run(
    file: Path,
    *,
    calibrator: Path | None,
    validation: Path | None,
    refit: bool,
    plot: Path | None,
    as_json: bool,
) -> None:
    """Replay, save the plot, and show the numbers."""
    if plot is not None and plot.suffix.lower() not in {".svg", ".png"}:
        raise UsageError(f"{plot} is no .svg or .png file")
    log = read(file)
    replay = Replay(
        _calibrator(calibrator, log), None if validation is None else read(validation), refit=refit
    )
    with progress_bar("replaying") as advance:
        replay.run(log, advance)
    if plot is not None:
        if not replay.trace.labels:
            raise UsageError(f"{file} has no labels to plot")
        plot.write_bytes(draw(replay.trace, "svg" if plot.suffix.lower() == ".svg" else "png"))
        messages.print(f"saved {escape(str(plot))}", soft_wrap=True)
    document = replay.document(len(log.labels))
    if as_json:
        write_json(document)
    else:
        _show(document)


class Replay:
    """The monitor of the service, fed with a log, that fits and activates at once where it may."""

    def __init__(self, calibrator: Calibrator, validation: PredictionLog | None, *, refit: bool) -> None:
        prior, gap = None, 0.0
        if validation is not None:
            known = validation.labels != UNLABELLED
            labels = validation.labels[known]
            rows = calibrator(torch.from_numpy(validation.logits[known])).numpy()
            prior = rows.mean(0)
            gap = float((rows.argmax(1) == labels).mean() - rows.max(1).mean())
        self.versions = {0: (calibrator, prior)}
        self.gap, self.refit = gap, refit
        self.fold = MonitorFold(calibrator.num_classes, self._calibrate, self._active(0), refits=refit)
        self.decisions: list[LoopDecision] = []
        self.trace = Trace()

    def run(self, log: PredictionLog, advance: Any) -> None:
        """Fold the log, at most `INTERVAL` labels at a time."""
        labelled = np.flatnonzero(log.labels != UNLABELLED)
        logits, labels = log.logits[labelled], log.labels[labelled]
        first = 0
        while first < len(log.labels):
            last = self._next(log, labelled, first)
            decided = self.fold.fold(_entries(log, first, last))
            seen = self.fold.loop.seen
            self._trace(log, first, last)
            if self.refit:
                decided += self._answer(logits, labels)
            self.decisions += decided
            self.trace.marks += [(seen, MARKED[one.kind]) for one in decided if one.kind in MARKED]
            first = last
            advance(first / len(log.labels), "")

    def _next(self, log: PredictionLog, labelled: Array, first: int) -> int:
        """Give the end of a piece: the row after the label at which the loop decides next."""
        seen = self.fold.loop.seen
        place = seen + INTERVAL - seen % INTERVAL - 1
        end = int(labelled[place]) + 1 if place < len(labelled) else len(log.labels)
        return min(end, first + UNLABELLED_AT_ONCE)

    def _answer(self, logits: Array, labels: Array) -> list[LoopDecision]:
        loop, decided = self.fold.loop, []
        if request := loop.request:
            champion, prior = self.versions[request.champion]
            rows = slice(request.first, request.last)
            earlier = {version: self.versions[version] for version in loop.earlier_versions}
            found = candidates(champion, logits[rows], labels[rows], prior, earlier=earlier)
            best = found[0]
            version = max(self.versions) + 1 if best.version is None else best.version
            self.versions[version] = best.calibrator, best.class_prior
            nll = mean_nll(champion, logits[rows], labels[rows])
            decided.append(
                loop.fitted(version, name=best.name, nll=best.score, champion_nll=nll, compared=len(found))
            )
        if proposal := loop.proposal:
            decided.append(self.fold.activated(self._active(proposal.version)))
        return decided

    def _active(self, version: int) -> ActiveVersion:
        calibrator, prior = self.versions[version]
        return ActiveVersion(version, calibrator.method, version, prior, self.gap, reads_logits=True)

    def _calibrate(self, version: int, logits: Array) -> Array:
        rows: Array = self.versions[version][0](torch.from_numpy(np.ascontiguousarray(logits))).numpy()
        return rows

    def _trace(self, log: PredictionLog, first: int, last: int) -> None:
        labels = log.labels[first:last]
        known = labels != UNLABELLED
        if not known.any():
            return
        rows = self._calibrate(self.fold.active.version, log.logits[first:last][known])
        self.trace.confidence.append(rows.max(1))
        self.trace.right.append(rows.argmax(1) == labels[known])
        strict, material = self.fold.loop.test.log_evidence
        self.trace.labels.append(self.fold.loop.seen)
        self.trace.strict.append(strict)
        self.trace.material.append(material)

    def document(self, predictions: int) -> dict[str, Any]:
        """Give the numbers as the service does, and the decisions."""
        size = self.fold.num_classes
        decisions = [
            {"kind": one.kind.value, "at": one.at, "sentence": one.sentence, "evidence": dict(one.evidence)}
            for one in self.decisions
        ]
        document = document_of(self.fold, [str(k) for k in range(size)])
        return {"predictions": predictions, **document, "decisions": decisions}


def _calibrator(path: Path | None, log: PredictionLog) -> Calibrator:
    size = log.logits.shape[1]
    if path is None:
        return Calibrator.uncalibrated(size)
    loaded = Calibrator.from_bytes(path.read_bytes())
    if loaded.reads != "logits" or loaded.num_classes != size:
        raise UsageError(
            f"{path} reads {loaded.reads} of {loaded.num_classes} classes, but the log has logits of {size}"
        )
    return loaded


def _entries(log: PredictionLog, first: int, last: int) -> Array:
    labels = log.labels[first:last]
    return entries(
        np.arange(first, last) + 1,
        np.full(last - first, NONE),
        np.arange(first, last) if log.times is None else log.times[first:last],
        pack(log.logits[first:last]),
        labels=np.where(labels == UNLABELLED, NONE, labels),
    )


def _show(document: dict[str, Any]) -> None:
    calibrator = document["calibrator"]
    screen.print(
        f"{document['predictions']:,} predictions; calibrator {escape(calibrator['method'])} was tested on"
        f" {document['labels']:,} labels",
        soft_wrap=True,
    )
    table = plain_table("test", "alarm", "log₁₀ E", "largest", "alarm from")
    for name, found in document["alarms"].items():
        numbers = (found["log_evidence"], found["largest_log_evidence"], found["threshold"])
        table.add_row(name, "yes" if found["alarm"] else "no", *(f"{n / np.log(10):.2f}" for n in numbers))
    screen.print(table)
    metrics = document["metrics"]
    if document["labels"]:
        table = plain_table("metric", "value", "")
        table.add_row(
            "NLL", f"{metrics['nll']:.4f}", f"{metrics['nll_low']:.4f} to {metrics['nll_high']:.4f}"
        )
        table.add_row("error rate", f"{metrics['error_rate']:.4f}", "")
        table.add_row("Brier score", f"{metrics['brier']:.4f}", "")
        table.add_row("ECE", f"{metrics['ece']:.4f}", f"if calibrated {metrics['ece_if_calibrated']:.4f}")
        accuracy = document["expected_accuracy"]
        interval = "" if accuracy["low"] is None else f"{accuracy['low']:.4f} to {accuracy['high']:.4f}"
        table.add_row(f"accuracy, from {accuracy['basis']}", f"{accuracy['value']:.4f}", interval)
        screen.print(table)
    for one in document["decisions"]:
        screen.print(f"{one['at']:>{DECISION_WIDTH},}  {escape(one['sentence'])}", soft_wrap=True)
