"""The comparison of methods on real data sets: `python -m benchmarks.results DATA` writes `docs/results.md`.

DATA is a folder with a folder per data set, `NAME/val.npz` and `NAME/test.npz`; sets that are not there
keep the figures of their last run. Each set's figures are kept in `docs/results/NAME.json` as soon as they
are there.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.results_page import page
from calibrators import fit
from calibrators.data import ValidationSet, check_validation_set
from calibrators.evaluation.comparison import PAPERS_METHODS, compare_methods
from calibrators.evaluation.tables import markdown

FOLDER = Path(__file__).parents[1] / "docs" / "results"
PAGE = FOLDER.parent / "results.md"


@dataclass(frozen=True)
class DataSet:
    """A data set of the page: its folder's name, what people call it, and the methods run on it."""

    name: str
    title: str
    methods: tuple[str, ...] = PAPERS_METHODS
    with_auto: bool = True


FOLDS = 3
QUICK = ("uncalibrated", "pb", "pb-lower", "pb-upper", "ts", "ts+pb")
"""Methods that are fitted in seconds on the larger sets; four fits of each make the page."""

DATA_SETS = (
    DataSet("cifar10_densenet40", "CIFAR-10, DenseNet-40"),
    DataSet("eurosat_rgb", "EuroSAT-RGB, nearly calibrated already"),
    DataSet("cifar100_densenetbc100", "CIFAR-100, DenseNet-BC-100", QUICK, with_auto=False),
    DataSet("tinyimagenet_mobilenet_v2", "Tiny-ImageNet, MobileNetV2, 200 classes", QUICK, with_auto=False),
    DataSet(
        "tinyimagenet_mobilenet_v2_k1000",
        "Tiny-ImageNet, MobileNetV2, all 1,000 outputs",
        tuple(method for method in QUICK if method != "ts+pb"),
        with_auto=False,
    ),
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
    """Compare the methods on one data set and keep the figures; False where it is not there."""
    folder = data / data_set.name
    if not (folder / "val.npz").exists() or not (folder / "test.npz").exists():
        print(f"{data_set.name}: not in {data}, skipped")
        return False
    validation = read(folder / "val.npz")
    methods, auto = list(data_set.methods), None
    if data_set.with_auto:
        chosen = fit("auto", validation.scores, validation.labels)
        auto = {"method": chosen.method, "seconds": chosen.seconds}
        methods.append(chosen.method)
    comparison = compare_methods(
        methods,
        validation,
        read(folder / "test.npz"),
        folds=FOLDS,
        progress=lambda fraction, stage: print(f"\r{data_set.name} {fraction:4.0%} {stage:60.60}", end=""),
    )
    document = {
        "title": data_set.title,
        "auto": auto,
        **comparison.to_dict(),
    }
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / f"{data_set.name}.json").write_text(json.dumps(document, indent=1) + "\n")
    print(f"\n{markdown(comparison)}")
    return True


def main() -> None:
    """Run the sets that are there and write the page from all figures kept."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("data", type=Path, help="folder of data sets")
    arguments.add_argument("--only", nargs="*", help="names of data sets; all of them unless given")
    options = arguments.parse_args()
    for data_set in DATA_SETS:
        if options.only is None or data_set.name in options.only:
            run(options.data, data_set)
    kept = [FOLDER / f"{data_set.name}.json" for data_set in DATA_SETS]
    documents = [json.loads(path.read_text()) for path in kept if path.exists()]
    if not documents:
        sys.exit(f"no data set in {options.data}, and no figures kept from before: nothing to write")
    PAGE.write_text(page(documents))


if __name__ == "__main__":
    main()
