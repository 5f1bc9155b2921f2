"""A classifier in use: from one day on a sensor is noisy, and labels that arrive show that it is too sure."""

import numpy as np
from sklearn.linear_model import LogisticRegression

from boxcal import BoxCalibrator
from boxcal.calibrators.monitoring.candidates import candidates, mean_nll
from boxcal.calibrators.monitoring.refit_loop import RefitLoop

CHANGE = 3_000
rng = np.random.default_rng(0)
rows = rng.normal(size=(12_000, 8))
scores = 2.0 * rows @ rng.normal(size=(8, 4))
y = (scores + rng.gumbel(size=scores.shape)).argmax(axis=1)
train, validation, stream = slice(0, 300), slice(300, 4_000), slice(4_000, None)
rows[4_000 + CHANGE :] += rng.normal(0.0, 0.7, rows[4_000 + CHANGE :].shape)

model = LogisticRegression(C=10.0, max_iter=1_000).fit(rows[train], y[train])
logits = model.decision_function(rows)
active = BoxCalibrator("ts").fit(logits[validation], y[validation]).result_.on_arrays
prior = active(logits[validation]).mean(axis=0)

versions = [active]
loop = RefitLoop(4, lambda version, g: versions[version](g), version=0, class_prior=prior)
logits, y = logits[stream], y[stream]
print(f"the inputs change after {CHANGE:,} labels")
for first in range(0, len(y), 50):
    decisions = loop.update(logits[first : first + 50], y[first : first + 50])
    if loop.request is not None:
        since = slice(loop.request.first, loop.request.last)
        found = candidates(active, logits[since], y[since], prior)
        versions.append(found[0].calibrator)
        nll = mean_nll(active, logits[since], y[since])
        best = {"name": found[0].name, "nll": found[0].score, "champion_nll": nll, "compared": len(found)}
        decisions.append(loop.fitted(len(versions) - 1, **best))
    for one in decisions:
        print(f"{one.at:,}: {one.sentence}")
    if loop.proposal is not None:
        break
later = slice(loop.seen, None)
for version, calibrator in enumerate(versions):
    nll = mean_nll(calibrator, logits[later], y[later])
    print(f"version {version}, {calibrator.method}: NLL {nll:.3f} of the {len(y) - loop.seen:,} later labels")
