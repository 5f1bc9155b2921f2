"""One cell of the experiment: a method fitted to one split of a set, and how it does on unseen samples."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass

from boxcal.calibrators.data import ValidationSet
from boxcal.calibrators.evaluation.crossfit import answers_on
from boxcal.calibrators.evaluation.outcomes import outcomes
from boxcal.calibrators.evaluation.toplabel import BinnedError, SmoothError
from boxcal.calibrators.fitting.api import fit_data
from boxcal.calibrators.fitting.fit_method import fit_checked
from boxcal.calibrators.fitting.fitted_method import Fitted
from boxcal.calibrators.threads import one_library_thread

COMPARED = 600.0
"""Seconds for the comparison of `auto`: with its usual 120, other load on the machine changes the choice."""


@dataclass(frozen=True)
class Cell:
    """What is kept of a fit; metrics are those of the test set."""

    split: int
    method: str
    fitted: str  # another one for `auto`
    seconds: float  # of processor time; fits that an earlier method has made are not repeated
    validation_nll: float
    error_rate: float
    smooth_ece: float
    ece_mass: float
    ece_width: float
    nll: float
    brier: float
    changed_labels: int  # that differ from those of the logits

    def to_dict(self) -> dict[str, float | str]:
        """Return the cell for JSON, with six significant digits."""
        return {
            name: float(f"{value:.6g}") if isinstance(value, float) else value
            for name, value in asdict(self).items()
        }


def run(
    method: str, seed: int, validation: ValidationSet, test: ValidationSet, known: dict[str, Fitted]
) -> Cell:
    """Fit and evaluate a method; `known` keeps the fits of a split for other methods that contain them."""
    started = time.process_time()
    if method == "auto":
        result = fit_data(method, validation, budget_seconds=COMPARED)
    else:
        with one_library_thread():
            result = fit_checked(method, validation, known=known)
    seconds = time.process_time() - started
    answers = answers_on(result.calibrator, test)
    scored = outcomes(answers.probabilities, test.labels, answers.predicted)
    return Cell(
        split=seed,
        method=method,
        fitted=result.method,
        seconds=seconds,
        validation_nll=result.nll,
        error_rate=float(1 - scored.correct.mean()),
        smooth_ece=SmoothError(scored).value,
        ece_mass=BinnedError(scored, "mass").value,
        ece_width=BinnedError(scored, "width").value,
        nll=float(scored.nll.mean()),
        brier=float(scored.brier.mean()),
        changed_labels=int((answers.predicted != test.scores.argmax(axis=1)).sum()),
    )
