"""A refit in the worker: the logits and labels since a change go in, a candidate comes out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from boxcal.app.fitting.messages import RefitOutcome, RefitTask
from boxcal.app.fitting.resources import limit_memory
from boxcal.app.fitting.worker.validation_set import StoredSet
from boxcal.app.registry.records import FittedCalibrator
from boxcal.calibrators.array_calibrator import ArrayCalibrator
from boxcal.calibrators.checks import DataWarning
from boxcal.calibrators.data import check_validation_set
from boxcal.calibrators.evaluation.crossfit import answers_on
from boxcal.calibrators.evaluation.evaluate import compare, judge, verdict
from boxcal.calibrators.evaluation.outcomes import outcomes, softmax_rows
from boxcal.calibrators.evaluation.reliability import reliability_images
from boxcal.calibrators.evaluation.report import Against, Report, reliability_of
from boxcal.calibrators.monitoring.candidates import Candidate, candidates, mean_nll

SEED = 0


def refit(task: RefitTask) -> RefitOutcome:
    """Fit the candidates, and describe the best one."""
    limit_memory(task.memory_bytes)
    logits, labels = StoredSet(task.folder).arrays()
    num_classes = logits.shape[1]
    champion = _calibrator(task.champion, num_classes)
    earlier = {
        version: (_calibrator(artifact, num_classes), _prior(prior))
        for version, artifact, prior in task.earlier
    }
    found = candidates(champion, logits, labels, _prior(task.class_prior), earlier=earlier)
    best, champion_nll = found[0], mean_nll(champion, logits, labels)
    is_new = best.version is None and best.score < champion_nll
    return RefitOutcome(
        name=best.name,
        version=best.version,
        nll=best.score,
        champion_nll=champion_nll,
        compared=len(found),
        fitted=_fitted(best, champion, logits, labels, task.classes) if is_new else None,
    )


def _calibrator(artifact: bytes | None, num_classes: int) -> ArrayCalibrator:
    return (
        ArrayCalibrator.uncalibrated(num_classes)
        if artifact is None
        else ArrayCalibrator.from_bytes(artifact)
    )


def _prior(values: list[float] | None) -> Any:
    return None if values is None else np.array(values)


def _fitted(
    best: Candidate, champion: ArrayCalibrator, logits: Any, labels: Any, classes: list[str] | None
) -> FittedCalibrator:
    report = _report(best.calibrator, champion, logits, labels).to_dict()
    report["refit"] = {
        "candidate": best.name,
        "nll": best.nll,
        "parameters": best.parameters,
    }
    svg, png = reliability_images(report)
    calibrator = replace(best.calibrator, classes=classes)
    return FittedCalibrator(
        method=calibrator.method,
        artifact=calibrator.to_bytes(),
        spec=calibrator.spec,
        report=report,
        reliability_svg=svg,
        reliability_png=png,
        samples=len(labels),
    )


def _report(calibrator: ArrayCalibrator, champion: ArrayCalibrator, logits: Any, labels: Any) -> Report:
    """Judge a calibrator on the labels that it was fitted to; the duel judges it on later ones."""
    data = check_validation_set(logits, labels)
    answers, active = answers_on(calibrator, data), answers_on(champion, data)
    before = judge(outcomes(softmax_rows(data.logits), labels, data.facts.predicted), seed=SEED)
    after, other = (
        judge(outcomes(one.rows, labels, one.predicted), seed=SEED, resamples=before.resamples)
        for one in (answers, active)
    )
    in_sample = DataWarning(
        "in_sample",
        "warning",
        "the metrics are of the labels that this refit was fitted to; its duel judges it on later labels",
        len(labels),
    )
    return Report(
        method=calibrator.method,
        samples=len(labels),
        classes=logits.shape[1],
        folds=1,
        seed=SEED,
        before=before,
        after=after,
        difference=compare(after, before),
        changed_labels=int((after.scored.predicted != before.scored.predicted).sum()),
        answers=answers,
        reliability=reliability_of(before, after, SEED),
        against=Against(
            other,
            compare(after, other),
            verdict(after, other, champion.method),
        ),
        warnings=[in_sample],
        sketch=data.sketch,
        smooth_bound=None,
    )
