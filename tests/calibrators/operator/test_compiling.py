"""Compiled loops are kept on disk, and not used any more once a function that they call has changed."""

import os
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from boxcal.calibrators.operator.cpu_loops import forward_rows
from boxcal.calibrators.temperature_fast_path import solve_rows, warm_arrays

HELPER = "from numba import njit\n\n@njit\ndef helper(x):\n    return x + {}\n"
ENTRY = """
from boxcal.calibrators.operator.compiling import compiled
from helper import helper

@compiled
def entry(x):
    return helper(x)

print(entry(1), sum(entry.stats.cache_hits.values()))
"""


def run(*script: str, **environment: str | Path) -> str:
    variables = {name: str(value) for name, value in environment.items()}
    variables = os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])} | variables
    command = [sys.executable, *script]
    return subprocess.run(command, env=variables, check=True, capture_output=True, text=True).stdout


def test_loops_are_compiled_anew_when_what_they_call_has_changed(tmp_path: Path) -> None:
    (tmp_path / "entry.py").write_text(ENTRY)
    said = []
    for added in (10, 10, 20):
        (tmp_path / "helper.py").write_text(HELPER.format(added))
        kept = tmp_path / "kept"
        said.append(run(str(tmp_path / "entry.py"), NUMBA_CACHE_DIR=kept, PYTHONDONTWRITEBYTECODE="1"))
    assert said == ["11 0\n", "11 1\n", "21 0\n"]


def test_a_volume_without_loops_gets_those_of_the_image_and_any_other_keeps_its_own(tmp_path: Path) -> None:
    (tmp_path / "entry.py").write_text(ENTRY)
    (tmp_path / "helper.py").write_text(HELPER.format(10))
    image, volume, used = tmp_path / "image", tmp_path / "volume/.cache/numba", tmp_path / "used"
    used.mkdir()

    def hits(**folders: Path) -> str:
        return run(str(tmp_path / "entry.py"), **folders).split()[1]

    assert hits(NUMBA_CACHE_DIR=image) == "0"
    assert hits(NUMBA_CACHE_DIR=volume, COMPILED_LOOPS_DIR=image) == "1"
    assert [path.name for path in volume.parent.iterdir()] == ["numba"]
    assert hits(NUMBA_CACHE_DIR=used, COMPILED_LOOPS_DIR=image) == "0"
    assert hits(NUMBA_CACHE_DIR=tmp_path / "other", COMPILED_LOOPS_DIR=tmp_path / "absent") == "0"


WAITS = """
import sys
import numpy as np
from boxcal.calibrators.maps.isotonic_loop import isotonic_with_one_more

sys.stderr = sys.stdout
for label in (1.0, 1):
    isotonic_with_one_more(np.ones(2), np.ones(2), label)
"""
NOWHERE = """
import importlib, pkgutil
import numba.core.caching
numba.core.caching.CacheImpl._locator_classes = []  # no folder can be written
import boxcal.calibrators as package
for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
    importlib.import_module(module.name)
"""
WARM = """
import os, sys
from pathlib import Path
import numpy as np
from boxcal.calibrators import fit, methods, warm
from boxcal.calibrators.evaluation.report import cross_fitted_report

def kept():
    return {path.name for path in Path(os.environ["NUMBA_CACHE_DIR"]).rglob("*.nbc")}

warm.warm()
before = kept()
random = np.random.default_rng(1)
rows, labels = random.normal(size=(200, 4)), random.integers(0, 4, 200)
for method in methods():
    if method.partition("+")[0] not in {"fc", "ta", "nc"}:
        fit(method, rows.astype(np.float32), labels)
cross_fitted_report("auto", rows, labels)
print(len(before), sorted(kept() - before))
"""
FOLDS = """
import sys
from numba.core.dispatcher import Dispatcher
from boxcal.calibrators.warm import warm_monitoring
from tests.app.monitoring.test_fold import answers, log, whole

def forms():
    return {
        (name, function, signature)
        for name, module in list(sys.modules.items()) if name.startswith("boxcal.calibrators")
        for function, one in vars(module).items() if isinstance(one, Dispatcher)
        for signature in one.signatures
    }

warm_monitoring()
answers(1, [[0.0] * 10])  # as a service does at its start
loaded = forms()
fold = whole(log(300, 3.0))
fold.loop.test.diagnosis()
print(fold.metrics.result().count, sorted(forms() - loaded))
"""


def test_a_process_that_compiles_says_so_once_and_one_that_loads_nothing(tmp_path: Path) -> None:
    first, second = (run("-c", WAITS, NUMBA_CACHE_DIR=tmp_path) for _ in range(2))
    assert first.startswith("boxcal: compiling loops for this processor, which takes up to half a minute")
    assert len(first.splitlines()) == 1
    assert second == ""


def test_every_module_can_be_imported_where_no_loop_can_be_kept() -> None:
    assert run("-c", NOWHERE) == ""


@pytest.mark.long
def test_no_fit_compiles_anything_after_the_installation(tmp_path: Path) -> None:
    number, new = run("-c", WARM, NUMBA_CACHE_DIR=tmp_path).split(maxsplit=1)
    assert int(number) > 10
    assert new == "[]\n"


def test_no_label_compiles_anything_after_the_loops_of_the_monitor_are_loaded() -> None:
    assert run("-c", FOLDS).splitlines() == ["249 []"]


def test_bounds_of_any_layout_take_the_two_forms_that_are_warm() -> None:
    """A number, a row of classes, a column of rows and all of them, writable and read-only, side by side."""
    warm_arrays()
    rows, forms = np.random.default_rng(0).normal(size=(4, 5)), compiled_forms()
    shapes = ((), (5,), (1, 5), (4, 1), (4, 5))
    expected = solve_rows(rows, np.full((4, 5), 0.05), np.full((4, 5), 0.3))
    for low, high in product(shapes, shapes):
        for lower, upper in product(laid_out(low, 0.05), laid_out(high, 0.3)):
            np.testing.assert_allclose(solve_rows(rows, lower, upper), expected, rtol=1e-14)
    assert compiled_forms() == forms


def compiled_forms() -> set[Any]:
    loop: Any = forward_rows
    return set(loop.signatures)


def laid_out(shape: tuple[int, ...], value: float) -> list[np.ndarray[Any, Any]]:
    return [np.full(shape, value), np.broadcast_to(value, shape)]
