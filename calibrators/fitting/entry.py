"""`fit`, the entry to every fit: it checks the data, then fits the method that is named, or chooses one."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from boxcal.calibrators.checks import check_fit
from boxcal.calibrators.data import ValidationSet, check_validation_set
from boxcal.calibrators.fitting.fitter import fit_checked
from boxcal.calibrators.fitting.result import FitResult, Progress
from boxcal.calibrators.fitting.selection import choose
from boxcal.calibrators.threads import one_library_thread


def fit(
    method: str,
    logits: Any,
    labels: Any,
    *,
    features: Any = None,
    head: Any = None,
    inputs: Any = None,
    backbone: Callable[[Tensor], Tensor] | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> FitResult:
    """Fit a calibrator to validation data by minimising the mean negative log-likelihood.

    The same data, method and seed give the same calibrator. The unchanged logits are always a candidate, so
    the fitted NLL is never above theirs.

    Parameters
    ----------
    method : str
        One of `methods()`, or `auto`, which chooses one by cross-validated NLL.
    logits : array_like of shape (N, K)
        Scores of a backbone on data it was not trained on; any floating dtype, computed in float64.
    labels : array_like of shape (N,)
        Class indices, 0 to K - 1.
    features : array_like of shape (N, D), optional
        What the backbone's last layer takes: `fc` and `ta` read them.
    head : pair of array_like, optional
        Weight (K, D) and bias (K,) of the backbone's last layer, for `fc` and `ta`.
    inputs : array_like of shape (N, ...), optional
        What the backbone takes: `nc` reads them.
    backbone : callable, optional
        Maps float32 inputs to logits (N, K), differentiably, for `nc`.
    seed : int
        Of the folds and of the points that a search visits.
    progress : callable, optional
        Called as `progress(fraction, stage)` from this thread. Whatever it raises ends the fit, which is how
        one is cancelled.

    Returns
    -------
    FitResult

    Raises
    ------
    InvalidDataError
        Naming the row and the value that no fit can use.
    UnknownMethodError
        If there is no such method.
    MissingDataError
        If the method reads what was not given.
    """
    data = check_validation_set(
        logits, labels, features=features, head=head, inputs=inputs, backbone=backbone
    )
    result = fit_data(method, data, seed=seed, progress=progress)
    return replace(result, warnings=tuple(check_fit(result.method, data)))


def fit_data(
    method: str, data: ValidationSet, *, seed: int = 0, progress: Progress | None = None
) -> FitResult:
    """Do the same for data that `check_validation_set` has passed, without warnings."""
    started = time.perf_counter()
    with one_library_thread():
        run = choose if method == "auto" else partial(fit_checked, method)
        result = run(data, seed=seed, progress=progress)
    return replace(result, seconds=time.perf_counter() - started)
