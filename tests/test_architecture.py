"""The one import direction: `app` uses `models` and `calibrators`; those know neither it nor each other."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FORBIDDEN = {"calibrators": {"boxcal.app", "boxcal.models"}, "models": {"boxcal.app", "boxcal.calibrators"}}


def imported_packages(source: Path) -> set[str]:
    """The packages that a file imports, two names deep."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source.read_text())):
        if isinstance(node, ast.Import):
            names |= {".".join(alias.name.split(".")[:2]) for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(".".join(node.module.split(".")[:2]))
    return names


@pytest.mark.parametrize("package", sorted(FORBIDDEN))
def test_imports_go_one_way(package: str) -> None:
    sources = sorted((ROOT / package).rglob("*.py"))
    assert sources
    offenders = {
        str(s.relative_to(ROOT)): found
        for s in sources
        if (found := imported_packages(s) & FORBIDDEN[package])
    }
    assert not offenders


@pytest.mark.parametrize("package", ["fitting", "predict", "registry"])
def test_the_monitor_is_built_on_other_packages_and_not_they_on_it(package: str) -> None:
    offenders = [
        str(source)
        for source in sorted((ROOT / "app" / package).rglob("*.py"))
        if "boxcal.app.monitoring" in source.read_text()
    ]
    assert not offenders


@pytest.mark.parametrize("package", ["app", "models", "calibrators"])
def test_every_module_says_its_place(package: str) -> None:
    """Every module opens with a docstring that says what it is and where it stands on the data's way."""
    silent = [
        str(source.relative_to(ROOT))
        for source in sorted((ROOT / package).rglob("*.py"))
        if not ast.get_docstring(ast.parse(source.read_text()))
    ]
    assert not silent


def test_the_command_line_uses_public_parts_only() -> None:
    """It reads uploads, serves, replays logs, and otherwise uses the client and the two libraries."""
    allowed = {
        f"boxcal.app.{part}" for part in ("cli", "client", "server", "settings", "fitting.worker.reading")
    }
    allowed |= {"boxcal.app.fitting.worker.requirements", "boxcal.app.registry.maintenance"}
    allowed |= {"boxcal.app.workers.supervisor", "boxcal.app.fitting.server.queue_worker"}
    allowed |= {"boxcal.app.protocols.ray.serve_config", "boxcal.app.settings.config_file"}
    allowed |= {"boxcal.app.predict.options", "boxcal.app.http.problems"}
    allowed |= {"boxcal.app.access", "boxcal.app.registry.audit"}
    allowed |= {"boxcal.app.monitoring.fold", "boxcal.app.monitoring.records"}
    allowed |= {"boxcal.calibrators", "boxcal.models"}
    imported = {
        node.module
        for source in (ROOT / "app" / "cli").glob("*.py")
        for node in ast.walk(ast.parse(source.read_text()))
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("boxcal")
    }
    assert imported
    assert not {name for name in imported if not any(f"{name}.".startswith(f"{part}.") for part in allowed)}
