"""1,000 classes, of which only the logits are known, as of an image network."""

import numpy as np

from boxcal import BoxCalibrator, evaluate

CLASSES = 1_000
rng = np.random.default_rng(0)
honest = rng.normal(0.0, 1.5, (12_000, CLASSES))
honest[np.arange(12_000), rng.integers(0, CLASSES, 12_000)] += rng.exponential(8.0, 12_000)
labels = (honest + rng.gumbel(size=honest.shape)).argmax(axis=1)  # drawn from softmax(honest)
logits = 1.7 * honest  # what the network gives: too sure

validation, test = slice(0, 6_000), slice(6_000, None)
calibrator = BoxCalibrator("ts", classes=np.arange(CLASSES))
calibrator.fit(logits[validation], labels[validation])

plain = BoxCalibrator("uncalibrated", classes=np.arange(CLASSES))
plain.fit(logits[validation], labels[validation])
print("6000 rows, 1000 classes     NLL  smooth ECE")
for name, model in (("no calibration", plain), ("boxcal, ts", calibrator)):
    found = evaluate(model.predict_proba(logits[test]), labels[test])
    print(f"{name:<23}  {found.nll:6.3f}  {found.smooth_ece:10.3f}")
