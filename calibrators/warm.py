"""Compile all loops on installation: `python -m boxcal.calibrators.warm`.

They are kept on disk (NUMBA_CACHE_DIR, else beside the source), for this kind of processor. Without this the
first fit, and the first labels that a service gets, wait for the compiler.
"""

import logging
from contextlib import suppress

import numpy as np

from boxcal.calibrators.data import ValidationSet
from boxcal.calibrators.evaluation.report import cross_fitted_report
from boxcal.calibrators.fitting.api import fit_data
from boxcal.calibrators.monitoring.calibration_test import CalibrationTest
from boxcal.calibrators.monitoring.champion_challenger import Duel
from boxcal.calibrators.monitoring.drift import DriftTest, TrafficSample
from boxcal.calibrators.monitoring.stored_logits import pack, unpack
from boxcal.calibrators.temperature_fast_path import warm_arrays

METHODS = ("ts+pb", "dirichlet+pb-mlp", "ts+lb", "ets+pb", "pb-mlp", "dpb", "venn-abers")
"""Together their fits call every loop of the package `fitting`."""
ROWS, CLASSES = 60, 3


def warm() -> None:
    """Call every compiled form once, so that nobody waits for a compiler later."""
    warm_arrays()
    with suppress(ModuleNotFoundError):
        _warm_tensors()
    random = np.random.default_rng(0)
    rows = 5.0 * random.normal(size=(ROWS, CLASSES))
    # Wrong labels of confident rows, so that the fits arrive at bounds that hold some rows.
    labels = np.where(np.arange(ROWS) % 6, rows.argmax(axis=1), np.arange(ROWS) % CLASSES)
    for method in METHODS:
        fit_data(method, ValidationSet(rows, labels))
        fit_data(method, ValidationSet(rows.astype(np.float32), labels))
    cross_fitted_report("ts", rows, labels)
    warm_monitoring()


def _warm_tensors() -> None:
    import torch  # noqa: PLC0415 - the service may run without it

    from boxcal.calibrators.operator.box_softmax import box_constrained_softmax  # noqa: PLC0415

    for dtype in (torch.float32, torch.float64):
        for upper in (0.5, torch.full((3,), 0.5, dtype=dtype)):
            logits = torch.zeros(2, 3, dtype=dtype, requires_grad=True)
            torch.autograd.grad(box_constrained_softmax(logits, 0.1, upper).sum(), logits)


def warm_monitoring() -> None:
    """Call the loops of the monitor: no transaction that folds labels shall wait for a compiler."""
    rows = np.random.default_rng(0).dirichlet(np.ones(CLASSES), ROWS)
    labels = np.arange(ROWS) % CLASSES
    unpack(pack(np.log(rows)))
    test = CalibrationTest(CLASSES)
    confidences = test.observe(rows)
    test.update(rows, labels)
    Duel(CLASSES).update(rows, rows, labels)
    DriftTest(np.empty(0)).update(confidences)
    TrafficSample().choose(np.arange(ROWS), np.arange(ROWS))


if __name__ == "__main__":
    logging.getLogger("boxcal.compiling").setLevel(logging.ERROR)  # that it compiles is no news
    warm()
