"""The Open Inference Protocol, spoken by KServe's clients; answers are those of `/calibrate`."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, TypeVar

import grpc
import httpx
import numpy as np
import pytest
from kserve import InferenceGRPCClient, InferenceRESTClient, InferInput, InferRequest, RESTConfig
from kserve.protocol.infer_type import RequestedOutput

from tests.app.fitting.service import free_port
from tests.app.running import Service, running
from tests.v2.test_rest import LOGITS, calibrated

MODEL = "digits.calibrator"
T = TypeVar("T")


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with running(tmp_path_factory.mktemp("kserve"), grpc_port=free_port()) as service:
        yield service


def over_http(service: Service, work: Callable[[Any, str], Awaitable[T]]) -> T:
    async def run() -> T:
        async with InferenceRESTClient(RESTConfig(protocol="v2")) as client:
            return await work(client, service.url)

    return asyncio.run(run())


def over_grpc(service: Service, work: Callable[[Any], Awaitable[T]]) -> T:
    async def run() -> T:
        async with InferenceGRPCClient(f"127.0.0.1:{service.state.settings.grpc_port}") as client:
            return await work(client)

    return asyncio.run(run())


def ask(service: Service, request: InferRequest, path: str = MODEL) -> Any:
    return over_http(service, lambda client, url: client.infer(url, request, model_name=path))


def logits_request(*, binary: bool = True, more: Any = (), **members: Any) -> InferRequest:
    given = InferInput("logits", list(LOGITS.shape), "FP64")
    given.set_data_from_numpy(LOGITS, binary_data=binary)
    outputs = [RequestedOutput("probabilities", {"binary_data": binary})]
    return InferRequest(MODEL, [given, *more], request_outputs=outputs, **members)


def upper(value: float, *, binary: bool = True) -> InferInput:
    """Upper bounds as a tensor: over gRPC this client sends no fractions as parameters."""
    bounds = InferInput("upper", [10], "FP64")
    bounds.set_data_from_numpy(np.full(10, value), binary_data=binary)
    return bounds


@pytest.mark.parametrize("binary", [True, False])
def test_logits_bounds_and_versions(service: Service, binary: bool) -> None:
    request = logits_request(binary=binary, more=[upper(0.3, binary=binary)], request_id="7")
    answers = [ask(service, request, path) for path in (MODEL, f"{MODEL}/versions/0")]
    remote = logits_request(more=[upper(0.3)], request_id="7")
    answers.append(over_grpc(service, lambda client: client.infer(remote)))
    expected = calibrated(service, LOGITS, bounds={"upper": 0.3})
    for answer in answers:
        np.testing.assert_array_equal(answer.outputs[0].as_numpy(), expected)
        assert answer.id == "7"
    assert answers[-1].model_version == "0"  # over HTTP this client does not keep it


ERRORS: dict[str, tuple[str, int, str, dict[str, Any]]] = {
    "no model 'nothing'": ("nothing", 404, "NOT_FOUND", {}),
    "did you mean 'upper'": (MODEL, 422, "INVALID_ARGUMENT", {"parameters": {"uper": 1}}),
}


@pytest.mark.parametrize("message", ERRORS)
def test_errors_have_a_status_and_the_reason(service: Service, message: str) -> None:
    path, status, code, members = ERRORS[message]
    with pytest.raises(httpx.HTTPStatusError) as caught:
        ask(service, logits_request(**members), path)
    assert caught.value.response.status_code == status
    assert message in str(caught.value)  # shown, because the type of the answer is plain JSON
    request = logits_request(**members)
    request.model_name = path
    with pytest.raises(grpc.RpcError) as refused:
        over_grpc(service, lambda client: client.infer(request))
    assert refused.value.code().name == code
    assert message in refused.value.details()
