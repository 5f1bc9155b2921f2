"""Boosted trees on a table whose classes overlap: the more trees, the surer, beyond what the rows tell."""

from sklearn.calibration import CalibratedClassifierCV
from sklearn.datasets import make_classification
from sklearn.ensemble import HistGradientBoostingClassifier
from sklearn.model_selection import train_test_split

from boxcal import BoxCalibratedClassifier, evaluate

rows, classes = make_classification(
    5_000, 20, n_informative=8, n_classes=3, flip_y=0.0, class_sep=0.6, random_state=0
)
train, test, y, truth = train_test_split(rows, classes, test_size=0.5, stratify=classes, random_state=0)

trees = HistGradientBoostingClassifier(max_iter=100, random_state=0)
models = {
    "no calibration": trees,
    "isotonic": CalibratedClassifierCV(trees, method="isotonic", ensemble=False),
    "boxcal, auto": BoxCalibratedClassifier(trees),
}
print(f"{f'{len(test)} rows':<20}  accuracy    NLL  smooth ECE")
for name, model in models.items():
    found = evaluate(model.fit(train, y).predict_proba(test), truth)
    print(f"{name:<20}  {1 - found.error_rate:8.3f}  {found.nll:5.3f}  {found.smooth_ece:10.3f}")
print("auto:", models["boxcal, auto"].result_.method)
