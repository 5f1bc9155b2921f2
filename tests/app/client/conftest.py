"""A service for the client alone: its tests fit and activate, and put back what was in force."""

from collections.abc import Iterator

import pytest

from tests.app.client.both import Ask, ask_async, ask_blocking
from tests.app.running import running


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with running(tmp_path_factory.mktemp("client")) as service:
        yield service.url


@pytest.fixture(params=[ask_blocking, ask_async], ids=["blocking", "async"])
def ask(request: pytest.FixtureRequest) -> Ask:
    chosen: Ask = request.param
    return chosen
