"""Messages to a help desk, sorted by logistic regression on TF-IDF that is hardly regularised."""

import numpy as np
from sklearn.calibration import CalibratedClassifierCV
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import train_test_split
from sklearn.pipeline import make_pipeline

from boxcal import BoxCalibratedClassifier, evaluate

COMMON = "hello please the my order is not and help since today what i you thanks it"
TOPICS = {
    "account": "password login email locked reset name profile code sign address phone new",
    "delivery": "parcel late address courier track lost arrived damaged box phone new waiting",
    "payment": "card charged invoice twice refund bank code failed amount paid email waiting",
    "returns": "refund damaged size wrong return label box exchange colour paid new broken",
}
rng = np.random.default_rng(0)


def message(topic: str) -> str:
    """Write 4 to 12 words: most are common ones, and some belong to another topic."""
    other = TOPICS[rng.choice(list(TOPICS))]
    sources = [words.split() for words in (COMMON, TOPICS[topic], other)]
    return " ".join(rng.choice(sources[k]) for k in rng.choice(3, rng.integers(4, 13), p=[0.6, 0.25, 0.15]))


topics = rng.choice(list(TOPICS), 4_000, p=[0.2, 0.4, 0.3, 0.1])
messages = [message(topic) for topic in topics]
train, test, y, truth = train_test_split(messages, topics, test_size=0.5, stratify=topics, random_state=0)

model = make_pipeline(TfidfVectorizer(ngram_range=(1, 2)), LogisticRegression(C=100.0, max_iter=1_000))
models = {
    "no calibration": model,
    "sigmoid": CalibratedClassifierCV(model, method="sigmoid", ensemble=False),
    "isotonic": CalibratedClassifierCV(model, method="isotonic", ensemble=False),
    "boxcal, auto": BoxCalibratedClassifier(model),
}
print(f"{f'{len(test)} messages':<20}  accuracy    NLL  smooth ECE")
for name, one in models.items():
    found = evaluate(one.fit(train, y).predict_proba(test), np.searchsorted(one.classes_, truth))
    print(f"{name:<20}  {1 - found.error_rate:8.3f}  {found.nll:5.3f}  {found.smooth_ece:10.3f}")
print("auto:", models["boxcal, auto"].result_.method)
print(f"{test[0]!r}:", *models["boxcal, auto"].predict_proba(test[:1]).round(2)[0])
