"""Corrupted versions of real validation sets: which warning names each, and what an activation would do.

`python -m benchmarks.corruptions FOLDER... [--method auto] [--budget 120] [--every]`

Each folder holds `val.npz` and `test.npz` (logits or probabilities, and labels). The validation set is
checked as it is and in seven corrupted versions. Where no warning is serious, the method is fitted and judged
as by `/fit`. If the gate activates it, it is compared with the unchanged logits on the clean test set.
`--every` also fits where a serious warning prevents the activation, to show what it prevents.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from boxcal.app.fitting.server.runner import decide
from boxcal.app.registry.records import ActivatePolicy
from boxcal.calibrators import Calibrator, fit
from boxcal.calibrators.checks import check_data
from boxcal.calibrators.data import check_validation_set
from boxcal.calibrators.evaluation.crossfit import answers_of
from boxcal.calibrators.evaluation.judgement import compare, judge
from boxcal.calibrators.evaluation.outcomes import outcomes
from boxcal.calibrators.evaluation.report import cross_fitted_report

Floats = NDArray[np.float64]
Labels = NDArray[np.int64]
Set = tuple[Floats, Labels]


def read(path: Path) -> Set:
    """Logits and labels of a file; probabilities become logarithms, as in an upload."""
    arrays = np.load(path)
    if "logits" in arrays.files:
        return arrays["logits"].astype(np.float64), arrays["labels"]
    smallest = np.finfo(np.float32).tiny
    return np.log(np.maximum(arrays["probabilities"].astype(np.float64), smallest)), arrays["labels"]


def permute_labels(logits: Floats, labels: Labels, rng: np.random.Generator, share: int = 10) -> Set:
    """Permute the labels of one row in `share`."""
    some = rng.permutation(len(labels))[: len(labels) // share]
    changed = labels.copy()
    changed[some] = labels[rng.permutation(some)]
    return logits, changed


def shift_labels(logits: Floats, labels: Labels, rng: np.random.Generator) -> Set:
    """Add 1 to every label."""
    del rng
    return logits, (labels + 1) % logits.shape[1]


def remove_classes(logits: Floats, labels: Labels, rng: np.random.Generator) -> Set:
    """Remove a class; all but one where most classes are missing already."""
    present = np.unique(labels)
    gone = rng.permutation(present)[: 1 if len(present) == logits.shape[1] else len(present) - 1]
    kept = ~np.isin(labels, gone)
    return logits[kept], labels[kept]


def repeat_rows(logits: Floats, labels: Labels, rng: np.random.Generator) -> Set:
    """Repeat half of the rows."""
    again = np.concatenate([np.arange(len(labels)), rng.permutation(len(labels))[: len(labels) // 2]])
    return logits[again], labels[again]


def replace_by_noise(logits: Floats, labels: Labels, rng: np.random.Generator) -> Set:
    """Replace three tenths of the rows of logits by Gaussian noise of the same mean and deviation."""
    changed = logits.copy()
    some = rng.permutation(len(labels))[: 3 * len(labels) // 10]
    changed[some] = logits.mean() + logits.std() * rng.normal(size=(len(some), logits.shape[1]))
    return changed, labels


def send_probabilities(logits: Floats, labels: Labels, rng: np.random.Generator) -> Set:
    """Send probabilities as logits."""
    del rng
    return torch.from_numpy(logits).softmax(dim=1).numpy(), labels


CORRUPTIONS: dict[str, tuple[Callable[[Floats, Labels, np.random.Generator], Set], set[str]]] = {
    "10 % of labels permuted": (permute_labels, {"unrelated_labels"}),
    "5 % of labels permuted": (partial(permute_labels, share=20), {"unrelated_labels"}),
    "labels shifted by one": (shift_labels, {"error_rate"}),
    "class removed": (remove_classes, {"absent_classes", "one_class"}),
    "half of the rows repeated": (repeat_rows, {"duplicates"}),
    "30 % of rows are noise": (replace_by_noise, {"unrelated_labels"}),
    "probabilities as logits": (send_probabilities, {"rows_sum_to_constant"}),
}
"""What each is called, what it does, and the warnings that name it."""


@dataclass(frozen=True)
class Outcome:
    """What became of one version of a set."""

    warnings: list[str]
    serious: list[str]
    method: str = ""
    activated: bool = False
    worse: str = ""

    @property
    def shown(self) -> str:
        """In a few words."""
        if self.activated:
            return f"`{self.method}` activated, {self.worse or 'no score worse on the test set'}"
        if self.method:
            verb = "would have made worse" if self.worse else "would have made nothing worse"
            return f"not activated; `{self.method}` {verb} {self.worse}".rstrip()
        return "not activated"


def tried(validation: Set, test: Set, arguments: argparse.Namespace) -> Outcome:
    """Check one version, fit to it where the gate may activate it, and judge that on clean data."""
    found = check_data(*validation)
    serious = [warning.code for warning in found if warning.severity == "serious"]
    codes = [warning.code for warning in found]
    if serious and not arguments.every:
        return Outcome(codes, serious)
    result = fit(arguments.method, *validation, budget_seconds=arguments.budget)
    bias = result.choice.get("selection_bias", {})
    report = cross_fitted_report(result.method, *validation, selection_bias=bias)
    decision = decide(
        ActivatePolicy.IF_BETTER,
        is_better=report.is_better,
        reason=report.against.verdict.reason,
        warnings=[warning.to_dict() for warning in report.warnings],
        compared_with=0,
        active_version=0,
    )
    codes = [warning.code for warning in report.warnings]
    return Outcome(codes, serious, result.method, decision.activate, worse_scores(result.calibrator, test))


def worse_scores(calibrator: Calibrator, test: Set) -> str:
    """Name the scores that a calibrator makes significantly worse (95 % intervals) on a test set."""
    data = check_validation_set(*test)
    after = answers_of(calibrator, data.scores)
    raw = torch.softmax(data.scores, dim=1)
    first, second = (
        judge(outcomes(probabilities, data.labels, predicted))
        for probabilities, predicted in ((after.probabilities, after.predicted), (raw, raw.argmax(dim=1)))
    )
    difference = compare(first, second)
    names = {"nll": "NLL", "brier": "Brier", "smooth_ece": "smooth ECE"}
    return ", ".join(
        f"{shown} {difference[name].value:+.3f}" for name, shown in names.items() if difference[name].low > 0
    )


def main() -> None:
    """Print a row for each version of each set, and what failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", type=Path, nargs="+")
    parser.add_argument("--method", default="auto")
    parser.add_argument("--budget", type=float, default=120.0)
    parser.add_argument("--every", action="store_true")
    arguments = parser.parse_args()
    unnamed, harmful, false_alarms = [], [], []
    print("| set | version | warnings | outcome |")
    print("|---|---|---|---|", flush=True)
    for folder in arguments.folders:
        validation, test = read(folder / "val.npz"), read(folder / "test.npz")
        versions: dict[str, tuple[Set, set[str]]] = {"clean": (validation, set())}
        for number, (name, (corrupt, codes)) in enumerate(CORRUPTIONS.items()):
            versions[name] = corrupt(*validation, np.random.default_rng(number)), codes
        for name, (version, codes) in versions.items():
            outcome = tried(version, test, arguments)
            row = f"{folder.name}: {name}"
            unnamed += [row] * (bool(codes) and not codes & set(outcome.warnings))
            harmful += [row] * (outcome.activated and bool(outcome.worse))
            false_alarms += [row] * (not codes and bool(outcome.warnings))
            shown = ", ".join(f"`{code}`" for code in outcome.warnings) or "none"
            print(f"| {folder.name} | {name} | {shown} | {outcome.shown} |", flush=True)
    for title, rows in (
        ("not named", unnamed),
        ("harmful", harmful),
        ("warned although clean", false_alarms),
    ):
        print(f"{title}: {', '.join(rows) or 'none'}")


if __name__ == "__main__":
    main()
