import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.deploy import processes


@pytest.fixture(scope="session")
def prometheus_tools() -> None:
    """Debian's `prometheus` and `promtool`: never silently left out where everything must run."""
    missing = [name for name in ("prometheus", "promtool") if shutil.which(name) is None]
    if not missing:
        return
    reason = f"{' and '.join(missing)} not found: apt-get install prometheus"
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)


@pytest.fixture(scope="session")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with processes.service(tmp_path_factory.mktemp("service")) as url:
        yield url


@pytest.fixture(scope="module")  # it uses a quarter of a core as long as it runs
def prometheus(
    prometheus_tools: None, service: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    folder: Path = tmp_path_factory.mktemp("prometheus")
    with processes.prometheus(service, folder) as url:
        yield url
