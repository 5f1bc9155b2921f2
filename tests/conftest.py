"""What holds for every test."""

from __future__ import annotations

import gc
import logging
import random
import sys
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import HealthCheck, settings

from tests.pauses import PAUSES

# How long an example takes to be made or tested says how busy the machine is.
settings.register_profile("boxcal", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("boxcal")


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """Name bytes by their argument: a gzip stream holds the time, and workers must agree on names."""
    return argname if isinstance(val, bytes) else None


def pytest_collection() -> None:
    """Stop garbage collection until everything is imported: imports leave no garbage."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Exclude modules and tests from garbage collection: it would walk over a million objects each time."""
    gc.freeze()
    gc.enable()


def pytest_unconfigure() -> None:
    """Let the interpreter free at its end what libraries would report as a leak."""
    gc.unfreeze()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Forget the pauses of event loops; what draws numbers without a seed draws the same in every run."""
    PAUSES.clear()
    random.seed(0)
    np.random.seed(0)
    if torch := sys.modules.get("torch"):
        torch.manual_seed(0)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Fail a test that pauses the event loop of a service for more than 100 ms of processor time.

    A busy machine pauses those of services that run beside a test, too: its log does not show that.
    """
    logger = logging.getLogger("boxcal")
    if not item.nodeid.startswith("tests/app/test_event_loop.py"):
        logger.addFilter(is_of_a_test)
    try:
        yield
    finally:
        logger.removeFilter(is_of_a_test)
    PAUSES.check()


def is_of_a_test(record: logging.LogRecord) -> bool:
    return record.module != "event_loop"
