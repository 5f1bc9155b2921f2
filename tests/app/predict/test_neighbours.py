"""Requests that share the backbone at the same moment: what goes wrong with one is nobody else's business."""

from __future__ import annotations

import asyncio
import base64
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from boxcal.models.digits_data import Digits
from tests.app.fitting.files import npy
from tests.app.running import NPY, PNG, Service, running
from tests.app.waiting import eventually

pytestmark = pytest.mark.anyio


def busy_work(samples: int) -> dict[str, Any]:
    content = npy(np.zeros((samples, 1, 8, 8), dtype=np.float32))
    return {"url": "/predict", "content": content, "headers": NPY}


@contextmanager
def held_backbone(service: Service) -> Iterator[None]:
    """Keep every pass in the backbone for the duration of the block, so that requests wait behind it."""
    lanes: Any = service.state.default.pipeline.batcher._lanes
    forward, gate = lanes.forward, threading.Event()

    def held(samples: Any, alone: bool) -> Any:
        assert gate.wait(60)
        return forward(samples, alone)

    lanes.forward = held
    try:
        yield
    finally:
        gate.set()
        lanes.forward = forward


async def test_corrupt_infeasible_cancelled_and_expired_neighbours_disturb_nobody(
    service: Service, digits: Digits
) -> None:
    registry = service.state.telemetry.registry
    async with httpx.AsyncClient(
        base_url=service.url, timeout=30, limits=httpx.Limits(max_connections=100)
    ) as client:

        async def image(n: int, **query: str) -> httpx.Response:
            return await client.post("/predict", content=digits.png(n), headers=PNG, params=query)

        alone = [(await image(n, probabilities="true")).json()["predictions"][0] for n in range(20)]
        with held_backbone(service):
            good = [asyncio.create_task(image(n, probabilities="true", upper="1")) for n in range(20)]
            corrupt = asyncio.create_task(client.post("/predict", content=digits.png(0)[:90], headers=PNG))
            infeasible = asyncio.create_task(image(1, upper="0.05"))
            leaves = asyncio.create_task(image(3))
            bounded = asyncio.create_task(image(4, upper="0.2", probabilities="true"))
            assert (await infeasible).status_code == 422
            await eventually(lambda: registry.get_sample_value("boxcal_queue_samples") == 23)
            assert (await image(2, timeout_ms="0.01")).status_code in (503, 504)
            assert (await image(2, timeout_ms="50")).status_code in (503, 504)
            leaves.cancel()
            await eventually(lambda: registry.get_sample_value("boxcal_queue_samples") == 22)
        assert (await corrupt).status_code == 422
        for answer, expected in zip(await asyncio.gather(*good), alone, strict=True):
            (prediction,) = answer.json()["predictions"]
            assert prediction["index"] == expected["index"]
            # A pass of another size may round the logits differently in the last bits of float32.
            assert prediction["probabilities"] == pytest.approx(expected["probabilities"], rel=1e-4)
        assert max((await bounded).json()["predictions"][0]["probabilities"]) == 0.2
        with pytest.raises(asyncio.CancelledError):
            await leaves
    await eventually(lambda: registry.get_sample_value("boxcal_queue_samples") == 0)


async def test_a_client_that_leaves_frees_its_place(service: Service) -> None:
    rejected = service.state.telemetry.registry.get_sample_value
    before = rejected("boxcal_rejected_total", {"reason": "disconnected"})
    async with httpx.AsyncClient(base_url=service.url, timeout=30) as client:
        with held_backbone(service):
            tasks = [asyncio.create_task(client.post(**busy_work(400))) for _ in range(2)]
            await eventually(lambda: rejected("boxcal_queue_samples") == 800)
            for task in tasks:
                task.cancel()
            await eventually(lambda: rejected("boxcal_queue_samples") == 0)
        await asyncio.gather(*tasks, return_exceptions=True)
    assert before is not None
    await eventually(lambda: rejected("boxcal_rejected_total", {"reason": "disconnected"}) == before + 2)


async def test_a_full_queue_refuses_with_a_time_to_come_back(tmp_path: Path) -> None:
    """In a service of its own: one whose passes others have held refuses for their duration already."""
    with running(tmp_path) as service:
        async with httpx.AsyncClient(base_url=service.url, timeout=30) as client:
            with held_backbone(service):
                tasks = [asyncio.create_task(client.post(**busy_work(600))) for _ in range(6)]
                await eventually(lambda: sum(task.done() for task in tasks) == 5)
            responses = await asyncio.gather(*tasks)
        registry = service.state.telemetry.registry
        await eventually(lambda: registry.get_sample_value("boxcal_queue_samples") == 0)
    statuses = sorted(response.status_code for response in responses)
    assert statuses == [200, 503, 503, 503, 503, 503]
    for response in responses:
        if response.status_code == 503:
            assert int(response.headers["retry-after"]) >= 1
            assert "samples are waiting and at most 1024 may" in response.json()["detail"]


async def test_a_full_queue_refuses_before_the_body_has_come(service: Service, digits: Digits) -> None:
    image = digits.png(0)
    head = "POST /predict HTTP/1.1\r\nhost: localhost\r\ncontent-type: image/png\r\n"
    head += f"content-length: {len(image)}"
    head_bytes = f"{head}\r\n\r\n".encode()

    async def status(reader: asyncio.StreamReader) -> int:
        answered = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 20)
        length = next(line for line in answered.lower().split(b"\r\n") if line.startswith(b"content-length"))
        await reader.readexactly(int(length.partition(b":")[2]))
        return int(answered[9:12])

    reader, writer = await asyncio.open_connection("127.0.0.1", httpx.URL(service.url).port)
    try:
        with service.state.default.pipeline.batcher.reserve_slot(1024):
            writer.write(head_bytes)
            assert await status(reader) == 503
        # The body that nobody waited for, and the next request behind it.
        writer.write(image + head_bytes + image)
        assert await status(reader) == 200
    finally:
        writer.close()
        await writer.wait_closed()


async def test_a_timeout_shorter_than_the_work_is_the_requests_own_fault(
    service: Service, digits: Digits
) -> None:
    """With nobody else there the answer is 504: a client repeats a 503, which would be in vain."""

    def counted(reason: str) -> float:
        value = service.state.telemetry.registry.get_sample_value
        return value("boxcal_rejected_total", {"reason": reason}) or 0.0

    before = counted("client-timeout"), counted("deadline-exceeded")
    async with httpx.AsyncClient(base_url=service.url, timeout=30) as client:
        assert (await client.post("/predict", content=digits.png(0), headers=PNG)).status_code == 200
        for _ in range(5):
            late = await client.post("/predict?timeout_ms=0.01", content=digits.png(0), headers=PNG)
            assert late.status_code == 504
            assert late.json()["type"].endswith("deadline-exceeded")
            assert "timeout" in late.json()["detail"]
        encoded = base64.b64encode(digits.png(0)).decode()
        image = {"name": "image", "shape": [1], "datatype": "BYTES", "data": [encoded]}
        sent = {"inputs": [image], "parameters": {"timeout": 10}}  # microseconds
        assert (await client.post("/v2/models/digits/infer", json=sent)).status_code == 504
    assert (counted("client-timeout"), counted("deadline-exceeded")) == (before[0] + 6, before[1])
