"""The Open Inference Protocol over gRPC, spoken by Triton's client; answers are those of HTTP."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import numpy as np
import pytest
import tritonclient.grpc as triton
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.utils import InferenceServerException

from tests.app.fitting.service import free_port
from tests.app.running import Service, running
from tests.app.waiting import until
from tests.v2.test_rest import LOGITS, calibrated, check_equal, images, predicted, text

__all__ = ["images"]

ROOT = Path(__file__).parents[2]
PROTO = "boxcal/app/protocols/grpc/inference.proto"


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with running(tmp_path_factory.mktemp("grpc"), grpc_port=free_port()) as service:
        yield service


@pytest.fixture
def address(service: Service) -> str:
    return f"127.0.0.1:{service.state.settings.grpc_port}"


@pytest.fixture
def client(address: str) -> Iterator[Any]:
    client = triton.InferenceServerClient(address)
    yield client
    client.close()


def logits_input(logits: Any) -> Any:
    found = triton.InferInput("logits", list(logits.shape), "FP64")
    found.set_data_from_numpy(logits)
    return found


def test_the_stubs_are_those_of_the_proto_file(tmp_path: Path) -> None:
    """The comment in the file says how they are made."""
    command = [sys.executable, "-m", "grpc_tools.protoc", "-I.", f"--python_out={tmp_path}", PROTO]
    subprocess.run(command, cwd=ROOT, check=True)
    stubs = PROTO.replace(".proto", "_pb2.py")
    generated = (tmp_path / stubs).read_text()
    assert generated.count("_descriptor_pool.Default()") == 1
    expected = generated.replace("_descriptor_pool.Default()", "_descriptor_pool.DescriptorPool()")
    assert (ROOT / stubs).read_text() == expected


def test_the_service_and_its_models_are_described(client: Any) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("digits")
    assert not client.is_model_ready("digits", "7")
    with pytest.raises(InferenceServerException, match="digits has no version '7'"):
        client.get_model_metadata("digits", "7")
    assert client.get_server_metadata().name == "boxcal"
    model = client.get_model_metadata("digits.calibrator")
    assert (list(model.versions), list(model.inputs[0].shape)) == (["0"], [-1, 10])
    assert [one.name for one in client.get_model_repository_index().models] == ["digits", "digits.calibrator"]


def test_answers_equal_those_of_http(client: Any, service: Service, images: list[bytes]) -> None:
    for image in images:
        given = triton.InferInput("image", [1], "BYTES")
        given.set_data_from_numpy(np.array([image], object))
        names = ("probabilities", "logits", "label", "index", "bound")
        outputs = [triton.InferRequestedOutput(name) for name in names]
        answer = client.infer("digits", [given], outputs=outputs, request_id="7", parameters={"upper": 0.5})
        check_equal(answer, predicted(service, [image], bounds={"upper": 0.5}))
        assert (answer.get_response().id, answer.get_response().model_version) == ("7", "0")


def test_bounds_classification_and_typed_contents(client: Any, service: Service, address: str) -> None:
    each = np.linspace(0.2, 0.6, 5)[:, None] * np.ones(10)
    upper = triton.InferInput("upper", [5, 10], "FP64")
    upper.set_data_from_numpy(each)
    answer = client.infer("digits.calibrator", [logits_input(LOGITS), upper])
    assert (answer.as_numpy("probabilities") <= each).all()
    top = [triton.InferRequestedOutput("probabilities", class_count=1)]
    listed = client.infer("digits.calibrator", [logits_input(LOGITS)], outputs=top).as_numpy("probabilities")
    expected = calibrated(service, LOGITS)
    assert [float(text(one[0]).split(":")[0]) for one in listed] == expected.max(axis=1).tolist()
    request = service_pb2.ModelInferRequest(model_name="digits.calibrator")
    tensor = request.inputs.add(name="logits", datatype="FP64", shape=[5, 10])
    tensor.contents.fp64_contents.extend(LOGITS.ravel().tolist())
    with grpc.insecure_channel(address) as channel:
        response = service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelInfer(request)
    found = np.frombuffer(response.raw_output_contents[0], np.float64).reshape(5, 10)
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(
    ("model", "request_", "status", "message"),
    [
        (
            "digits.calibrator",
            {"model_version": "9"},
            "NOT_FOUND",
            "^.*digits.calibrator has no version '9'.$",
        ),
        ("digits.calibrator", {"model_version": "9" * 20}, "NOT_FOUND", f"has no version '{'9' * 20}'"),
        ("digits.calibrator", {"parameters": {"upper": 0.01}}, "INVALID_ARGUMENT", "add up to"),
        ("digits", {}, "INVALID_ARGUMENT", "no input 'logits'"),
    ],
)
def test_errors_have_a_status_and_the_reason(
    client: Any, model: str, request_: dict[str, Any], status: str, message: str
) -> None:
    with pytest.raises(InferenceServerException, match=message) as caught:
        client.infer(model, [logits_input(LOGITS)], **request_)
    assert status in str(caught.value.status())


@pytest.mark.parametrize(
    ("datatype", "values", "raw", "reason"),
    [
        ("INT8", [300, 1], (), "values from 1 to 300; the type INT8 holds -128 to 127"),
        ("UINT16", [0, 70000], (), "values from 0 to 70000; the type UINT16 holds 0 to 65535"),
        ("INT8", [9, 1], (b"\0\1",), "'logits' has raw contents and typed ones"),
    ],
)
def test_numbers_that_a_message_contradicts_are_refused(
    address: str, datatype: str, values: list[int], raw: tuple[bytes, ...], reason: str
) -> None:
    request = service_pb2.ModelInferRequest(model_name="digits.calibrator", raw_input_contents=raw)
    contents = request.inputs.add(name="logits", datatype=datatype, shape=[1, 2]).contents
    (contents.int_contents if datatype == "INT8" else contents.uint_contents).extend(values)
    with grpc.insecure_channel(address) as channel, pytest.raises(grpc.RpcError, match=reason) as caught:
        service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelInfer(request)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_a_parameter_of_the_request_at_an_input_is_refused(address: str) -> None:
    request = service_pb2.ModelInferRequest(model_name="digits.calibrator")
    given = request.inputs.add(name="logits", datatype="FP64", shape=[1, 10])
    given.contents.fp64_contents.extend([0.0] * 10)
    given.parameters["upper"].double_param = 0.4
    reason = "The input 'logits' has the parameter upper; it is one of the request."
    with grpc.insecure_channel(address) as channel, pytest.raises(grpc.RpcError, match=reason) as caught:
        service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelInfer(request)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_calls_are_counted_beside_requests(client: Any, service: Service) -> None:
    method = "/inference.GRPCInferenceService/ModelInfer"

    def counts() -> list[float]:
        value = service.state.telemetry.registry.get_sample_value
        labels = [{"route": method, "status": status} for status in ("200", "404", "422")]
        return [value("boxcal_request_seconds_count", one) or 0.0 for one in labels]

    before = counts()
    client.infer("digits.calibrator", [logits_input(LOGITS)])
    for model, columns in (("digits.calibrator", 3), ("digit", 10)):
        with pytest.raises(InferenceServerException):
            client.infer(model, [logits_input(LOGITS[:, :columns])])
    # A call is counted when it is over, which is after its client has the answer.
    until(lambda: [now - earlier for now, earlier in zip(counts(), before, strict=True)] == [1.0, 1.0, 1.0])


def test_a_timeout_of_the_client_is_no_error_of_the_service(
    client: Any, service: Service, images: list[bytes]
) -> None:
    def counted(reason: str) -> float:
        value = service.state.telemetry.registry.get_sample_value
        return value("boxcal_rejected_total", {"reason": reason}) or 0.0

    reasons = ("client-timeout", "deadline-exceeded")
    given = triton.InferInput("image", [1], "BYTES")
    given.set_data_from_numpy(np.array([images[0]], object))
    client.infer("digits", [given])  # so that the work of a sample is known
    before = [counted(reason) for reason in reasons]
    with pytest.raises(InferenceServerException, match="timeout") as caught:
        client.infer("digits", [given], timeout=10)  # microseconds
    assert "DEADLINE_EXCEEDED" in str(caught.value.status())
    assert [counted(reason) for reason in reasons] == [before[0] + 1, before[1]]


def unfinished(channel: grpc.Channel, stopped: threading.Event) -> Any:
    def messages() -> Iterator[bytes]:
        stopped.wait(30)
        yield b""

    return channel.stream_unary("/inference.GRPCInferenceService/ModelInfer").future(messages())


def test_bodies_of_both_protocols_share_one_budget(
    client: Any, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    small, large = np.zeros((1, 10)), np.zeros((4096, 10))
    assert service.state.admission.bodies.limit == 268_435_456
    monkeypatch.setattr(service.state.admission.bodies, "held", 268_435_456)
    for logits, status in ((small, 200), (large, 503)):
        body = {"logits": (logits + 0.0625).tolist()}
        answer = httpx.post(f"{service.url}/calibrate", json=body)
        assert answer.status_code == status
    assert "Requests under way hold 268,435,456 bytes of bodies" in answer.json()["detail"]
    client.infer("digits.calibrator", [logits_input(small)])
    with pytest.raises(InferenceServerException, match="hold 268,435,456 bytes of bodies; 66,") as caught:
        client.infer("digits.calibrator", [logits_input(large)])
    assert caught.value.status() == "StatusCode.UNAVAILABLE"


def test_unfinished_messages_are_few_and_do_not_block_others(service: Service, address: str) -> None:
    """A call sends its message within a moment, or is one of eight of its client that may take longer."""
    stopped = threading.Event()
    with grpc.insecure_channel(address) as channel:
        calls = [unfinished(channel, stopped) for _ in range(20)]
        try:
            until(lambda: sum(call.done() for call in calls) == 12)
            refused = [call.exception() for call in calls if call.done()]
            assert {error.code() for error in refused} == {grpc.StatusCode.RESOURCE_EXHAUSTED}
            answer = triton.InferenceServerClient(address).infer("digits.calibrator", [logits_input(LOGITS)])
            np.testing.assert_array_equal(answer.as_numpy("probabilities"), calibrated(service, LOGITS))
        finally:
            stopped.set()
            for call in calls:
                call.cancel()


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (b"\x2a\x00" * 5000, "more than 4,000 inputs, outputs and parameters"),
        (b"\x2a\x7f", "cannot be parsed"),
        (b"\xff" * 30, "cannot be parsed"),
        (b"\x0a\x01\xff", "cannot be parsed"),
        (b"", "no model ''"),
    ],
)
def test_damaged_messages_are_refused(address: str, message: bytes, reason: str) -> None:
    with grpc.insecure_channel(address) as channel, pytest.raises(grpc.RpcError, match=reason) as caught:
        channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")(message)
    assert caught.value.code() in {grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND}


def test_health_and_reflection(address: str) -> None:
    with grpc.insecure_channel(address) as channel:
        check = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        assert check.status == health_pb2.HealthCheckResponse.SERVING
        reflected = ProtoReflectionDescriptorDatabase(channel)
        assert "inference.GRPCInferenceService" in reflected.get_services()
        file = reflected.FindFileContainingSymbol("inference.GRPCInferenceService")
        assert {message.name for message in file.message_type} >= {"ModelInferRequest", "InferParameter"}


def test_a_service_with_keys_requires_them(tmp_path: Path) -> None:
    port = free_port()
    with running(tmp_path, model="logits:10", grpc_port=port) as service:
        access: Any = service.state.admission.access
        access.is_required = True
        client = triton.InferenceServerClient(f"127.0.0.1:{port}")
        assert client.is_server_ready()
        with pytest.raises(InferenceServerException, match="has no API key"):
            client.infer("logits:10.calibrator", [logits_input(LOGITS)])
        with pytest.raises(InferenceServerException, match="not valid") as caught:
            client.infer(
                "logits:10.calibrator", [logits_input(LOGITS)], headers={"authorization": "Bearer x"}
            )
        assert "UNAUTHENTICATED" in str(caught.value.status())
        client.close()
        assert httpx.get(f"{service.url}/version", headers={"X-API-Key": "x"}).status_code == 401
        assert access._guesses == {"127.0.0.1": 2}
        refused = [("api-key-required", 1.0), ("invalid-api-key", 2.0)]
        value = service.state.telemetry.registry.get_sample_value
        assert [(name, value("boxcal_rejected_total", {"reason": name})) for name, _ in refused] == refused
        stopped = threading.Event()
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            error = unfinished(channel, stopped).exception(timeout=5)  # before its message is received
            stopped.set()
            assert error.code() is grpc.StatusCode.UNAUTHENTICATED
            with pytest.raises(grpc.RpcError, match="has no API key"):
                ProtoReflectionDescriptorDatabase(channel).get_services()
            check = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
            assert check.status == health_pb2.HealthCheckResponse.SERVING
        answer = httpx.post(f"{service.url}/v2/models/logits:10.calibrator/infer", json={"inputs": []})
        assert answer.status_code == 401
