"""Each rule of the gate, the monitor, fits, admission and access is changed, and a test must then fail."""

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
STREAMS = "app/access/event_streams.py"
ACCESS = "app/access/access.py"

MUTATIONS = [
    # The gate.
    Mutation(VERDICT, "TOLERANCE = 1e-5", "TOLERANCE = 1e-3"),
    Mutation(VERDICT, "TOLERANCE = 1e-5", "TOLERANCE = 0.0"),
    Mutation(VERDICT, "(nll.high < 0 and", "(nll.low < 0 and"),
    Mutation(VERDICT, "nll.value < -TOLERANCE", "nll.value < 0"),
    Mutation(VERDICT, "self.differences[name].low > 0 and", "self.differences[name].high > 0 and"),
    Mutation(VERDICT, "self._is_lower and not self._higher", "self._is_lower"),
    Mutation(VERDICT, '"brier": 1 - (1 - LEVEL) / 2', '"brier": LEVEL'),
    Mutation(VERDICT, '"smooth_ece": 1 - (1 - LEVEL) / 2', '"smooth_ece": LEVEL'),
    Mutation(RUNNER, "    if active_version != compared_with:", "    if False:", GATE),
    Mutation(RUNNER, "    if serious:", "    if False:", GATE),
    Mutation(RUNNER, "return Decision(is_better, f", "return Decision(True, f", GATE),
    Mutation(RUNNER, 'if warning["severity"] == "serious"', 'if warning["severity"]', GATE),
    # Fits.
    Mutation(NETWORKS, "gains.std(ddof=1) / math.sqrt(len(gains))", "0.0"),
    Mutation(NETWORKS, "gains.std(ddof=1) / math.sqrt(len(gains))", "gains.std(ddof=1)"),
    # The monitor.
    Mutation(BETTORS, "CAP = 10.0", "CAP = 1e9"),
    Mutation(BETTORS, "SHARE = 1e-3", "SHARE = 0.0"),
    Mutation(LOOP, "ROLLBACK_ALPHA = 0.01", "ROLLBACK_ALPHA = 0.2"),
    # Admission.
    Mutation("app/http/memory_quota.py", "self.held + amount > self.limit", "self.held > self.limit"),
    Mutation(
        "app/http/memory_quota.py", "self.held + amount > self.limit", "self.held + amount >= self.limit"
    ),
    Mutation("app/http/memory_quota.py", "self.held -= amount", "pass"),
    # Access.
    Mutation(LIMITS, "WINDOW_SECONDS = 60", "WINDOW_SECONDS = 30"),
    Mutation(LIMITS, "self._in_progress >= self._concurrency", "self._in_progress > self._concurrency"),
    Mutation(LIMITS, "if self._left < 1.0:", "if self._left < 0.0:"),
    Mutation(
        LIMITS,
        "self._left = min(float(self._quota), ",
        "self._left = max(0.0, ",
        "tests/app/access/test_limits.py",
    ),
    Mutation(STREAMS, "self._open[client] >= self._per_client", "self._open[client] > self._per_client"),
    Mutation(STREAMS, "self._open.total() >= self._in_all", "False"),
    Mutation(STREAMS, "descriptor_limit()) // 4", "descriptor_limit()) // 2"),
    Mutation(ACCESS, "key.deadline is not None and time.monotonic() >= key.deadline", "False"),
    Mutation(ACCESS, "requirement not in key.permits", "False"),
    Mutation(ACCESS, "not matches(salt, digest, secret) or key is None", "key is None"),
    # Metrics of several processes.
    Mutation(
        "app/workers/metrics.py",
        'frozenset({"boxcal_registry_last_contact_seconds", "boxcal_calibrator_info"})',
        "frozenset[str]()",
    ),
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
    """Run tests in a copy of the tree; give the exit status of pytest."""
    environment = {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", tests]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, check=False).returncode


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
        assert original.count(one.before) == 1, f"{one.before!r} is not once in {one.file}"
        file.write_text(original.replace(one.before, one.after))
        status = outcome(folder, one.tests)
        file.write_text(original)
        assert status in {SURVIVES, KILLED}, f"{one} ends pytest with {status}"
        if status == SURVIVES:
            survivors.append(f"{one.file}: {one.before} -> {one.after}")
    assert not survivors
