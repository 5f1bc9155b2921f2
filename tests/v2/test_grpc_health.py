"""The standard health service of gRPC as probes and channels use it, and the pings that keep a channel."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from boxcal.app.protocols.grpc import inference_pb2
from boxcal.app.protocols.grpc import server as grpc_server
from boxcal.app.protocols.v2.inference import Models
from tests.app.fitting.service import free_port
from tests.app.running import Service, running
from tests.app.waiting import until

SERVING, NOT_SERVING, SERVICE_UNKNOWN = 1, 2, 3
SETTINGS, PING, GOAWAY = 4, 6, 7
"""Types of the frames of HTTP/2."""
NAME = "inference.GRPCInferenceService"


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    with running(tmp_path, model="logits:3", grpc_port=free_port()) as service:
        yield service


def channel_to(service: Service, **options: Any) -> grpc.Channel:
    named = [(f"grpc.{name}", value) for name, value in options.items()]
    return grpc.insecure_channel(f"ipv4:127.0.0.1:{service.state.settings.grpc_port}", options=named)


def frame(kind: int, content: bytes = b"") -> bytes:
    return struct.pack(">I", len(content))[1:] + struct.pack(">BBI", kind, 0, 0) + content


def types_of(frames: bytes) -> Iterator[int]:
    while frames:
        yield frames[3]
        frames = frames[9 + int.from_bytes(frames[:3]) :]


def asked(name: str) -> Any:
    return health_pb2.HealthCheckRequest(service=name)


def test_check_and_list(service: Service, caplog: pytest.LogCaptureFixture) -> None:
    with channel_to(service) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        listed = stub.List(health_pb2.HealthListRequest()).statuses
        assert {name: one.status for name, one in listed.items()} == {"": SERVING, NAME: SERVING}
        with pytest.raises(grpc.RpcError) as caught:
            stub.Check(asked("inference"))
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    assert not caplog.records


@pytest.mark.parametrize(("name", "status"), [("", SERVING), (NAME, SERVING), ("other", SERVICE_UNKNOWN)])
def test_a_watch_stays_open(service: Service, name: str, status: int) -> None:
    with channel_to(service) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(asked(name), timeout=0.5)
        assert next(watch).status == status
        with pytest.raises(grpc.RpcError) as caught:
            next(watch)
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED


def test_every_watch_learns_that_the_service_stops(tmp_path: Path) -> None:
    with running(tmp_path, model="logits:3", grpc_port=free_port()) as service:
        channel = channel_to(service)
        watches = [health_pb2_grpc.HealthStub(channel).Watch(asked(name)) for name in ("", NAME, NAME)]
        assert [next(watch).status for watch in watches] == [SERVING] * 3
        service.server.should_exit = True
        assert [next(watch).status for watch in watches] == [NOT_SERVING] * 3
        channel.close()


@pytest.mark.parametrize("beside", [True, False])
def test_calls_are_finished_and_none_accepted_while_the_service_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, beside: bool
) -> None:
    """`beside`: a request of HTTP takes as long; without one, the call lasts longer than 5 s."""
    begun, release, answer = threading.Semaphore(0), threading.Event(), Models.infer

    async def slow(self: Models, asked: Any) -> Any:
        begun.release()
        await asyncio.to_thread(release.wait, 30)
        return await answer(self, asked)

    monkeypatch.setattr(Models, "infer", slow)
    name, message = "logits:3.calibrator", inference_pb2.ModelInferRequest(model_name="logits:3.calibrator")
    tensor = {"name": "logits", "datatype": "FP64", "shape": [1, 3]}
    message.inputs.add(**tensor).contents.fp64_contents.extend([0.0, 1.0, 2.0])
    with (
        running(tmp_path, model="logits:3", grpc_port=free_port()) as service,
        ThreadPoolExecutor() as threads,
        channel_to(service) as channel,
    ):
        waiting = channel.unary_unary(f"/{NAME}/ModelInfer").future(message.SerializeToString(), timeout=30)
        body = {"inputs": [tensor | {"data": [0.0, 1.0, 2.0]}]}
        url = f"{service.url}/v2/models/{name}/infer"
        posted = threads.submit(httpx.post, url, json=body, timeout=30) if beside else None
        for _ in range(1 + beside):
            assert begun.acquire(timeout=10)
        service.server.should_exit = True
        until(lambda: refuses(service))
        if not beside:
            time.sleep(5.5)
        assert not waiting.done()
        release.set()
        assert inference_pb2.ModelInferResponse.FromString(waiting.result()).model_name == name
        assert posted is None or posted.result().status_code == 200


def refuses(service: Service) -> bool:
    """Whether a new channel gets no answer any more."""
    with channel_to(service) as channel:
        try:
            health_pb2_grpc.HealthStub(channel).Check(asked(""), timeout=1)
        except grpc.RpcError as error:
            return bool(error.code() is grpc.StatusCode.UNAVAILABLE)
        return False


def test_a_watch_does_not_delay_the_end(tmp_path: Path) -> None:
    with running(tmp_path, model="logits:3", grpc_port=free_port()) as service:
        channel = channel_to(service)
        watch = health_pb2_grpc.HealthStub(channel).Watch(asked(""))
        assert next(watch).status == SERVING
        began = time.monotonic()
        service.server.should_exit = True
        assert [one.status for one in watch] == [NOT_SERVING]
        assert time.monotonic() - began < 4.0
        channel.close()


def test_a_channel_with_health_checks_becomes_ready(service: Service) -> None:
    config = {"healthCheckConfig": {"serviceName": NAME}, "loadBalancingConfig": [{"round_robin": {}}]}
    with channel_to(service, service_config=json.dumps(config)) as channel:
        grpc.channel_ready_future(channel).result(timeout=10)


def test_a_connection_may_ping_at_the_allowed_rate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients of gRPC ping every 10 s at most, too slow for a test; this one speaks HTTP/2 itself."""
    assert grpc_server.PING_SECONDS == 5
    monkeypatch.setattr(grpc_server, "PING_SECONDS", 0.1)
    port = free_port()
    with (
        running(tmp_path, model="logits:3", grpc_port=port),
        socket.create_connection(("127.0.0.1", port)) as peer,
    ):
        peer.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(SETTINGS))
        for _ in range(6):  # a server closes the connection of a client after two that come too early
            peer.sendall(frame(PING, bytes(8)))
            time.sleep(0.2)
        peer.shutdown(socket.SHUT_WR)
        kinds = [*types_of(b"".join(iter(lambda: peer.recv(2**16), b"")))]
    assert (kinds.count(PING), kinds.count(GOAWAY)) == (6, 0)
