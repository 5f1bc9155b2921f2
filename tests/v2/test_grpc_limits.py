"""What one client of gRPC may hold: connections, calls without a message, streams, memory, the event loop."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from itertools import count
from pathlib import Path
from typing import Any

import grpc
import httpx
import numpy as np
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from boxcal.app.protocols.grpc.admission import Copies, close_connections, measured
from tests.app.access.test_event_streams import FEW
from tests.app.fitting.service import Service, free_port
from tests.app.waiting import until

INFERENCE = "/inference.GRPCInferenceService/ModelInfer"
LIVE = "/inference.GRPCInferenceService/ServerLive"
CHECK = "/grpc.health.v1.Health/Check"
REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
MODEL = "logits:10.calibrator"
MIB = 2**20
QUICK = """
from boxcal.app.protocols.grpc import admission, server
server.MAX_CALLS = 100
admission.STALL_SECONDS = 2.0
admission.READ_BYTES = 29 * 2**19
"""
LARGE = service_pb2.ModelInferRequest(model_name=MODEL, raw_input_contents=[bytes(4 * 1_900_000)])
"""Answered by 15,200,000 bytes."""
LARGE.inputs.add(name="logits", datatype="FP32", shape=[190_000, 10])
LARGE.outputs.add(name="probabilities")


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder: Path = tmp_path_factory.mktemp("limits")
    port = str(free_port())
    with Service(folder, prelude=FEW, model="logits:10", grpc_port=port) as one:
        yield one


@pytest.fixture
def address(service: Service) -> str:
    return f"127.0.0.1:{service.environment['BOXCAL_GRPC_PORT']}"


def channel_to(address: str, stack: ExitStack) -> grpc.Channel:
    """Open a channel with a connection of its own."""
    options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_receive_message_length", -1)]
    return stack.enter_context(grpc.insecure_channel(address, options))


def silent(channel: grpc.Channel, method: str, stopped: threading.Event) -> Any:
    def messages() -> Iterator[bytes]:
        stopped.wait(60)
        yield b""

    return channel.stream_stream(method)(messages())


def is_healthy(address: str) -> bool:
    with ExitStack() as stack:
        stub = health_pb2_grpc.HealthStub(channel_to(address, stack))
        answer = stub.Check(health_pb2.HealthCheckRequest(), timeout=5)
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


def has_no_slot(address: str) -> bool:
    try:
        return not is_healthy(address)
    except grpc.RpcError as error:
        assert "Concurrent RPC limit exceeded" in str(error)  # noqa: PT017 - or it is healthy
        return True


def test_silent_connections_leave_descriptors_for_health_checks(service: Service, address: str) -> None:
    host, _, port = address.partition(":")
    with ExitStack() as stack:
        for _ in range(900):
            stack.enter_context(socket.create_connection((host, int(port)), timeout=30))
        assert httpx.get(f"{service.url}/health/live", timeout=5).is_success
        assert psutil.Process(service.process.pid).num_fds() < 400
        time.sleep(6)  # they must send the first bytes of HTTP/2 within 5 s
        assert is_healthy(address)


def test_an_address_leaves_half_of_the_connections_to_others(tmp_path: Path) -> None:
    port = free_port()
    few = f"{FEW}\nfrom boxcal.app.protocols.grpc import server; server.descriptor_limit = lambda: 80"

    def is_open(line: socket.socket) -> bool:
        line.setblocking(False)
        with suppress(BlockingIOError):
            while line.recv(4096):
                pass
            return False
        return True

    with (
        Service(tmp_path, prelude=few, model="logits:10", grpc_port=str(port)) as service,
        ExitStack() as stack,
    ):
        lines = []
        for n in range(15):
            source = ("127.0.0.2" if n == 14 else "127.0.0.1", 0)
            line = socket.create_connection(("127.0.0.1", port), timeout=30, source_address=source)
            lines.append(stack.enter_context(line))
            line.sendall(WITHOUT_WINDOW)
        until(lambda: sum(map(is_open, lines[:14])) <= 10)
        time.sleep(1)
        assert [sum(map(is_open, lines[:14])), is_open(lines[14])] == [10, True]
        assert "gRPC: closed 4 connections of 127.0.0.1, beyond its share of 10" in service.log()


@pytest.mark.parametrize("method", [INFERENCE, CHECK, REFLECTION])
def test_idle_calls_of_a_client_do_not_refuse_others(address: str, method: str) -> None:
    stopped = threading.Event()
    with ExitStack() as stack:
        stack.callback(stopped.set)
        channels = [channel_to(address, stack) for _ in range(4)]
        calls = [silent(channels[n % 4], method, stopped) for n in range(120)]
        until(lambda: sum(call.done() for call in calls) >= 112)
        refused = [call.exception() for call in calls if call.done()]
        assert len(refused) == 112
        assert {error.code() for error in refused} == {grpc.StatusCode.RESOURCE_EXHAUSTED}
        assert all(is_healthy(address) for _ in range(6))
        for call in calls:
            call.cancel()


def memory(service: Service) -> int:
    return int(psutil.Process(service.process.pid).memory_info().rss)


def inferred(address: str, request: Any) -> Any:
    with ExitStack() as stack:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel_to(address, stack))
        return stub.ModelInfer(request, timeout=60)


def slowest_health_check(service: Service, work: Any) -> float:
    """Give the longest of the health checks that are answered while `work` runs."""
    seconds = []
    with ThreadPoolExecutor(1) as pool, httpx.Client(base_url=service.url, timeout=60) as http:
        running = pool.submit(work)
        while not running.done():
            began = time.perf_counter()
            assert http.get("/health/live").is_success
            seconds.append(time.perf_counter() - began)
        running.result()
    return max(seconds)


def test_typed_contents_are_read_beside_the_event_loop(service: Service, address: str) -> None:
    request = service_pb2.ModelInferRequest(model_name=MODEL)
    tensor = request.inputs.add(name="logits", datatype="INT64", shape=[200_000, 10])
    tensor.contents.int64_contents.extend([1000] * 2_000_000)
    request.outputs.add(name="probabilities")
    answers = []
    assert slowest_health_check(service, lambda: answers.append(inferred(address, request))) < 1.0
    probabilities = np.frombuffer(answers[0].raw_output_contents[0]).reshape(200_000, 10)
    np.testing.assert_allclose(probabilities, 0.1, rtol=1e-15)


@pytest.mark.parametrize("member", ["shape", "contents", "id"])
def test_what_is_parsed_is_limited_and_charged(service: Service, address: str, member: str) -> None:
    request = service_pb2.ModelInferRequest(model_name="", raw_input_contents=[bytes(500)])
    tensor = request.inputs.add()
    if member == "id":
        request.id = "1" * 10_000
    else:
        numbers = tensor.shape if member == "shape" else tensor.contents.int64_contents
        numbers.extend([1] * 10_000)
    assert measured(request.SerializeToString()) == len(request.SerializeToString()) + 320_000
    if member == "id":
        request.id = "1" * 8_000_000
    else:
        numbers.extend([1] * 7_990_000)
    before = memory(service)
    with pytest.raises(
        grpc.RpcError, match="8,000,000 bytes of typed contents and names; the limit is 4,194,304"
    ):
        inferred(address, request)
    assert memory(service) - before < 100 * MIB


@pytest.mark.parametrize(
    ("datatype", "member", "number", "status"),
    [
        ("INT64", "int64_contents", 1, grpc.StatusCode.RESOURCE_EXHAUSTED),
        ("INT64", "int64_contents", 128, None),
        ("FP32", "fp32_contents", 0, None),
        ("FP64", "fp64_contents", 0, None),
    ],
)
def test_typed_numbers_take_at_most_20_times_their_message(
    address: str, datatype: str, member: str, number: float, status: Any
) -> None:
    request = service_pb2.ModelInferRequest(model_name=MODEL)
    tensor = request.inputs.add(name="logits", datatype=datatype, shape=[30_000, 10])
    getattr(tensor.contents, member).extend([number] * 300_000)
    request.outputs.add(name="index")
    if status is None:
        assert len(inferred(address, request).raw_output_contents) == 1
        return
    with pytest.raises(
        grpc.RpcError, match="9,901,280 bytes of memory for typed numbers; the limit is 6,001,280"
    ) as refused:
        inferred(address, request)
    assert refused.value.code() is status


@pytest.mark.parametrize(
    ("rows", "outputs", "says"),
    [
        (
            200_000,
            {"probabilities": 10, "logits": 10},
            "lists 4,000,000 classes, which need about 1,024,000,000 bytes",
        ),
        (200_000, {"probabilities": 0, "logits": 0, "index": 0}, "33,600,000 bytes or more; the limit is"),
    ],
)
def test_answers_that_are_too_large_are_refused(
    address: str, rows: int, outputs: dict[str, int], says: str
) -> None:
    request = service_pb2.ModelInferRequest(model_name=MODEL, raw_input_contents=[bytes(40 * rows)])
    request.inputs.add(name="logits", datatype="FP32", shape=[rows, 10])
    for name, classes in outputs.items():
        request.outputs.add(name=name).parameters["classification"].int64_param = classes
    with pytest.raises(grpc.RpcError, match=says) as caught:
        inferred(address, request)
    assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED


def test_labels_of_many_rows_are_written_beside_the_event_loop(service: Service, address: str) -> None:
    request = service_pb2.ModelInferRequest(model_name=MODEL)
    logits = np.zeros((200_000, 10), np.float32)
    request.inputs.add(name="logits", datatype="FP32", shape=logits.shape)
    request.raw_input_contents.append(logits.tobytes())
    request.outputs.add(name="label")
    assert slowest_health_check(service, lambda: inferred(address, request)) < 1.0


def test_a_tensor_of_one_dimension_is_refused_before_rows_are_made(service: Service) -> None:
    body = b'{"inputs": [{"name": "logits", "datatype": "BOOL", "shape": [20000000], "parameters": '
    body += b'{"binary_data_size": 20000000}}]}'
    headers = {"Inference-Header-Content-Length": str(len(body))}
    before = memory(service)
    url = f"{service.url}/v2/models/{MODEL}/infer"
    answer = httpx.post(url, content=body + bytes(20_000_000), headers=headers, timeout=60)
    assert answer.status_code == 413
    assert "20,000,000 samples of 10 classes need about" in answer.json()["detail"]
    assert memory(service) - before < 150 * MIB


def test_rows_with_bounds_of_their_own_are_limited(address: str) -> None:
    request = service_pb2.ModelInferRequest(model_name=MODEL)
    for name in ("logits", "upper"):
        request.inputs.add(name=name, datatype="FP32", shape=[1025, 10])
        request.raw_input_contents.append(np.ones((1025, 10), np.float32).tobytes())
    with pytest.raises(grpc.RpcError, match="1,025 rows of 10 classes; at most 1,024 rows"):
        inferred(address, request)


@pytest.mark.parametrize(("method", "size", "calls"), [("ServerLive", 2**16, 10), ("ModelInfer", 4 * MIB, 1)])
def test_a_number_without_end_is_refused_at_its_tenth_byte(
    service: Service, address: str, method: str, size: int, calls: int
) -> None:
    before = sum(service.process.cpu_times()[:2])
    with ExitStack() as stack:
        call = channel_to(address, stack).unary_unary(f"/inference.GRPCInferenceService/{method}")
        for _ in range(calls):
            with pytest.raises(grpc.RpcError, match="a field ends behind its end"):
                call(b"\xff" * size, timeout=10)
    assert sum(service.process.cpu_times()[:2]) - before < 1.0


def test_a_message_has_at_most_8_mib(address: str) -> None:
    """It is a number that never ends: one that is read is refused as that."""
    longest = 8 * MIB
    with ExitStack() as stack:
        call = channel_to(address, stack).unary_unary(INFERENCE)
        with pytest.raises(grpc.RpcError, match="a field ends behind its end"):
            call(b"\xff" * longest, timeout=20)
        with pytest.raises(grpc.RpcError, match="larger than max") as refused:
            call(b"\xff" * (longest + 1), timeout=20)
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "8388609 vs. 8388608" in refused.value.details()


def test_parameters_of_one_input_are_limited(address: str) -> None:
    request = service_pb2.ModelInferRequest(model_name=MODEL)
    tensor = request.inputs.add(name="logits", datatype="FP32", shape=[1, 10])
    for n in range(4001):
        tensor.parameters[str(n)].bool_param = True
    with pytest.raises(grpc.RpcError, match="more than 4,000 inputs, outputs and parameters"):
        inferred(address, request)


def unread(address: str, stack: ExitStack, request: Any, method: str = INFERENCE) -> Any:
    """Call, and leave the answer where it is: the window of the stream stays closed."""
    options = [("grpc.use_local_subchannel_pool", 1), ("grpc.http2.bdp_probe", 0)]
    channel = stack.enter_context(grpc.insecure_channel(address, options))
    call = channel.stream_stream(method)(iter([request.SerializeToString()]))
    stack.callback(call.cancel)
    return call


def test_answers_that_a_client_does_not_read_are_limited(address: str) -> None:
    with ExitStack() as stack:
        calls = []
        for _ in range(9):  # 14.5 MiB each, of 128
            calls.append(unread(address, stack, LARGE))
            time.sleep(1)
        until(calls[8].done)
        assert [call.done() for call in calls] == [False] * 8 + [True]
        assert "has not read 121,60" in calls[8].details()
        assert is_healthy(address)
    assert len(inferred(address, LARGE).raw_output_contents[0]) == 15_200_000


@pytest.mark.parametrize(("size", "most"), [(15 * MIB, 1), (MIB // 2, 2), (2**16, 12)])
def test_messages_are_copied_in_turns_of_the_event_loop(size: int, most: int) -> None:
    async def copied_by_turn() -> list[int]:
        copies, loop = Copies(), asyncio.get_running_loop()
        arrived, counts, cancelled = loop.create_future(), [0], loop.create_future()

        def next_turn() -> None:
            counts.append(0)
            loop.call_soon(next_turn)

        async def message() -> bytes:
            await arrived
            counts[-1] += 1
            return bytes(size)

        async def never() -> None:
            try:
                await cancelled
            except asyncio.CancelledError:
                counts[0] = -1
                raise

        async def answered() -> None:
            await arrived
            await copies.turn(size)
            counts[-1] += 1

        loop.call_soon(next_turn)
        readings = never(), *(message() for _ in range(6))
        calls = [asyncio.create_task(copies.received(one)) for one in readings]
        calls += [asyncio.create_task(answered()) for _ in range(6)]
        await asyncio.sleep(0)
        arrived.set_result(None)
        calls[0].cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        assert calls[0].cancelled()
        return counts

    counts = asyncio.run(copied_by_turn())
    assert counts[0] == -1
    assert sum(counts[1:]) == 12
    assert max(counts) == most


def http2_frame(kind: int, flags: int, stream: int, content: bytes) -> bytes:
    """Write a frame of HTTP/2."""
    return len(content).to_bytes(3) + bytes([kind, flags]) + stream.to_bytes(4) + content


WITHOUT_WINDOW = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + http2_frame(4, 0, 0, b"\0\x04" + bytes(4))
"""The start of an HTTP/2 connection on which answers have no room: the first window is 0."""


def calls_of(path: str, numbers: range) -> bytes:
    """Write calls with an empty message, as those of these numbers on their connection."""
    fields = {":method": "POST", ":scheme": "http", ":path": path, ":authority": "localhost"}
    fields |= {"content-type": "application/grpc", "te": "trailers"}
    texts = [text.encode() for field in fields.items() for text in field]
    head = b"".join((b"" if n % 2 else b"\0") + bytes([len(text)]) + text for n, text in enumerate(texts))
    streams = (2 * n + 1 for n in numbers)
    return b"".join(http2_frame(1, 4, one, head) + http2_frame(0, 1, one, bytes(5)) for one in streams)


@pytest.mark.long
def test_a_client_that_does_not_read_its_answer_is_disconnected(tmp_path: Path) -> None:
    port = free_port()
    address = f"127.0.0.1:{port}"
    with (
        Service(tmp_path, prelude=QUICK, model="logits:10", grpc_port=str(port)) as service,
        ExitStack() as stack,
    ):
        line = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=30))
        line.sendall(WITHOUT_WINDOW + calls_of(LIVE, range(99)))
        numbers = count(99)

        def have_all_slots() -> bool:
            """Look after one more call: a look takes a slot itself, for which a call may be refused."""
            n = next(numbers)
            line.sendall(calls_of(LIVE, range(n, n + 1)))
            return has_no_slot(address)

        until(have_all_slots)
        began = time.monotonic()
        while line.recv(4096):  # settings and headers
            pass
        assert 1.0 < time.monotonic() - began < 20.0
        assert "gRPC: disconnecting who did not read answers (1): ipv4:127.0.0.1:" in service.log()
        began = time.monotonic()
        calls = [unread(address, stack, LARGE) for _ in range(2)]
        while not all(call.done() for call in calls):
            assert is_healthy(address)
            time.sleep(0.1)
        assert 4.0 < time.monotonic() - began < 20.0  # 2 s, one for 14.5 MiB, and one to collect
        assert {call.code() for call in calls} == {grpc.StatusCode.UNAVAILABLE}
        assert len(inferred(address, LARGE).raw_output_contents[0]) == 15_200_000


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="needs IPv6")
@pytest.mark.parametrize(("host", "peer"), [("127.0.0.1", "ipv4:127.0.0.1:{}"), ("::1", "ipv6:%5B::1%5D:{}")])
def test_only_the_connection_of_a_peer_is_closed(host: str, peer: str) -> None:
    with (
        socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True) as server,
        ExitStack() as stack,
    ):
        ends = []
        for _ in range(2):
            near = stack.enter_context(socket.create_connection((host, server.getsockname()[1])))
            ends.append((near, stack.enter_context(server.accept()[0])))
        (closed, _), (kept, other) = ends
        close_connections([peer.format(closed.getsockname()[1])], server.getsockname()[1])
        assert closed.recv(1) == b""
        other.sendall(b"1")
        assert kept.recv(1) == b"1"


def test_a_connection_to_another_port_stays_though_its_other_end_is_the_same() -> None:
    """As that of an HTTP client, whose system gives connections to two ports one number."""
    with ExitStack() as stack:
        clients, ends, ports = list[socket.socket](), list[socket.socket](), list[int]()
        for _ in range(2):
            server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            client = stack.enter_context(socket.socket())
            client.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            client.bind(("127.0.0.1", clients[0].getsockname()[1] if clients else 0))
            client.connect(server.getsockname())
            clients.append(client)
            ends.append(stack.enter_context(server.accept()[0]))
            ports.append(server.getsockname()[1])
        assert clients[0].getsockname() == clients[1].getsockname()
        close_connections([f"ipv4:127.0.0.1:{clients[0].getsockname()[1]}"], ports[0])
        assert clients[0].recv(1) == b""
        ends[1].sendall(b"1")
        assert clients[1].recv(1) == b"1"
