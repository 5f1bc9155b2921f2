"""One running service for all tests that leave it as they found it."""

from collections.abc import Iterator

import pytest

from tests.app.fitting.service import Service


@pytest.fixture(scope="session")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A service over an empty data folder, which takes uploads of at most 4 MB; its model has gradients."""
    running = Service(
        tmp_path_factory.mktemp("refit") / "data",
        prelude="from boxcal.app.settings import limits; limits.MAX_UPLOAD_BYTES = 4_000_000",
    )
    running.has_torch = True
    with running:
        yield running
