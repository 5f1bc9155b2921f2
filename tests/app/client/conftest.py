"""Both clients, one after the other, for every test of one."""

import pytest

from tests.app.client.both import Ask, ask_async, ask_blocking


@pytest.fixture
def url(busy_url: str) -> str:
    return busy_url


@pytest.fixture(params=[ask_blocking, ask_async], ids=["blocking", "async"])
def ask(request: pytest.FixtureRequest) -> Ask:
    chosen: Ask = request.param
    return chosen
