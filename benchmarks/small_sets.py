"""Methods fitted to small random parts of validation sets, and evaluated on the whole test sets.

    python -m benchmarks.small_sets FOLDER... [--sizes 50,100,300,1000] [--draws 3] [--methods sms,auto]
        [--file FILE] [--as NAME]

A folder holds `val.npz` and `test.npz` with `logits` (N, K) or `probabilities`, and `labels`. The test NLLs
are stored in FILE, one line each, and a run computes only what is missing. `--as` stores the results of
`auto` under another name, to compare versions of boxcal: run this file with another version on the path.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from boxcal.calibrators import evaluate, fit

METHODS = "uncalibrated,ts,pb,ets,lb,vector,sms,matrix,dirichlet,beta,auto"
FILE = Path("benchmarks/results/small_sets.tmp")
REFERENCE = "uncalibrated"

Array = np.ndarray[Any, Any]


def read(path: Path) -> tuple[Array, Array]:
    """Read logits, or log probabilities, and labels."""
    with np.load(path) as arrays:
        if "logits" in arrays:
            return arrays["logits"].astype(np.float64), arrays["labels"]
        tiny = np.finfo(np.float32).tiny
        return np.log(np.maximum(arrays["probabilities"].astype(np.float64), tiny)), arrays["labels"]


def one(method: str, val: tuple[Array, Array], test: tuple[Array, Array]) -> dict[str, Any]:
    """Fit, and give the method fitted, its test NLL and the seconds."""
    started = time.perf_counter()
    result = fit(method, *val)
    seconds = time.perf_counter() - started
    answers = [result.calibrator(rows) for rows in torch.split(torch.from_numpy(test[0]), 2000)]
    late = sum(each["status"] == "no time left" for each in result.choice.get("candidates", []))
    return {
        "fitted": result.method,
        "nll": evaluate(torch.cat(answers), test[1]).nll,
        "seconds": seconds,
        "late": late,
    }


def tables(rows: list[dict[str, Any]]) -> str:
    """Write a table for each size: differences of test NLL to no calibration, means over draws."""
    names = list(dict.fromkeys(row["method"] for row in rows))
    sets = list(dict.fromkeys(row["set"] for row in rows))
    nll = {(row["set"], row["size"], row["draw"], row["method"]): row["nll"] for row in rows}
    lines = []
    for size in sorted({row["size"] for row in rows}):
        lines += [
            "",
            f"N = {size}",
            "",
            f"| method | {' | '.join(sets)} | mean |",
            "|---" * (len(sets) + 2) + "|",
        ]
        for name in names:
            cells, means = [], []
            for each in sets:
                differences = [
                    value - nll[each, size, key[2], REFERENCE]
                    for key, value in nll.items()
                    if key[:2] == (each, size) and key[3] == name
                ]
                means.append(float(np.mean(differences)) if differences else math.nan)
                cells.append(f"{means[-1]:+.4f}" if differences else "-")
            lines.append(f"| `{name}` | {' | '.join(cells)} | {np.mean(means):+.4f} |")
    return "\n".join(lines)


def compared(rows: list[dict[str, Any]], name: str, other: str) -> str:
    """Compare two methods over all draws, and on each set and size."""
    nll: dict[str, dict[tuple[Any, ...], float]] = defaultdict(dict)
    for row in rows:
        nll[row["method"]][row["set"], row["size"], row["draw"]] = row["nll"]
    common = nll[name].keys() & nll[other].keys()
    groups: dict[tuple[Any, ...], list[float]] = defaultdict(list)
    for key in common:
        groups[key[:2]].append(nll[name][key] - nll[other][key])
    means = np.array([np.mean(values) for values in groups.values()])
    text = [
        f"`{name}` minus `{other}`: mean {means.mean():+.4f} over {len(means)} sets and sizes,"
        f" lower in {int((means < -1e-6).sum())}, higher in {int((means > 1e-6).sum())}"
    ]
    for key, values in sorted(groups.items()):
        mean = float(np.mean(values))
        error = float(np.std(values, ddof=1)) / math.sqrt(len(values))
        if mean > max(1e-6, 2 * error):
            text.append(f"- higher by more than two standard errors: {key}: {mean:+.4f} ({error:.4f})")
    return "\n".join(text)


def main() -> None:
    """Run what is missing and print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folders", nargs="*", type=Path)
    parser.add_argument("--sizes", default="50,100,300,1000")
    parser.add_argument("--draws", type=int, default=3)
    parser.add_argument("--methods", default=METHODS)
    parser.add_argument("--file", type=Path, default=FILE)
    parser.add_argument("--as", dest="name", default="auto")
    options = parser.parse_args()
    sizes = [int(size) for size in options.sizes.split(",")]
    methods = list(dict.fromkeys([REFERENCE, *options.methods.split(",")]))
    lines = options.file.read_text().splitlines() if options.file.exists() else []
    rows = [json.loads(line) for line in lines]
    done = {(row["set"], row["size"], row["draw"], row["method"]) for row in rows}
    for folder in options.folders:
        (logits, labels), test = read(folder / "val.npz"), read(folder / "test.npz")
        for draw in range(options.draws):
            order = np.random.default_rng(draw).permutation(len(labels))
            for size in sizes:
                for method in methods:
                    name = options.name if method == "auto" else method
                    if (folder.name, size, draw, name) in done:
                        continue
                    found = one(method, (logits[order[:size]], labels[order[:size]]), test)
                    row = {"set": folder.name, "size": size, "draw": draw, "method": name, **found}
                    rows.append(row)
                    with options.file.open("a") as file:
                        file.write(json.dumps(row) + "\n")
    print(tables(rows))
    for other in sorted({row["method"] for row in rows if row["method"].startswith("auto-")}):
        print("\n" + compared(rows, "auto", other))


if __name__ == "__main__":
    main()
