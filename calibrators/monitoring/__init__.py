"""Online calibration: tests, duels and estimates that fold over labelled predictions one by one.

Every object here is a pure fold: rows of probabilities (N, K) and labels (N,) go in, in prediction order, and
`state_dict()` holds all that is kept. Nothing reads files or a clock, so a log replayed gives the same
numbers.
"""


def warm_loops() -> None:
    """Call each compiled loop once: no transaction that folds labels shall wait for a compiler."""
    import numpy as np  # noqa: PLC0415 - one module of this package needs none of the others

    from boxcal.calibrators.monitoring.calibration_test import CalibrationTest  # noqa: PLC0415
    from boxcal.calibrators.monitoring.champion_challenger import Duel  # noqa: PLC0415
    from boxcal.calibrators.monitoring.drift import DriftTest, TrafficSample  # noqa: PLC0415
    from boxcal.calibrators.monitoring.metrics import RunningMetrics  # noqa: PLC0415
    from boxcal.calibrators.monitoring.stored_logits import pack, unpack  # noqa: PLC0415

    count, classes = 60, 3
    rows = np.random.default_rng(0).dirichlet(np.ones(classes), count)
    labels = np.arange(count) % classes
    unpack(pack(np.log(rows)))
    test = CalibrationTest(classes)
    confidences = test.observe(rows)
    test.update(rows, labels)
    test.diagnosis()
    Duel(classes).update(rows, rows, labels)
    RunningMetrics(classes).update(rows, labels)
    DriftTest(np.empty(0)).update(confidences)
    TrafficSample().choose(np.arange(count), np.arange(count))
