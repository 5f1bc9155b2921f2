"""Private names of other packages that are used here: all are listed, exist, and have a version bound."""

from __future__ import annotations

import ast
import importlib.metadata
import inspect
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
SOURCES = [path for folder in ("app", "models", "calibrators") for path in (ROOT / folder).rglob("*.py")]
SOURCES = [path for path in SOURCES if not path.stem.endswith("_pb2")]  # generated

USED = {
    "numba": {"_cache", "_cache_file", "_source_stamp"},
    "onnxruntime-gpu": {"_model_bytes"},
    "torch": {
        "_C",
        "_are_functorch_transforms_active",
        "_len_torch_dispatch_stack",
        "_current_level",
        "_pytree",
    },
    "uvicorn": {"HttpToolsProtocol"},
}
DOCUMENTED = {"_asdict", "_current_frames", "_exit", "_mapping", "_replace"}
"""Of os, sys, SQLAlchemy and named tuples: public in spite of the underscore."""


def own_names(trees: list[ast.AST]) -> set[str]:
    """Collect what the sources define or assign themselves."""
    names: set[str] = set()
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            names |= {node.attr} if isinstance(node.value, ast.Name) and node.value.id == "self" else set()
    return names


def private_names() -> set[str]:
    """Collect the private attributes and modules of others that the sources read."""
    trees: list[ast.AST] = [ast.parse(path.read_text()) for path in SOURCES]
    own = own_names(trees)
    found: set[str] = set()
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, ast.Attribute) and node.attr not in own:
            found.add(node.attr)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.module.startswith("boxcal"):
            found |= {*node.module.split("."), *(alias.name for alias in node.names)}
    return {name for name in found if name.startswith("_") and not name.endswith("__")}


def test_every_private_name_in_use_is_listed() -> None:
    listed = set().union(*USED.values()) - {"HttpToolsProtocol"}
    assert private_names() == listed | (DOCUMENTED & private_names())


@pytest.mark.parametrize("name", USED)
def test_the_next_minor_version_is_not_installed_untested(name: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [line for extra in project["optional-dependencies"].values() for line in extra]
    (requirement,) = [r for r in map(Requirement, lines) if r.name == name]
    version = importlib.metadata.version(name)
    major, minor = map(int, version.split(".")[:2])
    assert requirement.specifier.contains(version)
    assert not requirement.specifier.contains(f"{major}.{minor + 1}.0")


def test_torch_has_them() -> None:
    import torch
    from torch.autograd import forward_ad

    assert torch._C._are_functorch_transforms_active() is False
    assert torch._C._len_torch_dispatch_stack() == 0
    assert forward_ad._current_level < 0
    assert isinstance(torch.utils._pytree.SERIALIZED_TYPE_TO_PYTHON_TYPE, dict)


def test_numba_has_them() -> None:
    from boxcal.calibrators.operator.cpu_loops import most_probable

    kept = most_probable._cache._cache_file  # type: ignore[attr-defined]
    assert isinstance(kept._source_stamp, tuple)


def test_onnxruntime_has_them() -> None:
    import onnxruntime

    source = inspect.getsource(onnxruntime.InferenceSession.__init__)
    assert "self._model_bytes = " in source


def test_uvicorn_has_them() -> None:
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

    source = inspect.getsource(HttpToolsProtocol.on_headers_complete)
    assert "self.cycle = RequestResponseCycle(" in source
    assert "scope=self.scope" in source
    assert "transport=self.transport" in source
