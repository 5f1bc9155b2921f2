"""Calibrators by log-loss on many sets, as CalArena compares them (arXiv 2605.30188).

    python -m benchmarks.calarena [FOLDER ...] [--splits 5] [--sizes 500 1000 2000] [--only two|some|many]
    python -m benchmarks.calarena --published CLONE

The sets: every `NAME/{val,test}.npz` of the folders, with `logits` or `probabilities` and `labels`, pooled
and split anew, with all samples of the half to fit to and with so many; the same with two classes, groups of
the own ones; and tabular ones made in place, 13 of scikit-learn's by four classifiers. The opponents: the
calibrators of `probmetrics` that CalArena compares, under its names, as far as they and what they need are
installed, and the unchanged probabilities. For each of them and for methods of the catalogue: the share of
its comparisons with another opponent on one experiment that it wins, a tie counting half; the mean distance
of its loss from the lowest of all, in nats; the share of experiments that it makes worse than the unchanged
probabilities; and the median processor time of its fits beside that of our `sms`.

`--published`: a clone of github.com/probkit/CalArena, with the `.h5` files that its README names in
`calibration_benchmarks`. Our methods are fitted to the experiments of each file and compared with the
results that CalArena has published, in `results`; nothing of `probmetrics` runs.
"""

from __future__ import annotations

import csv
import importlib
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import numpy as np
from numpy.typing import NDArray
from sklearn import datasets
from sklearn.ensemble import HistGradientBoostingClassifier, RandomForestClassifier
from sklearn.model_selection import train_test_split
from sklearn.naive_bayes import GaussianNB
from sklearn.neural_network import MLPClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from benchmarks import command_line
from benchmarks.paper.sets import read
from boxcal.calibrators.data import ValidationSet, check_validation_set
from boxcal.calibrators.evaluation.report import report_on
from boxcal.calibrators.fitting.api import fit_data

Floats = NDArray[np.float64]
TINY = np.finfo(np.float32).tiny
"""The smallest probability, in logits and in the loss, as in CalArena."""
BASE = "uncalibrated"
OURS = ("auto", BASE, "ts", "ets", "sms", "mix+sms", "dirichlet", "beta", "dpb", "pb")
BOTH = (
    "Hist-uniform=BinaryHistogramBinning Hist-quantile=BinaryHistogramBinning BBQ=NetcalBBQ Isotonic=Sklearn"
    " CIR=CenteredIsotonicRegression TS=TemperatureScaling ETS=ETS Spline=MLISpline Kernel=Kernel"
    " XGBoost=XGBoost LightGBM=LightGBM CatBoost=CatBoost"
)
OF_TWO = (
    " Scaling-Binning=BinaryPlattBinner Venn-Abers=BinaryVennAbers Platt-probs=Sklearn Beta=Betacal"
    " Platt-logits=BinaryLogistic Quadratic=BinaryLogistic CDF-Spline=CDFSpline"
)
OF_MANY = " Venn-Abers=VennAbers VS=VectorScaling SVS=SVS MS=MatrixScaling SMS=SMS Dirichlet=Dirichlet"
THEIRS_OF_TWO, THEIRS_OF_MANY = (
    dict(pair.split("=") for pair in (BOTH + others).split()) for others in (OF_TWO, OF_MANY)
)
"""CalArena's opponents: the classes of `probmetrics`, less their ending."""
SETTINGS: dict[str, dict[str, Any]] = {
    "Hist-uniform": {"strategy": "uniform"},
    "Hist-quantile": {"strategy": "quantile"},
    "Isotonic": {"method": "isotonic", "cv": "prefit"},
    "Platt-probs": {"method": "sigmoid", "cv": "prefit"},
    "Platt-logits": {"type": "affine"},
    "Quadratic": {"type": "quadratic"},
    "Dirichlet": {"n_cv": 0, "reg_lambda": 1e-3, "reg_mu": 1e-3},
}
ONE_AGAINST_REST = {"Hist-uniform", "Hist-quantile", "CIR"}
LARGE = {"dirichlet", "XGBoost", "LightGBM", "CatBoost", "Spline", "BBQ", "Venn-Abers", "Kernel", "CIR"}
MOST_OF_LARGE = 20  # With more classes these take minutes to fit
MOST_CLASSES = 200
GROUPS = {"cifar10_densenet40": (0, 1, 8, 9)}
"""The classes of a set that are one of two: machines, not animals, as in CalArena; else the second half."""


