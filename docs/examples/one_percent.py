"""Two classes, one of 100 rows positive: weights that balance the classes ruin the probabilities."""

import numpy as np
from sklearn.calibration import CalibratedClassifierCV
from sklearn.datasets import make_classification
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import train_test_split

from boxcal import BoxCalibratedClassifier, evaluate

rows, positive = make_classification(
    60_000, 10, n_informative=6, weights=[0.99], flip_y=0.0, class_sep=0.7, random_state=1
)
train, test, y, truth = train_test_split(rows, positive, test_size=0.5, stratify=positive, random_state=0)

balanced = LogisticRegression(class_weight="balanced")
models = {
    "no calibration": balanced,
    "sigmoid": CalibratedClassifierCV(balanced, method="sigmoid", ensemble=False),
    "boxcal, auto": BoxCalibratedClassifier(balanced),
}
print(f"{truth.sum()} of {len(test)} positive  mean p     NLL   among the highest 1 %: mean p  positive")
for name, model in models.items():
    probabilities = model.fit(train, y).predict_proba(test)
    p = probabilities[:, 1]
    highest = np.argsort(-p)[: len(test) // 100]
    nll = evaluate(probabilities, truth).nll
    print(
        f"{name:<21}  {p.mean():6.4f}  {nll:6.4f}"
        f"                          {p[highest].mean():6.3f}    {truth[highest].mean():6.3f}"
    )
print("auto:", models["boxcal, auto"].result_.method)
