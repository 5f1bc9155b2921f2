"""Each rule of the gate, the monitor, fits, the operator, the queue, the registry and access is changed.

A test must then fail.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
PROMISES = "tests/test_promises.py"
GATE = "tests/app/fitting/test_gate.py"
QUOTA = "tests/app/access/test_limits.py"
MIX = "tests/calibrators/test_class_mix.py"
SURVIVES, KILLED = 0, 1
"""Exit statuses of pytest: every test passed, and a test failed."""


class Mutation(NamedTuple):
    """A line of a file, what replaces it, and the tests that must notice."""

    file: str
    before: str
    after: str
    tests: str = PROMISES


VERDICT = "calibrators/evaluation/verdict.py"
RUNNER = "app/fitting/server/runner.py"
NETWORKS = "calibrators/fitting/network_validation.py"
BETTORS = "calibrators/monitoring/bettors.py"
LOOP = "calibrators/monitoring/refit_loop.py"
LIMITS = "app/http/limits.py"
STREAMS = "app/http/admission.py"
ACCESS = "app/access/access.py"
LOOPS = "calibrators/operator/cpu_loops.py"
SHARED = "calibrators/operator/constants.py"
BOUNDS = "calibrators/operator/bounds.py"
BATCHER = "app/predict/batcher.py"
SIZER = "app/predict/lanes.py"
OPTIONS = "app/predict/options.py"
CALIBRATION = "app/predict/answers.py"
SELECTION = "calibrators/fitting/selection.py"
PENALTIES = "calibrators/fitting/penalty_search.py"
LINEAR = "calibrators/maps/linear.py"
TEMPERED = "calibrators/maps/temperature.py"
STACK = "calibrators/maps/stack.py"
MIXTURE = "calibrators/maps/mixture.py"
BETA = "calibrators/maps/beta.py"
INTERVALS = "calibrators/evaluation/bootstrap.py"
REPORT = "calibrators/evaluation/report.py"
FITS = "app/registry/fits.py"
ACTIVATIONS = "app/registry/activations.py"

DEFECTS = "tests/calibrators/operator/test_defects.py"
ADVERSITY = "tests/calibrators/operator/test_adversity.py"
EXACTNESS = "tests/calibrators/operator/test_exactness.py"
MEETING = "tests/calibrators/operator/test_bounds.py"
QUEUE = "tests/app/predict/test_batcher.py"
SIZES = "tests/app/predict/test_batch_sizer.py"
HELD = "tests/app/predict/test_bounds_hold.py::test_bounds_"
BATCH = "tests/app/predict/test_bounds_hold.py::test_requests_of_one_batch_keep_their_calibrators_and_bounds"
STORE = "tests/app/registry/test_store.py"
STACKS = "tests/calibrators/test_stack.py"
SCORES = "tests/calibrators/test_scores.py"
HONEST = "tests/calibrators/test_honest_fits.py"
ONE_CLASS = "tests/calibrators/test_one_against_rest.py"
WRONG_LABELS = "tests/calibrators/evaluation/test_report.py::test_unrelated_labels_that_decide_are_serious"
FEW_DIFFER = "tests/calibrators/evaluation/test_intervals.py::test_one_group_that_differs_is_bounded"
PRODUCTS = "tests/calibrators/test_polynomial.py"
MONITORING = "tests/calibrators/monitoring"
EVIDENCE = f"{MONITORING}/test_calibration_test.py::test_no_single_label_raises_an_alarm"
RETURNED = f"{MONITORING}/test_refit_loop.py::test_an_earlier_version_is_returned_to_at_evidence_of_200"

MUTATIONS = [
    # The gate.
    Mutation(VERDICT, "TOLERANCE = 1e-5", "TOLERANCE = 1e-3"),
    Mutation(VERDICT, "TOLERANCE = 1e-5", "TOLERANCE = 0.0"),
    Mutation(VERDICT, "(nll.high < 0 and", "(nll.low < 0 and"),
    Mutation(VERDICT, "nll.value < -TOLERANCE", "nll.value < 0"),
    Mutation(VERDICT, "self.differences[name].low > 0 and", "self.differences[name].high > 0 and"),
    Mutation(VERDICT, "self._is_calibrated) and not self._higher", "self._is_calibrated)"),
    Mutation(VERDICT, 'int(change["high"] < 0)', 'int(change["low"] < 0)'),
    Mutation(VERDICT, "all(value is not None and", "any(value is not None and"),
    Mutation(VERDICT, '"brier": 1 - (1 - LEVEL) / 3', '"brier": LEVEL'),
    Mutation(VERDICT, '"smooth_ece": 1 - (1 - LEVEL) / 3', '"smooth_ece": LEVEL'),
    Mutation(RUNNER, "    if active_version != compared_with:", "    if False:", GATE),
    Mutation(RUNNER, "    if serious:", "    if False:", GATE),
    Mutation(RUNNER, "return Decision(is_better, f", "return Decision(True, f", GATE),
    Mutation(RUNNER, 'if warning["severity"] == "serious"', 'if warning["severity"]', GATE),
    # Fits.
    Mutation(NETWORKS, "gains.std(ddof=1) / math.sqrt(len(gains))", "0.0"),
    Mutation(NETWORKS, "gains.std(ddof=1) / math.sqrt(len(gains))", "gains.std(ddof=1)"),
    # The monitor.
    Mutation(BETTORS, "CAP = 10.0", "CAP = 1e9", EVIDENCE),
    Mutation(BETTORS, "SHARE = 1e-3", "SHARE = 0.0"),
    Mutation(LOOP, "ROLLBACK_ALPHA = 0.01", "ROLLBACK_ALPHA = 0.2", RETURNED),
    # Admission.
    Mutation("app/http/limits.py", "self.held + amount > self.limit", "self.held > self.limit"),
    Mutation("app/http/limits.py", "self.held + amount > self.limit", "self.held + amount >= self.limit"),
    Mutation("app/http/limits.py", "self.held -= amount", "pass"),
    # Access.
    Mutation(LIMITS, "WINDOW_SECONDS = 60", "WINDOW_SECONDS = 30", QUOTA),
    Mutation(LIMITS, "self._in_progress >= self._concurrency", "self._in_progress > self._concurrency"),
    Mutation(LIMITS, "if self._left < 1.0:", "if self._left < 0.0:", QUOTA),
    Mutation(
        LIMITS,
        "self._left = min(float(self._quota), ",
        "self._left = max(0.0, ",
        "tests/app/access/test_limits.py",
    ),
    Mutation(LIMITS, "self._open[client] >= self._per_client", "self._open[client] > self._per_client"),
    Mutation(LIMITS, "self._open.total() >= self._in_all", "False"),
    Mutation(STREAMS, "descriptor_limit()) // 4", "descriptor_limit()) // 2"),
    Mutation(ACCESS, "self.deadline is not None and time.monotonic() >= self.deadline", "False"),
    Mutation(ACCESS, "requirement not in key.permits", "False"),
    Mutation(ACCESS, "not matches(salt, digest, secret) or key is None", "key is None"),
    # Metrics of several processes.
    Mutation(
        "app/workers/metrics.py",
        'frozenset({"boxcal_registry_last_contact_seconds", "boxcal_calibrator_info"})',
        "frozenset[str]()",
        "tests/app/workers/test_supervisor.py::test_counters_of_dead_processes_stay_and_their_gauges_go",
    ),
    # The operator on the CPU.
    Mutation(LOOPS, "select(is_free, zero, clipped)", "zero", DEFECTS),
    Mutation(
        LOOPS,
        "total += sums.dtype.type(clipped)",
        "pass",
        f"{EXACTNESS}::test_passes_over_rows_of_a_thousand_classes",  # exact_row would solve them
    ),
    Mutation(LOOPS, "select(is_free, weight, zero)", "weight", DEFECTS),
    Mutation(
        "calibrators/operator/exact_row.py",
        "range(keys.shape[0])",
        "range(1)",
        "tests/calibrators/operator/test_adversity.py",
    ),
    Mutation(LOOPS, "is_free = clipped == value", "is_free = value <= high", DEFECTS),
    Mutation(
        LOOPS,
        "within - inside > CLOSE_CALL * inside",
        "within - inside > np.inf",
        f"{ADVERSITY}::test_a_class_within_an_ulp_of_its_bound_that_outweighs_the_free_one",
    ),
    Mutation(
        LOOPS,
        "largest = 1.0 if _is_single(row) else 1e100",
        "largest = 1e300",
        f"{ADVERSITY}::test_free_classes_whose_weights_have_lost_their_digits",
    ),
    Mutation(LOOPS, "if settled or abs(1.0 - total) <= 0.5 * unit * mass:", "if True:", EXACTNESS),
    Mutation(
        LOOPS,
        "weights[i] = clipped",
        "weights[i] = value",
        f"{DEFECTS}::test_both_bounds_bind",
    ),
    Mutation(
        LOOPS,
        "lower <= smallest and largest <= upper",
        "lower <= smallest",
        f"{EXACTNESS}::test_a_long_row_of_two_logits",
    ),
    Mutation(
        LOOPS, "held[n] = outcome != PLAIN", "held[n] = False", "tests/calibrators/operator/test_gradients.py"
    ),
    Mutation(
        "calibrators/fitting/loops.py",
        "p[y] -= 1.0",
        "pass",
        "tests/calibrators/test_kernels.py::test_loss_in_a_box_and_its_derivatives",
    ),
    # Bounds that meet.
    Mutation(SHARED, "return eps * (8.0 + math.sqrt(num_classes))", "return 0.0", MEETING),
    Mutation(SHARED, "relaxed = over | under", "relaxed = over", MEETING),
    Mutation(SHARED, "ops.where(given < kept, ", "ops.where(given > kept, ", MEETING),
    Mutation(BOUNDS, "if self.num_classes not in (None, num_classes):", "if False:", MEETING),
    Mutation(BOUNDS, "if self.num_classes is None:", "if False:", MEETING),
    # The queue of the backbone.
    Mutation(BATCHER, "self._held + samples > limit", "self._held + samples >= limit", QUEUE),
    Mutation(BATCHER, "self._held -= samples", "pass", QUEUE),
    Mutation(BATCHER, "ADMISSION_SAFETY_FACTOR = 1.4", "ADMISSION_SAFETY_FACTOR = 0.1", QUEUE),
    Mutation(BATCHER, "if left <= self.batch_sizer.wait_for(samples):", "if False:", QUEUE),
    Mutation(BATCHER, "== len(entry.samples):", "> 0:", QUEUE),
    Mutation(BATCHER, "entry.parts.sort(key=lambda p: p[0])", "pass", QUEUE),
    Mutation(SIZER, "min(self._limit, samples // 2)", "samples", SIZES),
    Mutation(SIZER, "seconds = min(seconds, LARGEST_STEP * cost)", "pass", SIZES),
    Mutation(SIZER, "queued >= min(last, self.batch_size) or idle > self.fixed", "False", SIZES),
    Mutation(SIZER, "WORTHWHILE = 0.97", "WORTHWHILE = 2.0", SIZES),
    # The bounds of a request.
    Mutation(
        OPTIONS,
        "crossed = lower > upper",
        "crossed = lower > upper + 1.0",
        f"{HELD}that_cannot_be_met_are_refused_by_name",
    ),
    Mutation(
        OPTIONS,
        "math.fsum(lower)) > 1.0 + tolerance",
        "math.fsum(lower)) > 1.0",
        f"{HELD}whose_sum_misses_1_by_an_ulp_are_taken",
    ),
    Mutation(
        OPTIONS,
        "math.fsum(upper)) < 1.0 - tolerance",
        "math.fsum(upper)) < 0.0",
        f"{HELD}that_cannot_be_met_are_refused_by_name",
    ),
    Mutation(
        OPTIONS,
        "isinstance(value, bool) or not isinstance(value, int | float)",
        "not isinstance(value, int | float)",
        f"{HELD}that_cannot_be_met_are_refused_by_name",
    ),
    Mutation(CALIBRATION, "lower[start:stop], upper[start:stop] = pair.lower, pair.upper", "pass", BATCH),
    Mutation(
        CALIBRATION, "groups.setdefault(id(part.context.served), [])", "groups.setdefault(0, [])", BATCH
    ),
    # Who owns a fit, and what is active.
    Mutation(FITS, "& (fits.c.owner == self.owner) & (fits.c.attempt", "& (fits.c.attempt", STORE),
    Mutation(FITS, " & (fits.c.attempt == fit.attempt)", "", STORE),
    Mutation(FITS, "update(fits).where(own, _unfinished)", "update(fits).where(own)", STORE),
    Mutation(FITS, "not_in({*living, self.owner})", "not_in({self.owner})", STORE),
    Mutation(FITS, "is_left = ~_adoptable | (fits.c.seen_at < given_up)", "is_left = ~_adoptable", STORE),
    Mutation(ACTIVATIONS, "if current.version == version:", "if False:", STORE),
    Mutation(ACTIVATIONS, "_refuse_unexpected(current.version, expected)", "pass", STORE),
    Mutation(ACTIVATIONS, "previous=previous or None", "previous=None", STORE),
    Mutation(
        SELECTION, "np.where(fold_of == fold, 0.0, counts)", "np.where(fold_of < -fold, 0.0, counts)", STACKS
    ),
    Mutation(
        SELECTION, "unseen.append((inside, _followed(one, own)))", "unseen.append((inside, one))", STACKS
    ),
    Mutation(
        SELECTION, "zip(decision.unseen, found.folds,", "zip(decision.unseen, found.folds[::-1],", STACKS
    ),
    Mutation(SELECTION, "len(kept) <= most and", "len(kept) <= 8 and", STACKS),
    Mutation(SELECTION, "found[least] >= LEAST_SHARE", "found[least] >= 0.0", STACKS),
    Mutation(SELECTION, "+ prior / w - total", "- total", STACKS),
    Mutation(
        SELECTION, "likelihoods[counts > 0.0], counts[", "likelihoods[counts > 0.0], (counts > 0.0)[", STACKS
    ),
    Mutation(SELECTION, "return excess <= error", "return True", PRODUCTS),
    Mutation(SELECTION, "if INSTEAD.get(name) not in listed", "", PRODUCTS),
    Mutation(LINEAR, "strength / samples, K / samples)", "strength, K / samples)", PRODUCTS),
    Mutation(LINEAR, 'p["spread"], -FARTHEST, FARTHEST', 'p["spread"], -1e9, 1e9', PRODUCTS),
    Mutation(PENALTIES, "np.where(inside, 0.0, weights)", "weights", STACKS),
    Mutation(PENALTIES, "means <= errors", "means <= 0.0", STACKS),
    Mutation(TEMPERED, "if data.shows_errors:", "if True:", HONEST),
    Mutation(STACK, "+ p[FLOOR] / self.num_classes", "+ 0.0", STACKS),
    Mutation(MIXTURE, "with_uniform(scores / p[TEMPERATURE]", "with_uniform(scores", SCORES),
    Mutation(BETA, "tried[:2] = np.maximum(tried[:2], 0.0)", "pass", ONE_CLASS),
    Mutation(INTERVALS, "LEAST_SPREAD = 0.1", "LEAST_SPREAD = 1e-12", FEW_DIFFER),
    Mutation(
        REPORT,
        "if not verdict(after, against.judgement, active, unrelated=most).is_better:",
        "if False:",
        WRONG_LABELS,
    ),
    Mutation(SELECTION, "[rare] < SAMPLES_PER_CLASS", "[rare] < 30", HONEST),
    Mutation(SELECTION, 'data.class_mix != "as_traffic" and (np', "(np", MIX),
    Mutation(
        "calibrators/data.py", "np.exp(offsets.min() - offsets)", "np.exp(offsets - offsets.max())", MIX
    ),
    Mutation("calibrators/label_checks.py", "- drawn + prior", "- drawn", MIX),
    Mutation(SELECTION, "complete and count >= SAMPLES_PER_PARAMETER", "not len(rare) and complete", HONEST),
    Mutation(ACTIVATIONS, "if record.backbone not in (None, self._backbone):", "if False:", STORE),
    Mutation(
        ACTIVATIONS,
        "own.where(activations.c.backbone_id == self._backbone_id)",
        "own",
        STORE,
    ),
    Mutation(ACTIVATIONS, "refuse_pruned(record)", "pass", STORE),
    # What a key may send.
    Mutation(LIMITS, "self._left -= 1.0", "pass", QUOTA),
    Mutation(LIMITS, "self._in_progress -= 1", "pass", QUOTA),
    Mutation(LIMITS, "math.ceil((self._quota - self._left)", "math.ceil(self._quota", QUOTA),
]


def copied(folder: Path) -> Path:
    """Copy every tracked file, and the links of `boxcal`."""
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    for name in tracked.stdout.split("\0"):
        if name and ((ROOT / name).exists() or (ROOT / name).is_symlink()):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name, follow_symlinks=False)
    return folder


def outcome(folder: Path, tests: str) -> int:
    environment = {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", tests]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, check=False).returncode


def test_each_mutation_names_one_line_and_a_test() -> None:
    for one in MUTATIONS:
        assert (ROOT / one.file).read_text().count(one.before) == 1, f"{one.before!r} in {one.file}"
        assert (ROOT / one.tests.split("::")[0]).exists(), one.tests


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_no_mutation_of_a_promise_survives(tmp_path: Path) -> None:
    folder = copied(tmp_path)
    for tests in {one.tests for one in MUTATIONS}:
        assert outcome(folder, tests) == SURVIVES, f"{tests} fails without a mutation"
    survivors = []
    for one in MUTATIONS:
        file = folder / one.file
        original = file.read_text()
        file.write_text(original.replace(one.before, one.after))
        status = outcome(folder, one.tests)
        file.write_text(original)
        assert status in {SURVIVES, KILLED}, f"{one} ends pytest with {status}"
        if status == SURVIVES:
            survivors.append(f"{one.file}: {one.before} -> {one.after}")
    assert not survivors