class Split(NamedTuple):
    """One experiment: logits and labels to fit to, and to judge on."""

    name: str
    logits: Floats
    labels: NDArray[np.int64]
    test_logits: Floats
    test_labels: NDArray[np.int64]


def tables() -> Iterator[tuple[str, Floats, NDArray[np.int64]]]:
    """Give inputs and labels of the tabular sets: half of them with two classes."""
    rng = np.random.default_rng(0)
    for name in ("iris", "wine", "digits"):
        yield name, *getattr(datasets, f"load_{name}")(return_X_y=True)
    inputs, labels = datasets.load_breast_cancer(return_X_y=True)
    yield "breast-cancer", inputs, labels
    inputs, labels = datasets.load_digits(return_X_y=True)
    yield "digits-even", inputs, (labels % 2).astype(np.int64)
    inputs, target = datasets.load_diabetes(return_X_y=True)
    yield "diabetes", inputs, (target > np.median(target)).astype(np.int64)
    yield "diabetes-thirds", inputs, np.searchsorted(np.quantile(target, [1 / 3, 2 / 3]), target)
    for classes, flip in ((2, 0.1), (4, 0.05), (10, 0.0)):
        made = datasets.make_classification(
            4000, 20, n_informative=10, n_classes=classes, flip_y=flip, class_sep=0.8, random_state=1
        )
        yield f"classification-{classes}", *made
    made = datasets.make_classification(
        6000, 20, n_informative=6, weights=[0.95], flip_y=0.02, random_state=2
    )
    yield "rare", *made
    inputs, labels = datasets.make_hastie_10_2(4000, random_state=3)
    yield "hastie", inputs, (labels > 0).astype(np.int64)
    inputs, labels = datasets.make_gaussian_quantiles(
        n_samples=3000, n_features=6, n_classes=5, random_state=4
    )
    yield "quantiles", inputs + 0.3 * rng.normal(size=inputs.shape), labels


CLASSIFIERS: dict[str, Callable[[int], Any]] = {
    "forest": lambda seed: RandomForestClassifier(100, random_state=seed),
    "boosting": lambda seed: HistGradientBoostingClassifier(random_state=seed),
    "bayes": lambda seed: GaussianNB(),
    "network": lambda seed: make_pipeline(
        StandardScaler(), MLPClassifier((64,), max_iter=300, random_state=seed)
    ),
}


def experiments(folders: list[Path], splits: int, sizes: list[int]) -> Iterator[Split]:
    for file in (file for folder in folders for file in sorted(folder.glob("*/val.npz"))):
        parts = [read(path) for path in (file, file.with_name("test.npz")) if path.exists()]
        logits = np.concatenate([part.scores for part in parts])
        labels = np.concatenate([part.labels for part in parts])
        if logits.shape[1] > MOST_CLASSES:
            continue
        both = [(logits, labels), of_two(file.parent.name, logits, labels)]
        for x, y in both if logits.shape[1] > 2 else both[:1]:
            for seed in range(splits):
                used, unseen = np.array_split(np.random.default_rng(seed).permutation(len(y)), 2)
                for size in (*(size for size in sizes if size < len(used)), len(used)):
                    part = used[:size]
                    yield Split(f"{file.parent.name}/{size}", x[part], y[part], x[unseen], y[unseen])
    for name, inputs, labels in tables():
        for seed in range(splits):
            halves = partial(train_test_split, test_size=0.5, random_state=seed)
            x, rest, y, rest_y = halves(inputs, labels, stratify=labels)
            val, test, val_y, test_y = halves(rest, rest_y, stratify=rest_y)
            for kind, classifier in CLASSIFIERS.items():
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    model = classifier(seed).fit(x, y)
                    rows = [np.log(np.maximum(model.predict_proba(part), TINY)) for part in (val, test)]
                yield Split(f"{name}/{kind}", rows[0], val_y, rows[1], test_y)


