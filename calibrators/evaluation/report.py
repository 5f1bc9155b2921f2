"""The report on a calibration method: what it does to probabilities of samples that its fit never saw.

Validation logits and labels go in. They are split into folds; each fold is calibrated by a fit on the
others (cross-fitting, so that no sample is wasted), and the pooled answers are judged before and after, and
against the active calibrator. A JSON-ready document comes out: the registry keeps it, the activation gate
reads it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from boxcal.calibrators.array_calibrator import TwoStages
from boxcal.calibrators.checks import UNRELATED_LABELS, DataWarning, check_changed, check_fit, check_known
from boxcal.calibrators.data import FEWEST_SAMPLES, Backbone, ClassMix, ValidationSet, check_validation_set
from boxcal.calibrators.errors import InvalidDataError
from boxcal.calibrators.evaluation.bootstrap import LEVEL, Estimate, Resamples
from boxcal.calibrators.evaluation.crossfit import (
    FOLDS,
    CalibratedAnswers,
    Progress,
    Unseen,
    answers_on,
    cross_fit,
    fit_set,
    share_of,
)
from boxcal.calibrators.evaluation.evaluate import Evaluation, compare, judge, verdict
from boxcal.calibrators.evaluation.html_report import report_fragment
from boxcal.calibrators.evaluation.outcomes import ProbabilityRows, Tell, outcomes, softmax_rows
from boxcal.calibrators.evaluation.reliability import class_reliability, reliability_data, reliability_svg
from boxcal.calibrators.evaluation.theory import SmoothCalibrationBound, smooth_calibration_bound
from boxcal.calibrators.evaluation.two_classes import EventCalibration, event_calibration
from boxcal.calibrators.evaluation.verdict import Verdict
from boxcal.calibrators.label_checks import unrelated_share
from boxcal.calibrators.method import BOUND_MAPS
from boxcal.calibrators.row_statistics import Sketch
from boxcal.calibrators.threads import one_library_thread

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_FITTED, _JUDGED, _CHECKED = 0.4, 0.9, 0.93  # the fraction done after each step


@dataclass(frozen=True, eq=False)
class Against:
    """The paired comparison with the active calibrator, on the same samples.

    `difference` is the new method minus the active one, by metric: below 0 the new one is better.
    """

    judgement: Evaluation
    difference: dict[str, Estimate]
    verdict: Verdict

    def to_dict(self) -> dict[str, Any]:
        """Return the comparison as a JSON-ready document."""
        active = self.judgement.to_dict()
        return {
            "method": self.verdict.active,
            "metrics": {
                name: {"active": active[name], "difference": difference.to_dict()}
                for name, difference in self.difference.items()
            },
            **self.verdict.to_dict(),
        }


@dataclass(frozen=True, eq=False)
class Report:
    """A method judged on data its fits never saw; `to_dict` gives the document.

    Its member `class_prior` is the mean probability of each class after calibration: what an adjustment to
    other class frequencies divides by.

    Attributes
    ----------
    method : str
    samples, classes, folds, seed : int
    before, after : Evaluation
        The logits' softmax, and the cross-fitted calibrators' answers.
    difference : dict of Estimate
        After minus before, paired, by metric; below 0 is better.
    changed_labels : int
        Samples whose predicted label is another after calibration.
    answers : CalibratedAnswers
        The cross-fitted probabilities, and how often bounds held them.
    reliability : dict
        Data of the reliability diagrams `before` and `after`, and of single `classes`.
    against : Against
        The comparison with the active calibrator; with the plain softmax where none was given.
    warnings : list of DataWarning
        What is probably wrong with the data, with the method for these data, or with what it does to them.
    sketch : Sketch
        Hashes of some rows, by which a later fit tells that it is given the same data.
    smooth_bound : SmoothCalibrationBound or None
        The paper's limit on the smooth calibration error, for `pb` on two classes where a bound was learned.
    effective : float or None
        The effective number of samples, where they have weights.
    """

    method: str
    samples: int
    classes: int
    folds: int
    seed: int
    before: Evaluation
    after: Evaluation
    difference: dict[str, Estimate]
    changed_labels: int
    answers: CalibratedAnswers
    reliability: dict[str, Any]
    against: Against
    warnings: list[DataWarning]
    sketch: Sketch
    smooth_bound: SmoothCalibrationBound | None
    effective: float | None = None

    @property
    def is_better(self) -> bool:
        """Whether the method beats the active calibrator: what the gate `if_better` asks."""
        return self.against.verdict.is_better

    @property
    def events(self) -> dict[str, EventCalibration]:
        """With two classes, the calibration of the probability of the second, `before` and `after`."""
        sides = {"before": self.before, "after": self.after}
        found = {name: event_calibration(side.scored) for name, side in sides.items()}
        return {name: one for name, one in found.items() if one is not None}

    def to_dict(self) -> dict[str, Any]:
        """Return the report as one JSON-ready document."""
        before, after = self.before.to_dict(), self.after.to_dict()
        return {
            "method": self.method,
            "samples": self.samples,
            **({} if self.effective is None else {"effective_samples": self.effective}),
            "classes": self.classes,
            "folds": self.folds,
            "seed": self.seed,
            "confidence_level": LEVEL,
            "bootstrap_draws": self.after.resamples.draws,
            "metrics": {
                name: {"before": before[name], "after": after[name], "difference": difference.to_dict()}
                for name, difference in self.difference.items()
            },
            "events": {side: found.to_dict() for side, found in self.events.items()} or None,
            "class_prior": self.after.cells.mean_probabilities.tolist(),
            "changed_labels": self.changed_labels,
            "ties": self.answers.ties,
            "bounds": self.answers.bounds(),
            "reliability": self.reliability,
            "against": self.against.to_dict(),
            "is_better": self.is_better,
            "warnings": [warning.to_dict() for warning in self.warnings],
            "sketch": self.sketch.to_dict(),
            "smooth_calibration_bound": self.smooth_bound.to_dict() if self.smooth_bound else None,
        }

    def plot(self, ax: Axes | None = None, *, when: Literal["before", "after"] = "after") -> Axes:
        """Draw the reliability diagram before or after calibration, and return its axes.

        Parameters
        ----------
        ax : matplotlib.axes.Axes, optional
            Where to draw; new axes of pyplot by default.
        when : {"before", "after"}
            Of the logits' softmax, or of the calibrated probabilities.

        Raises
        ------
        ImportError
            matplotlib is not installed.
        """
        try:
            from boxcal.calibrators.evaluation.figure import plot_reliability  # noqa: PLC0415 - matplotlib
        except ModuleNotFoundError as error:
            raise ImportError(f"plot needs the package {error.name}: pip install {error.name}") from error
        title = "Before: softmax" if when == "before" else f"After: {self.method}"
        return plot_reliability(self.reliability[when], ax, title)

    def _repr_html_(self) -> str:
        """Return the report for a notebook; without matplotlib it has no diagram."""
        document = self.to_dict()
        try:
            diagram = reliability_svg(document)
        except ModuleNotFoundError:
            return report_fragment(document, None)
        return report_fragment(document, diagram)


def cross_fitted_report(
    method: str,
    logits: Any,
    labels: Any,
    *,
    seed: int = 0,
    progress: Progress | None = None,
    against: TwoStages | None = None,
    known: Sketch | None = None,
    unseen: Unseen = (),
    folds: int = FOLDS,
    features: Any = None,
    head: Any = None,
    inputs: Any = None,
    backbone: Backbone | None = None,
    groups: Any = None,
    sample_weight: Any = None,
    class_mix: ClassMix | None = None,
) -> Report:
    """Judge a method on validation data by cross-fitting.

    Parameters
    ----------
    method : str
        A name of `methods()`, or `auto`, or the name of what `unseen` calibrates by.
    logits : (N, K)
        Validation logits.
    labels : (N,)
        Class indices.
    seed : int
        Makes folds, fits and bootstrap reproducible.
    progress : callable, optional
        Called with the fraction done and what is being done; an exception it raises ends the report.
    against : Calibrator or ArrayCalibrator, optional
        The active calibrator, compared on the same samples; the plain softmax unless given.
    known : Sketch, optional
        Of the data that the active calibrator was fitted to.
    unseen : sequence, optional
        What a fit of `auto` on the same samples has kept, `FitResult.unseen`: the calibrators of its folds
        judge the method, and nothing is fitted again.
    folds : int
        Number of folds, at most N.
    features, head, inputs, backbone
        What some methods read besides logits, as for `boxcal.calibrators.fit`.
    groups : (N,), optional
        Samples of one group share a fold, and intervals resample groups.
    sample_weight : (N,), optional
        How much each sample counts, at least 0, for fits and metrics; resamples keep the weights.
    class_mix : {"as_traffic", "resampled"}, optional
        How the samples were drawn, as for `boxcal.calibrators.fit`.

    Raises
    ------
    InvalidDataError
        Saying which row or value is wrong.
    """
    data = check_validation_set(
        logits,
        labels,
        features=features,
        head=head,
        inputs=inputs,
        backbone=backbone,
        groups=groups,
        sample_weight=sample_weight,
        class_mix=class_mix,
    )
    return report_on(
        method,
        data,
        seed=seed,
        progress=progress,
        against=against,
        known=known,
        unseen=unseen,
        folds=folds,
    )


@one_library_thread()
def report_on(
    method: str,
    data: ValidationSet,
    *,
    seed: int = 0,
    progress: Progress | None = None,
    against: TwoStages | None = None,
    known: Sketch | None = None,
    unseen: Unseen = (),
    folds: int = FOLDS,
) -> Report:
    """Do the same for data that `check_validation_set` has passed."""
    if len(data) <= FEWEST_SAMPLES:
        raise InvalidDataError(f"a report needs at least {FEWEST_SAMPLES + 1} samples, not N = {len(data)}")
    tell = progress or _silent
    if against is not None and against.method == "uncalibrated":
        against = None  # the logits are judged anyway
    folds = len(unseen) or min(folds, len(data))
    answers = cross_fit(
        method, data, folds=folds, seed=seed, progress=share_of(tell, 0.0, _FITTED), unseen=unseen
    )
    resamples = Resamples(len(data), seed=seed, groups=data.units)

    def judged(rows: ProbabilityRows, predicted: Any, begin: float, end: float, whose: str) -> Evaluation:
        stage = f"judging {whose}"
        tell(begin, stage)

        def share(start: float, stop: float) -> Tell:
            return lambda done: tell(begin + (end - begin) * (start + (stop - start) * done), stage)

        scored = outcomes(rows, data.labels, predicted, data.units, share(0.0, 0.1), weights=data.weights)
        return judge(scored, seed=seed, resamples=resamples, tell=share(0.1, 1.0))

    middle = (_FITTED + _JUDGED) / 2 if against is None else (2 * _FITTED + _JUDGED) / 3
    before = judged(softmax_rows(data.logits), data.facts.predicted, _FITTED, middle, "the logits")
    last = _JUDGED if against is None else (_FITTED + 2 * _JUDGED) / 3
    after = judged(answers.rows, answers.predicted, middle, last, "the new calibrator")
    difference = compare(after, before)
    comparison = Against(before, difference, verdict(after, before, "uncalibrated"))
    if against is not None:
        tell(last, "calibrating by the active calibrator")
        active = answers_on(against, data)
        active_judged = judged(active.rows, active.predicted, last, _JUDGED, "the active calibrator")
        comparison = Against(
            active_judged,
            compare(after, active_judged),
            verdict(after, active_judged, against.method),
        )
    tell(_JUDGED, "checking the data")
    changed = int((after.scored.predicted != before.scored.predicted).sum())
    sketch = data.sketch
    warnings = [
        _if_labels_are_wrong(one, data, after, comparison)
        for one in check_fit("auto" if unseen else method, data)
    ]
    accuracies = [side.scored.mean(side.scored.correct) for side in (before, after)]
    warnings += check_changed(changed, len(data), *accuracies)
    if known is not None:
        effect = "the comparison favours the active calibrator"
        warnings += check_known(sketch, known, "the active calibrator was", effect, "warning")
    report = Report(
        method=method,
        samples=len(data),
        classes=data.num_classes,
        folds=folds,
        seed=seed,
        before=before,
        after=after,
        difference=difference,
        changed_labels=changed,
        answers=answers,
        reliability=reliability_of(before, after, seed, share_of(tell, _CHECKED, 1.0)),
        against=comparison,
        warnings=warnings,
        sketch=sketch,
        smooth_bound=_smooth_bound(method, data, seed),
        effective=None if data.weights is None else data.effective,
    )
    tell(1.0, "done")
    return report


def _if_labels_are_wrong(
    warning: DataWarning, data: ValidationSet, after: Evaluation, against: Against
) -> DataWarning:
    """Make labels that look unrelated less serious where the method is better, be they right or wrong."""
    if warning.code != UNRELATED_LABELS or warning.severity != "serious":
        return warning
    share, significance = unrelated_share(data.logits, data.labels)
    active, most = against.verdict.active, min(share * (1 + 2 / significance), 0.99)
    if not verdict(after, against.judgement, active, unrelated=most).is_better:
        return warning
    message = f"{warning.message}, and better than those of `{active}` all the same"
    return replace(warning, severity="warning", message=message)


def reliability_of(
    before: Evaluation, after: Evaluation, seed: int, progress: Progress | None = None
) -> dict[str, Any]:
    """Return the data of all reliability diagrams of a report."""
    tell, stage = progress or _silent, "preparing reliability diagrams"
    found: dict[str, Any] = {}
    for place, (name, side) in enumerate((("before", before), ("after", after))):
        tell(0.1 * place, stage)
        scored = side.scored
        found[name] = reliability_data(
            scored.confidence, scored.correct, seed=seed, weights=scored.weights, groups=scored.groups
        )
    found["classes"] = class_reliability(
        before.scored,
        after.scored,
        before.cells,
        seed=seed,
        tell=lambda fraction: tell(0.2 + 0.8 * fraction, stage),
    )
    return found


def _smooth_bound(method: str, data: ValidationSet, seed: int) -> SmoothCalibrationBound | None:
    """Bound the calibration error as the paper proves it, which is of bounds fitted to all the samples.

    The samples are independent there: none for weights, groups and copies.
    """
    is_covered = data.weights is None and data.units is None
    if data.num_classes != 2 or method not in BOUND_MAPS or not is_covered:
        return None
    calibrator = fit_set(method, data, seed=seed)
    bounds = calibrator.fitted_bounds
    if bounds is None:
        return None
    return smooth_calibration_bound(calibrator(data.scores)[:, 1], data.labels, *bounds)


def _silent(fraction: float, stage: str) -> None:
    """Progress that nobody watches."""
