"""The structure of the source: packages, floors, circles, names and lengths of files."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import defaultdict
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("app", "calibrators", "models")
FORBIDDEN = {"calibrators": {"boxcal.app", "boxcal.models"}, "models": {"boxcal.app", "boxcal.calibrators"}}
MAX_LINES = 600

FLOORS = {
    "app": (
        {"settings", "schemas"},
        {"http", "observability", "client"},
        {"registry", "access", "tables"},
        {"predict", "fitting"},
        {"monitoring"},
        {"protocols", "page"},
        {"state", "main", "server", "workers", "cli", "demo"},
    ),
    "calibrators": (
        {"errors", "operator", "scores", "class_columns"},
        {"maps", "data"},
        {"calibrator", "artifact", "method", "mlflow_model"},
        {"fitting", "evaluation", "estimator"},
        {"monitoring"},
        {"warm"},
    ),
    "models": ({"inputs", "digits_data"}, {"backends"}, {"loading"}),
}
"""A module imports from its own floor or from one below."""
ASSEMBLY = {"boxcal.app.state", "boxcal.app.main", "boxcal.app.server"}
RUNNERS = ("boxcal.app.workers.", "boxcal.app.protocols.ray.", "boxcal.app.cli.")
"""These run the whole service, and may import all of it."""


@cache
def modules() -> dict[str, Path]:
    found = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(("boxcal", *parts)).removesuffix(".__init__")] = path
    return found


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def imports(name: str) -> frozenset[str]:
    """Give the modules of the project that a module imports, inside functions and for types too."""
    found = set()
    for node in ast.walk(tree(modules()[name])):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                submodule = f"{node.module}.{alias.name}"
                found.add(submodule if submodule in modules() else node.module)
    return frozenset((found & modules().keys()) - {name})


def floor(name: str) -> int | None:
    """Give the floor of a module in its package; None if it has none."""
    _, package, *rest = name.split(".")
    if not rest:
        return None
    if name.startswith(RUNNERS):
        return len(FLOORS[package]) - 1
    return next((level for level, names in enumerate(FLOORS[package]) if rest[0] in names), None)


def circles(edges: dict[str, frozenset[str]]) -> list[set[str]]:
    """Find the strongly connected components with more than one module (Tarjan 1972)."""
    order: dict[str, int] = {}
    low: dict[str, int] = {}
    path: list[str] = []
    found = []

    def visit(name: str) -> None:
        order[name] = low[name] = len(order)
        path.append(name)
        for other in edges[name]:
            if other not in order:
                visit(other)
                low[name] = min(low[name], low[other])
            elif other in path:
                low[name] = min(low[name], order[other])
        if low[name] == order[name]:
            circle = set()
            while name not in circle:
                circle.add(path.pop())
            if len(circle) > 1:
                found.append(circle)

    for name in edges:
        if name not in order:
            visit(name)
    return found


@pytest.mark.parametrize("package", sorted(FORBIDDEN))
def test_imports_go_one_way(package: str) -> None:
    names = [name for name in modules() if name.startswith(f"boxcal.{package}.")]
    assert names
    assert not [
        f"{name} -> {other}"
        for name in names
        for other in imports(name)
        if ".".join(other.split(".")[:2]) in FORBIDDEN[package]
    ]


def test_a_module_imports_from_its_floor_or_below() -> None:
    arrows = [
        f"{name} -> {other}"
        for name in modules()
        for other in imports(name)
        if name.split(".")[1] == other.split(".")[1]
        and (above := floor(other)) is not None
        and (here := floor(name)) is not None
        and above > here
    ]
    assert not arrows


def test_only_what_assembles_the_service_imports_its_state() -> None:
    assert not [
        f"{name} -> {other}"
        for name in modules()
        for other in imports(name) & ASSEMBLY
        if name not in ASSEMBLY and not name.startswith(RUNNERS)
    ]


def test_no_modules_import_each_other_in_a_circle() -> None:
    assert not circles({name: imports(name) for name in modules()})


def test_every_folder_has_its_floor() -> None:
    inside = [name for name in modules() if name.startswith(("boxcal.app.", "boxcal.models."))]
    assert not [name for name in inside if floor(name) is None]


def test_class_names_are_unique() -> None:
    places = defaultdict(set)
    for name, path in modules().items():
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.ClassDef):
                places[node.name].add(name)
    assert not {name: sorted(found) for name, found in places.items() if len(found) > 1}


def test_files_are_short() -> None:
    lengths = {name: len(path.read_text().splitlines()) for name, path in modules().items()}
    assert not [name for name, lines in lengths.items() if lines > MAX_LINES]


def test_every_module_says_its_place() -> None:
    """Every module opens with a docstring that says what it is and where it stands on the data's way."""
    assert not [name for name, path in modules().items() if not ast.get_docstring(tree(path))]


@pytest.mark.parametrize("module", ["app.http.problems", "models.digits_data", "calibrators.errors"])
def test_the_folders_are_imported_as_parts_of_boxcal(module: str) -> None:
    """From the folder of the project, `import app` would find them too, and define every class twice."""
    done = subprocess.run(
        [sys.executable, "-c", f"import {module}"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert f"ImportError: import boxcal.{module.split('.', maxsplit=1)[0]}" in done.stderr.splitlines()[-1]


@pytest.mark.parametrize(("side", "other"), [("server", "worker"), ("worker", "server")])
def test_the_two_processes_of_fits_share_their_messages_alone(side: str, other: str) -> None:
    prefixes = f"boxcal.app.fitting.{side}", f"boxcal.app.fitting.{other}"
    sources = [name for name in modules() if name.startswith(prefixes[0])]
    assert len(sources) > 5
    assert not {name for name in sources if any(one.startswith(prefixes[1]) for one in imports(name))}


def test_the_command_line_uses_public_parts_only() -> None:
    """It reads uploads, serves, replays logs, and otherwise uses the client and the two libraries."""
    allowed = {
        f"boxcal.app.{part}"
        for part in ("cli", "client", "schemas", "server", "settings", "tables", "fitting.worker.reading")
    }
    allowed |= {"boxcal.app.fitting.worker.requirements", "boxcal.app.registry.maintenance"}
    allowed |= {"boxcal.app.workers.supervisor", "boxcal.app.fitting.server.build"}
    allowed |= {f"boxcal.app.fitting.{part}" for part in ("backbones", "resources", "sandbox")}
    allowed |= {"boxcal.app.protocols.ray.serve_config", "boxcal.app.settings.config_file"}
    allowed |= {"boxcal.app.predict.options", "boxcal.app.http.problems", "boxcal.app.http.scopes"}
    allowed |= {"boxcal.app.access", "boxcal.app.registry.audit"}
    allowed |= {f"boxcal.app.monitoring.{part}" for part in ("document", "fold", "records")}
    allowed |= {"boxcal.calibrators", "boxcal.models"}
    imported = {
        node.module
        for source in (ROOT / "app" / "cli").glob("*.py")
        for node in ast.walk(ast.parse(source.read_text()))
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("boxcal")
    }
    assert imported
    assert not {name for name in imported if not any(f"{name}.".startswith(f"{part}.") for part in allowed)}