def of_two(name: str, logits: Floats, labels: NDArray[np.int64]) -> tuple[Floats, NDArray[np.int64]]:
    """Give the logits and labels of two groups of the classes."""
    classes = np.arange(logits.shape[1])
    second = np.isin(classes, GROUPS.get(name, classes[len(classes) // 2 :]))
    both = [np.logaddexp.reduce(logits[:, group], axis=1) for group in (~second, second)]
    return np.stack(both, axis=1), second[labels].astype(np.int64)


def family_of(num_classes: int) -> str:
    """Name the table of a set: each compares the methods that all of its sets can have."""
    return "two" if num_classes == 2 else "some" if num_classes <= MOST_OF_LARGE else "many"


def published(clone: Path) -> Iterator[tuple[str, Split, dict[str, float]]]:
    """Give the experiments of each file of CalArena, and the losses that it has published of them."""
    files = sorted(clone.glob("calibration_benchmarks/*.h5"))
    if not files:
        sys.exit(f"{clone} has no calibration_benchmarks/*.h5; its README says where they are.")
    for file in files:
        losses: dict[tuple[str, str], dict[str, float]] = {}
        for results in (clone / "results" / file.stem).glob("*.csv"):
            for row in csv.DictReader(results.read_text().splitlines()):
                if loss := row[f"{results.stem}_logloss"]:  # empty where the method failed
                    name = BASE if results.stem == "Base-model" else results.stem
                    losses.setdefault((row["dataset"], row["model"]), {})[name] = float(loss)
        with h5py.File(file) as experiments:
            for dataset, models in experiments.items():
                for model, group in models.items():
                    cal, test = (group[f"probas_{part}"][:] for part in ("cal", "test"))
                    if cal.ndim == 1:
                        cal, test = (np.stack([1 - p, p], axis=1) for p in (cal, test))
                    logits = (np.log(np.maximum(p.astype(np.float64), TINY)) for p in (cal, test))
                    labels = (group[f"labels_{part}"][:].astype(np.int64) for part in ("cal", "test"))
                    (fitted, unseen), (own, others) = logits, labels
                    split = Split(f"{dataset}/{model}", fitted, own, unseen, others)
                    yield file.stem, split, losses.get((dataset, model), {})


def ours(split: Split, data: ValidationSet) -> Iterator[tuple[str, Floats, float]]:
    """Give our methods' probabilities on the test rows, and the processor seconds of their fits."""
    for name in OURS:
        if name in LARGE and data.num_classes > MOST_OF_LARGE:
            continue
        begun = time.process_time()
        result = fit_data(name, data)
        seconds = time.process_time() - begun
        p = result.on_arrays(split.test_logits)
        yield name, p, seconds
        if name == "auto":
            begun = time.process_time()
            report = report_on(result.method, data, unseen=result.unseen)
            seconds += time.process_time() - begun
            raw = fit_data(BASE, data).on_arrays(split.test_logits)
            yield "auto, gate", p if report.is_better else raw, seconds


def theirs(split: Split, data: ValidationSet) -> Iterator[tuple[str, Floats, float]]:
    """Give the same of the opponents that are installed."""
    softmax = fit_data(BASE, data).on_arrays
    for name in THEIRS_OF_TWO if data.num_classes == 2 else THEIRS_OF_MANY:
        if name in LARGE and data.num_classes > MOST_OF_LARGE:
            continue
        if (one := opponent(name, data.num_classes)) is None:
            continue
        begun = time.process_time()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                p = one.fit(softmax(split.logits), split.labels).predict_proba(softmax(split.test_logits))
            except Exception as error:  # some refuse a probability of 1 + 1e-16, some a rare class
                print(f"{split.name}: {name}: {error!r:.200}", file=sys.stderr)
                continue
        yield name, p, time.process_time() - begun


def opponent(name: str, classes: int) -> Any:
    """Return a new calibrator of probmetrics; None where a package is missing, which is said once."""
    kind = (THEIRS_OF_TWO if classes == 2 else THEIRS_OF_MANY)[name]
    try:
        calibrators = importlib.import_module("probmetrics.calibrators")
        one = getattr(calibrators, f"{kind}Calibrator")(**SETTINGS.get(name, {}))
    except ImportError as error:
        warnings.warn(f"Without {name}: {error}", stacklevel=1)
        return None
    of_rest = classes > 2 and name in ONE_AGAINST_REST
    return calibrators.MulticlassOneVsRestCalibrator(one) if of_rest else one


def log_losses(p: Floats, labels: NDArray[np.int64]) -> Floats:
    return -np.log(np.clip(p[np.arange(len(labels)), labels], TINY, 1.0))


def table(rows: list[dict[str, Any]]) -> str:
    """Compare methods; a set that one did not fit counts in none of its figures."""
    share = {name: np.mean([name in row["losses"] for row in rows]) for row in rows for name in row["losses"]}
    names = [name for name, of_rows in share.items() if of_rows > 0.9]
    losses = np.array([[row["losses"].get(name, np.nan) for name in names] for row in rows])
    seconds = np.array([[row["seconds"].get(name, np.nan) for name in names] for row in rows])
    plain, sms = losses[:, [names.index(BASE)]], seconds[:, [names.index("sms")]]
    theirs = (THEIRS_OF_TWO.keys() | THEIRS_OF_MANY.keys()) & set(names)
    pool = [place for place, name in enumerate(names) if name in theirs or name == BASE or not theirs]
    regret = np.nanmean(losses - np.nanmin(losses, axis=1, keepdims=True), axis=0)
    worse = np.mean(losses > plain + 1e-9, axis=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of methods whose time is unknown
        times = np.nanmedian(seconds / sms, axis=0)
    rates = (win_rate(losses[:, n], losses[:, [m for m in pool if m != n]]) for n in range(len(names)))
    wins = np.fromiter(rates, float)
    lines = ["| method | win rate | mean loss | regret | worse, % | CPU, sms = 1 |", "|---" * 6 + "|"]
    loss = np.nanmean(losses, axis=0)
    for place in np.argsort(-wins):
        figures = f"{wins[place]:.3f} | {loss[place]:.4f} | {regret[place]:.4f} | {100 * worse[place]:.0f}"
        seconds_of = "–" if np.isnan(times[place]) else f"{times[place]:.1f}"
        lines.append(f"| {names[place]} | {figures} | {seconds_of} |")
    return "\n".join(lines)


def win_rate(one: Floats, others: Floats) -> float:
    """Return the share of the duels of `one` (N) with `others` (N, M), over the splits, that it wins."""
    won = (one[:, None] < others) + 0.5 * (one[:, None] == others)
    return float(won[~np.isnan(one[:, None] - others)].mean())


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("folders", nargs="*", type=Path)
    parser.add_argument("--splits", type=int, default=5)
    parser.add_argument("--sizes", type=int, nargs="*", default=[])
    parser.add_argument("--only", choices=("two", "some", "many"))
    parser.add_argument("--published", type=Path, metavar="CLONE")
    given = parser.parse_args()
    families: dict[str, list[dict[str, Any]]] = {}
    if given.published:
        every = published(given.published)
    else:
        made = experiments(given.folders, given.splits, given.sizes)
        every = ((family_of(one.logits.shape[1]), one, {}) for one in made)
    for family, split, known in every:
        if given.only not in (None, family_of(split.logits.shape[1])):
            continue
        row: dict[str, Any] = {"set": split.name, "losses": known, "seconds": {}}
        data = check_validation_set(split.logits, split.labels)
        others = () if given.published else theirs(split, data)
        for name, p, seconds in (*ours(split, data), *others):
            row["losses"][name] = float(log_losses(p, split.test_labels).mean())
            row["seconds"][name] = seconds
        families.setdefault(family, []).append(row)
        losses = "  ".join(f"{name} {loss:.4f}" for name, loss in row["losses"].items())
        print(f"{split.name}  {losses}", file=sys.stderr)
    for family, rows in families.items():
        sets = {row["set"] for row in rows}
        print(f"\nClasses: {family}; {len(sets)} sets, {len(rows)} splits\n\n{table(rows)}")


if __name__ == "__main__":
    main()
