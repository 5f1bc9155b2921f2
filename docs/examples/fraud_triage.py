"""A payment is reviewed if its expected loss exceeds the cost of a review; bounds keep a rule.

The rule: no payment counts as less than 0.2 % likely to be fraud, so that a large one is always reviewed,
and none as more than 90 %, so that none is blocked without a review.
"""

import numpy as np
from sklearn.datasets import make_classification
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import train_test_split

from boxcal import BoxCalibratedClassifier

REVIEW_COST, BLOCK_ABOVE = 10.0, 0.9
rows, fraud = make_classification(
    40_000, 10, n_informative=6, weights=[0.98], flip_y=0.0, class_sep=1.0, random_state=3
)
amounts = np.random.default_rng(0).lognormal(5.0, 1.5, len(rows))
train, test, y, truth, _, amount = train_test_split(
    rows, fraud, amounts, test_size=0.5, stratify=fraud, random_state=0
)

model = LogisticRegression()
rules = {
    "no bounds": BoxCalibratedClassifier(model),
    "bounds": BoxCalibratedClassifier(model, lower=[0.0, 0.002], upper=[1.0, BLOCK_ABOVE]),
}
large = amount > REVIEW_COST / 0.002
print(f"{len(test)} payments, {large.sum()} large   least p  largest p  blocked  reviewed  large reviewed")
for name, classifier in rules.items():
    p = classifier.fit(train, y).predict_proba(test)[:, 1]
    blocked = p > BLOCK_ABOVE
    reviewed = ~blocked & (p * amount >= REVIEW_COST)
    print(
        f"{name:<27}  {p.min():8.6f}  {p.max():9.4f}  {blocked.sum():7d}  {reviewed.sum():8d}"
        f"  {(reviewed | blocked)[large].sum():14d}"
    )
