"""`fit`: checks the data and fits the named method, or a mixture of several."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from typing import Any

from boxcal.calibrators.checks import check_fit, warn_of_serious
from boxcal.calibrators.data import (
    Backbone,
    ClassMix,
    ValidationSet,
    check_validation_set,
    label_indices,
    named_columns,
)
from boxcal.calibrators.fitting.fit_method import fit_checked
from boxcal.calibrators.fitting.result import FitResult, Progress
from boxcal.calibrators.fitting.selection import BUDGET_SECONDS, choose
from boxcal.calibrators.threads import one_library_thread


def fit(
    method: str,
    logits: Any,
    labels: Any,
    *,
    features: Any = None,
    head: Any = None,
    inputs: Any = None,
    backbone: Backbone | None = None,
    groups: Any = None,
    sample_weight: Any = None,
    class_mix: ClassMix | None = None,
    seed: int = 0,
    progress: Progress | None = None,
    budget_seconds: float = BUDGET_SECONDS,
) -> FitResult:
    """Fit a calibrator to validation data by minimising the mean negative log-likelihood.

    The same data, method and seed give the same calibrator. The identity is always a candidate, so the NLL is
    never higher than without calibration. Each serious finding about the data is a `ValidationDataWarning`.

    Parameters
    ----------
    method : str
        One of `methods()`, or `auto`, which mixes methods by cross-validated NLL.
    logits : array_like of shape (N, K)
        Logits of a backbone for data that it was not trained on; any floating dtype, computed in float64. The
        columns of a DataFrame name the classes, and the calibrator keeps the names.
    labels : array_like of shape (N,)
        Class indices, 0 to K - 1, or names of the columns of a DataFrame.
    features : array_like of shape (N, D), optional
        Input of the last layer of the backbone, for `fc` and `ta`.
    head : pair of array_like, optional
        Weight (K, D) and bias (K,) of the backbone's last layer, for `fc` and `ta`.
    inputs : array_like of shape (N, ...), optional
        Input of the backbone, for `nc`.
    backbone : callable, optional
        Differentiable function from float32 inputs to logits (N, K), for `nc`.
    groups : array_like of shape (N,), optional
        Numbers or texts: samples of one patient or video have one group, and are never on both sides of a
        cross-validation.
    sample_weight : array_like of shape (N,), optional
        How much each sample counts, at least 0; only the ratios matter. Samples of weight 0 are left out.
        Penalties and warnings go by the effective number of samples, (sum w)^2 / (sum w^2).
    class_mix : {"as_traffic", "resampled"}, optional
        How the samples were drawn. `as_traffic`: classes are as frequent as among requests, so that `auto`
        may correct a class with few samples or none. `resampled`: by class, so that samples get weights which
        make classes as frequent as the logits, calibrated with a temperature, expect.
    seed : int
        Seed of the folds and of the starting points.
    progress : callable, optional
        Called as `progress(fraction, stage)` in this thread. An exception that it raises ends the fit; this
        is how a fit is cancelled.
    budget_seconds : float
        Processor time after which `auto` begins no further method. The same data and seed give the same
        answer only if it was enough, which the warning `budget_exhausted` says.

    Returns
    -------
    FitResult

    Raises
    ------
    InvalidDataError
        If the data are invalid; the message names the row and the value.
    UnknownMethodError
        If the method does not exist.
    MissingDataError
        If the requirements of the method are missing.
    """
    if not budget_seconds >= 0.0:
        raise ValueError(f"budget_seconds is {budget_seconds}, not at least 0")
    classes = named_columns(logits)
    data = check_validation_set(
        logits,
        labels if classes is None else label_indices(labels, classes),
        features=features,
        head=head,
        inputs=inputs,
        backbone=backbone,
        groups=groups,
        sample_weight=sample_weight,
        classes=classes,
        class_mix=class_mix,
    )
    return fit_warning(method, data, seed=seed, progress=progress, budget_seconds=budget_seconds)


def fit_warning(method: str, data: ValidationSet, **options: Any) -> FitResult:
    """Fit to checked data, and warn of what is seriously wrong with them."""
    result = fit_data(method, data, **options)
    warnings = (*check_fit(method, data), *result.warnings)
    warn_of_serious(warnings)
    return replace(result, on_arrays=result.on_arrays.fitted_to(data), warnings=warnings)


@one_library_thread()
def fit_data(
    method: str,
    data: ValidationSet,
    *,
    seed: int = 0,
    progress: Progress | None = None,
    budget_seconds: float = BUDGET_SECONDS,
) -> FitResult:
    """Do the same for data that `check_validation_set` has passed, without warnings about them."""
    started = time.perf_counter()
    run = partial(choose, budget_seconds=budget_seconds) if method == "auto" else partial(fit_checked, method)
    result = run(data, seed=seed, progress=progress)
    return replace(result, seconds=time.perf_counter() - started)
