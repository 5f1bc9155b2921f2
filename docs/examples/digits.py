"""A classifier of handwritten digits that is far too sure, calibrated in three ways."""

from sklearn.calibration import CalibratedClassifierCV
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from sklearn.naive_bayes import GaussianNB

from boxcal import BoxCalibratedClassifier, evaluate

rows, digits = load_digits(return_X_y=True)
train, test, y, truth = train_test_split(rows, digits, test_size=0.5, stratify=digits, random_state=0)

models = {
    "no calibration": GaussianNB(),
    "sigmoid": CalibratedClassifierCV(GaussianNB(), method="sigmoid", ensemble=False),
    "isotonic": CalibratedClassifierCV(GaussianNB(), method="isotonic", ensemble=False),
    "boxcal, auto": BoxCalibratedClassifier(GaussianNB()),
}
print(f"{f'{len(test)} digits':<20}  accuracy    NLL  smooth ECE")
for name, model in models.items():
    found = evaluate(model.fit(train, y).predict_proba(test), truth)
    print(f"{name:<20}  {1 - found.error_rate:8.3f}  {found.nll:5.3f}  {found.smooth_ece:10.3f}")
print("auto:", models["boxcal, auto"].result_.method)
