"""A first start, before any loop was compiled: ready at once; the solver is compiled beside the service."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from pathlib import Path

import httpx
import numpy as np
import psutil
import pytest

from boxcal.app.http.problems import DeadlineExceeded
from boxcal.app.predict import solver as module
from boxcal.app.predict.answers import CalibrationRequest
from boxcal.app.predict.options import RequestBounds
from boxcal.app.predict.pipeline import within
from boxcal.app.predict.solver import MODULE, OTHER_LOOPS, Solver
from boxcal.app.registry.activator import ServedCalibrator
from boxcal.calibrators.array_calibrator import ArrayCalibrator
from boxcal.calibrators.maps.constant_box import ConstantBounds
from boxcal.calibrators.maps.identity import IdentityMap
from boxcal.calibrators.maps.linear import VectorScaling
from tests.app.fitting.service import Service
from tests.app.raising import raises_problem

LOGITS = [[1.0, 2.0, 3.0, *[0.0] * 7]]
BOUNDED = {"logits": LOGITS, "options": {"bounds": {"upper": 0.3}, "probabilities": True}}
PLAIN = {"logits": LOGITS, "options": {"probabilities": True}}
PLAIN_ANSWER = np.exp(LOGITS[0]) / np.exp(LOGITS[0]).sum()
READY_SECONDS = 12.0
"""Of processor time until the service is ready, of which it takes less than 4; with the solver it took 21."""
WITHOUT_TORCH = "import os, sys; sys.modules['torch'] = None; os.nice(1)"


def compilers(service: Service, module: str = MODULE) -> list[psutil.Process]:
    return [child for child in service.process.children() if module in child.cmdline()]


def processor_seconds(service: Service) -> float:
    times = service.process.cpu_times()
    return float(times.user + times.system)


def answer(service: Service, document: object) -> list[float]:
    response = httpx.post(f"{service.url}/calibrate", json=document, timeout=280)
    assert response.status_code == 200, response.text
    probabilities: list[float] = response.json()["predictions"][0]["probabilities"]
    return probabilities


def first_start(tmp_path: Path, kept: Path) -> Service:
    service = Service(tmp_path / "data", prelude=WITHOUT_TORCH, model="digits")
    service.environment["NUMBA_CACHE_DIR"] = str(kept)
    return service


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="reads the priority of another process")
def test_a_first_start_answers_before_the_solver_is_compiled_and_bounded_requests_wait(
    tmp_path: Path,
) -> None:
    with first_start(tmp_path, tmp_path / "kept") as service:
        assert processor_seconds(service) < READY_SECONDS
        assert "compiling the solver for this processor in the background" in service.log()
        (compiler,) = compilers(service)
        compiler_nice = compiler.nice()
        assert compiler_nice == min(service.process.nice() + 5, 19)
        np.testing.assert_allclose(answer(service, PLAIN), PLAIN_ANSWER, rtol=1e-12)
        limited = {"logits": LOGITS, "options": {"bounds": {"upper": 0.3}, "timeout_ms": 50}}
        assert service.client.post("/calibrate", json=limited).status_code == 504
        bounded: list[float] = []
        timing: dict[str, float] = {}

        def wait() -> None:
            document = httpx.post(f"{service.url}/calibrate", json=BOUNDED, timeout=280).json()
            bounded.extend(document["predictions"][0]["probabilities"])
            timing.update(document["timing_ms"])

        waiting = threading.Thread(target=wait)
        waiting.start()
        slowest, answered = 0.0, 0
        while waiting.is_alive():
            began = time.monotonic()
            assert service.client.get("/health/live").status_code == 200
            slowest, answered = max(slowest, time.monotonic() - began), answered + 1
            time.sleep(0.05)
        assert answered > 20
        assert timing["queue"] > 1000 > 100 * timing["decode"]
        assert slowest < 3.0
        # Two classes are held at 0.3; the others share 0.4 as the softmax does.
        np.testing.assert_allclose(bounded[1:3], [0.3, 0.3], rtol=1e-12)
        others = np.array(bounded)[[0, 3]] / 0.4
        np.testing.assert_allclose(others, np.array([np.e, 1.0]) / (np.e + 7.0), rtol=1e-12)
        assert not compilers(service)
        (rest,) = compilers(service, OTHER_LOOPS)
        assert rest.nice() == compiler_nice
        assert answer(service, BOUNDED) == bounded
        # The service has loaded it, and compiled nothing for itself.
        assert processor_seconds(service) < READY_SECONDS + 4.0
        service.stop()
        psutil.wait_procs([rest], timeout=10)
        assert not rest.is_running()
        service.start()
        assert not compilers(service)
        assert service.log().count("compiling the solver") == 1
        assert "compiling loops" not in service.log()
        assert answer(service, BOUNDED) == bounded


@pytest.mark.skipif(sys.platform != "linux", reason="as above")
def test_the_compiler_ends_with_the_service(tmp_path: Path) -> None:
    with first_start(tmp_path, tmp_path / "kept") as service:
        (compiler,) = compilers(service)
        assert service.stop() == 0
        psutil.wait_procs([compiler], timeout=10)
        assert not compiler.is_running()
        assert not list((tmp_path / "kept").rglob("*forward_rows*.nbc"))  # it was not waited for


def requested(calibrator: ArrayCalibrator, bounds: RequestBounds | None = None) -> CalibrationRequest:
    return CalibrationRequest(ServedCalibrator(1, calibrator.method, calibrator), bounds)


def test_where_nothing_can_be_kept_the_service_compiles_and_only_what_needs_the_solver_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compiled = threading.Event()
    monkeypatch.setattr(module, "solver_is_kept", lambda: False)
    monkeypatch.setattr(module, "solver_can_be_kept", lambda: False)
    monkeypatch.setattr(module, "warm_arrays", lambda: compiled.wait(60))
    plain = ArrayCalibrator.uncalibrated(3)
    needing = [
        requested(plain, RequestBounds(np.zeros(3), np.full(3, 0.5))),
        requested(ArrayCalibrator("pb", IdentityMap(3), ConstantBounds.of(3, 0.0, 0.4), 3)),
        requested(ArrayCalibrator("vector", VectorScaling(3), ConstantBounds(3), 3)),
    ]

    assert not requested(plain).needs_solver
    assert all(one.needs_solver for one in needing)

    async def run() -> None:
        solver = Solver()
        async with solver.loading():
            assert solver.is_loading
            with raises_problem(DeadlineExceeded):
                await within(0.05, solver.wait())
            assert solver.is_loading
            compiled.set()
            await within(30.0, solver.wait())
            assert not solver.is_loading

    try:
        asyncio.run(run())
    finally:
        compiled.set()


UNKEPT = "import numba.core.caching; numba.core.caching.CacheImpl._locator_classes = []"


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="as above")
def test_a_start_is_as_quick_where_no_folder_can_be_written(tmp_path: Path) -> None:
    """Compiled beside the start, the solver took it to 12 seconds."""
    service = Service(tmp_path / "data", prelude=f"{UNKEPT}\n{WITHOUT_TORCH}", model="digits")
    with service:
        assert processor_seconds(service) < READY_SECONDS
        assert not compilers(service)
        np.testing.assert_allclose(answer(service, PLAIN), PLAIN_ANSWER, rtol=1e-12)
        assert service.stop() == 0
