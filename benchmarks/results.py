"""Compares methods on real data sets: `python -m benchmarks.results DATA` writes `docs/results.md`.

DATA is a folder with a folder per data set, `NAME/val.npz` and `NAME/test.npz`; for a missing data
set the results of its last run are used. The results of each data set are stored in `docs/results/NAME.json`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.results_page import page
from boxcal.calibrators import fit
from boxcal.calibrators.data import ValidationSet, check_validation_set
from boxcal.calibrators.evaluation.bootstrap import mean_estimates
from boxcal.calibrators.evaluation.comparison import BASELINE, PAPERS_METHODS, compare_methods
from boxcal.calibrators.evaluation.crossfit import answers_on, fit_set
from boxcal.calibrators.evaluation.tables import markdown
from boxcal.calibrators.fitting.result import FitResult

FOLDER = Path(__file__).parents[1] / "docs" / "results"
PAGE = FOLDER.parent / "results.md"


FOLDS = 3
DRAWS = 5000
"""Resamples of the paired comparisons of `auto`."""
QUICK = ("uncalibrated", "pb", "pb-lower", "pb-upper", "lb", "ts", "ts+pb", "ets", "vector", "beta")
"""Methods whose fit takes at most a minute with many classes; each is fitted four times."""
LARGE = (*QUICK, "dpb", "pts", "pb-mlp")
OTHERS = ("vector", "matrix", "beta", "histogram", "isotonic", "venn-abers")
"""Common methods that are not in the paper."""


@dataclass(frozen=True)
class DataSet:
    """A data set: the name of its folder, its title, and the methods that are run."""

    name: str
    title: str
    methods: tuple[str, ...] = (*PAPERS_METHODS, *OTHERS)


DATA_SETS = (
    DataSet("cifar10_densenet40", "CIFAR-10, DenseNet-40"),
    DataSet("eurosat_rgb", "EuroSAT-RGB, almost calibrated"),
    DataSet("cifar100_densenetbc100", "CIFAR-100, DenseNet-BC-100"),
    DataSet("tinyimagenet_mobilenet_v2", "Tiny-ImageNet, MobileNetV2, 200 classes", LARGE),
    DataSet("tinyimagenet_mobilenet_v2_k1000", "Tiny-ImageNet, MobileNetV2, all 1,000 outputs", QUICK),
)


def read(path: Path) -> ValidationSet:
    """Read `.npz` with `labels` and `logits`, or `probabilities`, whose logarithms serve as logits."""
    with np.load(path, allow_pickle=False) as arrays:
        if "logits" in arrays:
            logits = arrays["logits"].astype(np.float64)
        else:
            tiny = np.finfo(np.float32).tiny
            logits = np.log(np.maximum(arrays["probabilities"].astype(np.float64), tiny))
        return check_validation_set(logits, arrays["labels"])


def run(data: Path, data_set: DataSet) -> bool:
    """Compare the methods on one data set and store the results; False if it does not exist."""
    folder = data / data_set.name
    if not (folder / "val.npz").exists() or not (folder / "test.npz").exists():
        print(f"{data_set.name}: not in {data}, skipped")
        return False
    validation, test = read(folder / "val.npz"), read(folder / "test.npz")

    def tell(fraction: float, stage: str) -> None:
        print(f"\r{data_set.name} {fraction:4.0%} {stage:60.60}", end="")

    chosen = fit("auto", validation.scores, validation.labels, progress=tell)
    comparison = compare_methods(
        [*data_set.methods, chosen.method], validation, test, folds=FOLDS, progress=tell
    )
    upper_alone = answers_on(fit_set("pb-upper", validation, seed=0), test).probabilities
    confidence, predicted = test.scores.softmax(dim=1).max(dim=1)
    document = {
        "title": data_set.title,
        "confidence_beyond_accuracy": float((confidence - (predicted == test.labels).double()).mean()),
        "pb_upper_error_by_order": float((upper_alone.argmax(dim=1) != test.labels).double().mean()),
        "auto": _auto(chosen, [row.method for row in comparison.rows], validation, test),
        **comparison.to_dict(),
    }
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / f"{data_set.name}.json").write_text(json.dumps(document, indent=1) + "\n")
    print(f"\n{markdown(comparison)}")
    return True


def _auto(
    chosen: FitResult, methods: Sequence[str], validation: ValidationSet, test: ValidationSet
) -> dict[str, Any]:
    """Compare `auto` with the best method and with no calibration, on the test set.

    The best is found on the test set, so its difference is also given with an interval that holds for the
    differences to all methods at once.
    """
    losses = {
        method: -torch.log(answers_on(fit_set(method, validation, seed=0), test).probabilities)
        .gather(1, test.labels[:, None])[:, 0]
        .numpy()
        for method in methods
    }
    best = min(losses, key=lambda method: float(losses[method].mean()))
    own = losses[chosen.method]
    differences = np.column_stack([own - losses[method] for method in methods])
    alone, together = (
        dict(zip(methods, mean_estimates(differences, together=joined, draws=DRAWS), strict=True))
        for joined in (False, True)
    )
    return {
        "method": chosen.method,
        "seconds": chosen.seconds,
        "test_nll": float(own.mean()),
        "best": best,
        "methods": len(methods),
        "against_best": alone[best].to_dict(),
        "against_best_of_all": together[best].to_dict(),
        "against_uncalibrated": alone[BASELINE].to_dict(),
    }


def main() -> None:
    """Run the available data sets and write the page from all recorded results."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("data", type=Path, help="folder of data sets")
    arguments.add_argument("--only", nargs="*", help="names of data sets (default: all)")
    options = arguments.parse_args()
    for data_set in DATA_SETS:
        if options.only is None or data_set.name in options.only:
            run(options.data, data_set)
    kept = [FOLDER / f"{data_set.name}.json" for data_set in DATA_SETS]
    documents = [json.loads(path.read_text()) for path in kept if path.exists()]
    if not documents:
        sys.exit(f"no data set in {options.data} and no recorded results: nothing to write")
    PAGE.write_text(page(documents))


if __name__ == "__main__":
    main()
