"""The paper's experiment: `python -m benchmarks.paper DATA...` fits the methods and prints docs/results.md.

    python -m benchmarks.paper DATA... [--only NAME...] [--splits 10] [--minutes 180]
    python -m benchmarks.paper --runtime

DATA is a folder with a folder per data set, `NAME/val.npz` and `NAME/test.npz`. Each method is fitted to the
given validation set and evaluated on the given test set; then on nine random redistributions of both. Every
result is stored at once in `benchmarks/results/paper`, and a run computes only what is missing; all of it
takes about two hours. `--minutes 0` prints the page of all that is stored. `--runtime` measures the run
time of the operator, within two minutes, and draws the figure `docs/images/runtime.svg`.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks import command_line
from benchmarks.paper.cells import Cell, run
from benchmarks.paper.page import page
from benchmarks.paper.runtime import measure, plot
from benchmarks.paper.sets import DATA_SETS, SPLITS, DataSet, split
from boxcal.calibrators.data import ValidationSet
from boxcal.calibrators.errors import MissingDataError
from boxcal.calibrators.fitting.fitted_method import Fitted

FOLDER = Path(__file__).parents[1] / "results" / "paper"
FIGURE = Path(__file__).parents[2] / "docs" / "images" / "runtime.svg"


def commit() -> str:
    """Name the commit that is measured."""
    described = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    return subprocess.run(described, check=True, capture_output=True, text=True).stdout.strip()


class Store:
    def __init__(self, data_set: DataSet) -> None:
        self.path, self.commit = FOLDER / f"{data_set.name}.json", commit()
        self.document: dict[str, Any] = {"cells": []}
        if self.path.exists():
            self.document = json.loads(self.path.read_text())
        self.document |= {"name": data_set.name, "title": data_set.title, "remark": data_set.remark}
        self.document["without"] = list(data_set.without)

    def describe(self, validation: ValidationSet, test: ValidationSet) -> None:
        scores, labels = test.scores, test.labels
        confidence, predicted = torch.from_numpy(scores).softmax(dim=1).max(dim=1)
        self.document |= {
            "classes": scores.shape[1],
            "fit_samples": len(validation),
            "test_samples": len(test),
            "confidence_beyond_accuracy": float(
                (confidence - (predicted == torch.from_numpy(labels)).double()).mean()
            ),
        }

    def is_done(self, method: str, seed: int) -> bool:
        return any(cell["method"] == method and cell["split"] == seed for cell in self.document["cells"])

    def add(self, cell: Cell) -> None:
        """Write a cell to the file, one per line."""
        self.document["cells"].append(cell.to_dict() | {"commit": self.commit})
        head = {name: value for name, value in self.document.items() if name != "cells"}
        cells = ",\n".join(json.dumps(one) for one in self.document["cells"])
        FOLDER.mkdir(parents=True, exist_ok=True)
        partial = self.path.with_suffix(".tmp")
        partial.write_text(json.dumps(head, indent=1)[:-2] + f',\n "cells": [\n{cells}\n ]\n}}\n')
        partial.replace(self.path)


def run_split(folder: Path, data_set: DataSet, seed: int, deadline: float) -> None:
    store = Store(data_set)
    missing = [name for name in data_set.methods if not store.is_done(name, seed)]
    if not missing:
        return
    validation, test = split(folder, seed)
    if seed == 0:
        store.describe(validation, test)
    known: dict[str, Fitted] = {}
    for method in missing:
        if time.monotonic() > deadline:
            return
        try:
            cell = run(method, seed, validation, test, known)
        except MissingDataError:
            continue
        store.add(cell)
        print(
            f"{data_set.name} split {seed}: {method} {cell.seconds:.1f} s, test NLL {cell.nll:.4f}",
            flush=True,
        )


def main() -> None:
    arguments = command_line(__doc__)
    arguments.add_argument("data", nargs="*", type=Path, help="folders of data sets")
    arguments.add_argument("--only", nargs="*", help="names of data sets (default: all)")
    arguments.add_argument("--splits", type=int, default=SPLITS)
    arguments.add_argument("--minutes", type=float, default=180.0, help="time after which no fit starts")
    arguments.add_argument("--runtime", action="store_true", help="measure the operator's run time only")
    options = arguments.parse_args()
    if options.runtime:
        plot(measure(), FIGURE)
        return
    deadline = time.monotonic() + 60 * options.minutes
    for seed in range(options.splits):
        for data_set in DATA_SETS:
            folders = [folder / data_set.name for folder in options.data]
            folders = [folder for folder in folders if (folder / "val.npz").exists()]
            wanted = options.only is None or data_set.name in options.only
            if wanted and folders and time.monotonic() < deadline:
                run_split(folders[0], data_set, seed, deadline)
    documents = [Store(data_set).document for data_set in DATA_SETS]
    documents = [one for one in documents if one["cells"]]
    if not documents:
        sys.exit(f"no data set in {options.data} and no recorded results: nothing to print")
    print(page(documents))


if __name__ == "__main__":
    main()
