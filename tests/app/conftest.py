"""What tests of the service share: a running one, a client of it, and real digits."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from boxcal.models.digits_data import Digits, load_digits_split
from tests.app.running import Service, running


@pytest.fixture(scope="session")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """Run one service for all tests that leave its calibrators alone."""
    with running(tmp_path_factory.mktemp("service")) as service:
        yield service


@pytest.fixture(scope="session")
def busy_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Run one service for all tests that fit and activate, and put back what was active."""
    with running(tmp_path_factory.mktemp("busy")) as service:
        yield service.url


@pytest.fixture
def http(service: Service) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=service.url, timeout=30) as client:
        yield client


@pytest.fixture(scope="session")
def digits() -> Digits:
    return load_digits_split().test


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """Run coroutine tests under asyncio, as the service runs."""
    return "asyncio"
