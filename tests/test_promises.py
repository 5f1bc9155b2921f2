"""Rules of the gate, the monitor, fits, admission, access and metrics, held to literal numbers."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest

from boxcal.app.access.access import Access
from boxcal.app.access.keys import KeyStore
from boxcal.app.http.admission import event_streams
from boxcal.app.http.limits import Budget, Limiter
from boxcal.app.http.problems import (
    ApiKeyExpired,
    ConcurrencyLimited,
    InsufficientScope,
    InvalidApiKey,
    QueueFull,
    Unavailable,
)
from boxcal.app.http.scopes import Scope
from boxcal.app.registry.database import Database
from boxcal.app.registry.maintenance import migrate
from boxcal.calibrators.evaluation import verdict
from boxcal.calibrators.evaluation.bootstrap import Estimate
from boxcal.calibrators.evaluation.verdict import Verdict
from boxcal.calibrators.fitting.network_validation import _is_better
from boxcal.calibrators.monitoring.calibration_test import CalibrationTest
from tests.app.access.conftest import TESTER
from tests.app.raising import raises_problem

LOWER = Estimate(-0.1, -0.2, -0.05)
OPEN = Estimate(0.0, -0.1, 0.1)


@pytest.mark.parametrize(
    ("changes", "is_better"),
    [
        ({}, True),
        ({"nll": Estimate(-0.1, -0.2, 0.0)}, False),
        ({"nll": Estimate(-0.1, -0.2, -1e-9)}, True),
        ({"nll": Estimate(-1e-5, -2e-5, -5e-6)}, False),
        ({"nll": Estimate(-1.1e-5, -2e-5, -5e-6)}, True),
        ({"brier": Estimate(0.1, 1e-9, 0.2)}, False),
        ({"brier": Estimate(0.1, 0.0, 0.2)}, True),
        ({"smooth_ece": Estimate(0.1, 1e-9, 0.2)}, False),
        ({"smooth_ece": Estimate(1e-5, 5e-6, 2e-5)}, True),
        ({"smooth_ece": Estimate(1.1e-5, 5e-6, 2e-5)}, False),
        ({"nll": OPEN, "smooth_ece": LOWER}, True),
        ({"nll": Estimate(1e-9, -0.1, 0.1), "smooth_ece": LOWER}, False),
        ({"nll": OPEN, "smooth_ece": LOWER, "brier": Estimate(1e-9, -0.1, 0.1)}, False),
        ({"nll": OPEN, "smooth_ece": Estimate(-0.1, -0.2, 0.0)}, False),
        ({"nll": OPEN, "smooth_ece": Estimate(-1e-5, -2e-5, -5e-6)}, False),
        ({"nll": Estimate(math.nan, math.nan, math.nan), "smooth_ece": LOWER}, False),
        ({"nll": OPEN, "brier": LOWER}, False),
    ],
)
def test_the_gate_compares_ends_of_intervals(changes: dict[str, Estimate], is_better: bool) -> None:
    differences = {"nll": LOWER, "brier": OPEN, "smooth_ece": OPEN} | changes
    assert Verdict("ts", differences).is_better is is_better


def test_the_four_bounds_of_the_gate_hold_together_with_95_percent() -> None:
    assert pytest.approx(verdict.LEVELS) == {"nll": 0.95, "brier": 0.98333333, "smooth_ece": 0.98333333}


def test_the_gate_says_that_calibration_is_what_is_better() -> None:
    reason = Verdict("ts", {"nll": OPEN, "brier": OPEN, "smooth_ece": LOWER}).reason
    assert reason == (
        "on unseen folds smooth ECE (-0.1, interval [-0.2, -0.05]) is significantly lower than with `ts`, "
        "and neither NLL (+0, interval [-0.1, +0.1]) nor Brier score (+0, interval [-0.1, +0.1]) is higher"
    )


def test_networks_must_be_better_than_constant_answers_by_one_standard_error() -> None:
    """Gains of 0.1, 0.3 and 0.5 have the mean 0.3 and a standard error of 0.2 / sqrt(3) = 0.1155."""
    losses = np.zeros(3)
    assert _is_better(losses, [0.1, 0.3, 0.5])
    assert not _is_better(losses, [-0.085, 0.115, 0.315])
    assert _is_better(losses, [-0.084, 0.116, 0.316])
    assert not _is_better(losses, [-0.1, 0.1, 0.3])


def test_labels_without_evidence_do_not_silence_the_test() -> None:
    """After 20,000 calibrated labels, 300 labels of overconfident answers raise the strict alarm."""
    random = np.random.default_rng(0)
    logits = 2.0 * random.normal(size=(20_300, 3))
    temperature = np.where(np.arange(20_300) < 20_000, 1.0, 3.0)[:, None]
    labels = (logits / temperature + random.gumbel(size=logits.shape)).argmax(1)
    rows = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    test = CalibrationTest(3)
    assert test.update(rows[:20_000], labels[:20_000])[:, 0].max() < math.log(100.0)
    assert test.update(rows[20_000:], labels[20_000:])[:, 0].max() > math.log(100.0)


def test_a_budget_is_used_up_to_its_limit() -> None:
    budget = Budget("bytes", 100)
    budget.add(60)
    budget.add(40)
    with raises_problem(QueueFull, match="hold 100 bytes; 1 more would exceed the limit of 100"):
        budget.add(1)
    budget.release(1)
    budget.add(1)
    assert budget.held == 100


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])

    def advance(seconds: float) -> None:
        now[0] += seconds

    return advance


def test_a_key_has_its_requests_in_progress() -> None:
    limiter = Limiter(None, 2)
    limiter.enter()
    limiter.enter()
    with raises_problem(ConcurrencyLimited, match="2 requests in progress; the limit is 2"):
        limiter.enter()
    limiter.leave()
    limiter.enter()


def test_event_streams_use_a_quarter_of_the_descriptors_and_a_client_a_quarter_of_those() -> None:
    streams = event_streams(64)
    with ExitStack() as opened:
        for client in "abcd":
            for _ in range(4):
                opened.enter_context(streams.holding(client))
            with raises_problem(ConcurrencyLimited, match="has 4 event streams open; the limit is 4"):
                opened.enter_context(streams.holding(client))
        with raises_problem(Unavailable, match="All 16 event streams") as caught:
            opened.enter_context(streams.holding("e"))
        assert caught.value.headers["Retry-After"] == "10"
    with streams.holding("e"):
        pass


def test_a_key_must_be_valid_have_the_scope_and_not_be_expired(
    tmp_path: Path, clock: Callable[[float], None]
) -> None:
    url = f"sqlite:///{tmp_path}/registry.db"
    migrate(url)
    store = KeyStore(Database(url))
    _, key = store.create("one", {Scope.PREDICT}, TESTER, valid_for=timedelta(hours=1))
    access = Access(store, None, is_open_to_others=True)
    access.load()
    headers = [(b"x-api-key", key.encode())]
    access.admit(headers, Scope.PREDICT)
    with raises_problem(InsufficientScope):
        access.admit(headers, Scope.FIT)
    with raises_problem(InvalidApiKey):
        access.admit([(b"x-api-key", key[:-8].encode() + b"aaaaaaaa")], Scope.PREDICT)
    clock(3590.0)
    access.admit(headers, Scope.PREDICT)
    clock(20.0)
    with raises_problem(ApiKeyExpired):
        access.admit(headers, Scope.PREDICT)
