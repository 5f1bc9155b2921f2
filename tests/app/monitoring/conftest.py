"""A service for the tests of feedback and monitoring, and the PostgreSQL server of the registry's tests."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.app.registry.conftest import postgresql, url
from tests.app.running import Service, running

__all__ = ["postgresql", "url"]


@pytest.fixture(scope="module")
def monitored(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with running(tmp_path_factory.mktemp("monitored")) as service:
        yield service


@pytest.fixture
def client(monitored: Service) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=monitored.url, timeout=30) as client:
        yield client


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    return tmp_path
