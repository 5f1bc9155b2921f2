"""The Open Inference Protocol over gRPC, in the same process and through the same pipeline as HTTP.

Needs the extra `grpc`; listens if `BOXCAL_GRPC_PORT` is set.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import numpy as np
from google.protobuf import descriptor_pool
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from boxcal.app.http.dependencies import ServiceState
from boxcal.app.http.limits import descriptor_limit
from boxcal.app.http.problems import InternalError, InvalidInput, MalformedBody, RequestTooLarge
from boxcal.app.http.protocol import IDLE_SECONDS
from boxcal.app.predict.bodies import unblocked
from boxcal.app.protocols.grpc import inference_pb2
from boxcal.app.protocols.grpc.admission import SERVICE, Interceptor, keep_shares
from boxcal.app.protocols.v2 import routes
from boxcal.app.protocols.v2.inference import (
    Answered,
    InferenceRequest,
    check_input_parameters,
    class_count,
)
from boxcal.app.protocols.v2.tensors import (
    BYTES,
    MAX_DIMENSIONS,
    check_range,
    datatype_of,
    from_binary,
    read_shape,
    to_binary,
)
from boxcal.app.settings import limits

logger = logging.getLogger("boxcal")

CONTENTS = {
    "BOOL": "bool_contents",
    **{f"INT{size}": "int_contents" for size in (8, 16, 32)},
    "INT64": "int64_contents",
    **{f"UINT{size}": "uint_contents" for size in (8, 16, 32)},
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    BYTES: "bytes_contents",
}
MAX_CALLS = 1000
"""Calls in progress, health watches included."""
PING_SECONDS = 5.0
"""Least time between two pings of a client; gRPC closes connections that ping more often. Clients send one
every 10 s at most."""
HANDSHAKE_SECONDS = 5.0
"""For the first bytes of a connection, which must be those of HTTP/2."""
ALIVE_SECONDS = 60.0
"""Without a sign of life for so long, a connection is asked for one."""
MOST_ANSWER_BYTES = 2 * limits.MAX_MESSAGE_BYTES
"""gRPC copies an answer on the event loop."""
NUMBERS_AT_ONCE = 2**16
"""Typed numbers that are read in one call, for which no other thread runs: 5 ms."""
Handler = Callable[[Any, Any], Awaitable[Any]]


class Inference:
    def __init__(self, state: ServiceState) -> None:
        self._state = state

    def handlers(self) -> dict[str, grpc.RpcMethodHandler]:
        """Return the handler of each method."""
        methods: dict[str, Handler] = {
            "ServerLive": self.server_live,
            "ServerReady": self.server_ready,
            "ModelReady": self.model_ready,
            "ServerMetadata": self.server_metadata,
            "ModelMetadata": self.model_metadata,
            "ModelInfer": self.model_infer,
            "RepositoryIndex": self.repository_index,
            "ModelConfig": self.model_config,
            "ModelStatistics": self.model_statistics,
        }
        return {
            name: grpc.unary_unary_rpc_method_handler(
                method,
                request_deserializer=getattr(inference_pb2, f"{name}Request").FromString,
                response_serializer=getattr(inference_pb2, f"{name}Response").SerializeToString,
            )
            for name, method in methods.items()
        }

    async def server_live(self, request: Any, context: Any) -> Any:
        """Return true while the process runs."""
        return inference_pb2.ServerLiveResponse(live=True)

    async def server_ready(self, request: Any, context: Any) -> Any:
        """Return whether the service can predict."""
        return inference_pb2.ServerReadyResponse(ready=not self._state.has_failed())

    async def model_ready(self, request: Any, context: Any) -> Any:
        """Return whether a version of a model can predict."""
        model = self._state.v2_model(request.name)
        known = not request.version or request.version in await routes.model_versions(model)
        return inference_pb2.ModelReadyResponse(ready=known and not self._state.has_failed())

    async def server_metadata(self, request: Any, context: Any) -> Any:
        return inference_pb2.ServerMetadataResponse(**await routes.server_metadata())

    async def model_metadata(self, request: Any, context: Any) -> Any:
        """Describe a model, or one of its versions."""
        found = await routes.model_metadata(request.name, self._state, request.version)
        return inference_pb2.ModelMetadataResponse(**found)

    async def repository_index(self, request: Any, context: Any) -> Any:
        return inference_pb2.RepositoryIndexResponse(models=await routes.repository_index(self._state))

    async def model_config(self, request: Any, context: Any) -> Any:
        """Describe a model as Triton does."""
        config = await routes.model_config(request.name, self._state, request.version)
        return inference_pb2.ModelConfigResponse(config=config)

    async def model_statistics(self, request: Any, context: Any) -> Any:
        """Return how much of one model or of all has been answered."""
        found = await routes.model_statistics(self._state, request.name, request.version)
        return inference_pb2.ModelStatisticsResponse(**found)

    async def model_infer(self, request: Any, context: Any) -> Any:
        model = self._state.v2_model(request.model_name).v2
        parsed, copied = _sent_sizes(request)
        asked = await unblocked(parsed, read_request, request, copied=copied)
        answered = await model.infer(asked)
        least = sum(array.nbytes for _, array in answered.outputs)
        if least > MOST_ANSWER_BYTES:
            raise RequestTooLarge(
                f"The answer has {least:,} bytes or more; the limit is {MOST_ANSWER_BYTES:,}. Ask for fewer."
            )
        texts = sum(8 * array.nbytes for _, array in answered.outputs if array.dtype.kind == "O")
        return await unblocked(texts, _response, request.id, answered, copied=least)


def _sent_sizes(request: Any) -> tuple[int, int]:
    """Count bytes that are parsed, eight for each typed value, and those of raw numbers."""
    typed = (values for one in request.inputs for _, values in one.contents.ListFields())
    raw = sum(map(len, request.raw_input_contents))
    has_texts = any(one.datatype == BYTES for one in request.inputs)
    return 8 * sum(map(len, typed)) + raw * has_texts, raw


def _response(identity: str, answered: Answered) -> Any:
    response = inference_pb2.ModelInferResponse(
        model_name=answered.model, model_version=answered.version, id=identity
    )
    response.parameters["bounds_relaxed"].bool_param = answered.relaxed
    for name, array in answered.outputs:
        response.outputs.add(name=name, datatype=datatype_of(array), shape=array.shape)
        response.raw_output_contents.append(to_binary(array))
    return response


def read_request(request: Any) -> InferenceRequest:
    """Read a request and its tensors, of which all are raw or all are typed contents."""
    raw = request.raw_input_contents
    if raw and len(raw) != len(request.inputs):
        raise MalformedBody(f"The request has {len(request.inputs)} inputs and {len(raw)} raw contents.")
    typed = [one.name for one in request.inputs if one.contents.ListFields()]
    if raw and typed:
        raise MalformedBody(f"The input {typed[0]!r:.100} has raw contents and typed ones.")
    inputs = {}
    for position, one in enumerate(request.inputs):
        check_input_parameters(one.name, one.parameters)
        shape = read_shape(one.name, list(one.shape[: MAX_DIMENSIONS + 1]))
        array = from_binary(one.name, one.datatype, shape, raw[position]) if raw else _typed(one, shape)
        if one.name in inputs:
            raise InvalidInput(f"The request has two inputs {one.name!r:.100}.")
        inputs[one.name] = array
    outputs = []
    for wanted in request.outputs:
        options = {name: _value(parameter) for name, parameter in wanted.parameters.items()}
        outputs.append((wanted.name, class_count(options.get("classification", 0))))
    parameters = {name: _value(parameter) for name, parameter in request.parameters.items()}
    return InferenceRequest(request.model_name, request.model_version, inputs, outputs, parameters)


class HealthChecks(health.aio.HealthServicer):  # type: ignore[misc]  # grpc has no types
    """The standard health service, of the server and its one service, with `List`."""

    names = ("", SERVICE)

    async def List(self, request: Any, context: Any) -> Any:  # noqa: N802
        """Return the status of every name."""
        requests = {name: health_pb2.HealthCheckRequest(service=name) for name in self.names}
        statuses = {name: await self.Check(one, context) for name, one in requests.items()}
        return health_pb2.HealthListResponse(statuses=statuses)


@asynccontextmanager
async def serving(state: ServiceState, host: str, port: int) -> AsyncIterator[int]:
    """Serve until the block ends; gives the port. `host`: an address of IPv6 in brackets."""
    most_connections = descriptor_limit() // 4
    options = [
        ("grpc.max_receive_message_length", limits.MAX_MESSAGE_BYTES),
        ("grpc.max_send_message_length", -1),
        ("grpc.http2.bdp_probe", 0),  # else the window of a connection grows, also of a refused call
        ("grpc.http2.min_ping_interval_without_data_ms", round(1000 * PING_SECONDS)),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.keepalive_time_ms", round(1000 * ALIVE_SECONDS)),
        ("grpc.server_handshake_timeout_ms", round(1000 * HANDSHAKE_SECONDS)),
        ("grpc.max_connection_idle_ms", round(1000 * IDLE_SECONDS)),
        ("grpc.max_allowed_incoming_connections", most_connections),
    ]
    interceptor = Interceptor(state.admission, state.telemetry, state.ending)
    # The processes of one service listen on the same port; another program that listens there is an error.
    server = grpc.aio.server(
        interceptors=[interceptor],
        options=[*options, ("grpc.so_reuseport", int(state.is_shared))],
        maximum_concurrent_rpcs=MAX_CALLS,
    )
    inference = Inference(state)
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(SERVICE, inference.handlers())])
    checks = HealthChecks()
    for name in checks.names:
        await checks.set(name, health_pb2.HealthCheckResponse.SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(checks, server)
    names = (SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME)
    reflection.enable_server_reflection(names, server, pool=_Pools())
    try:
        bound = server.add_insecure_port(f"{host}:{port}")
    except RuntimeError as error:
        raise InternalError(f"gRPC cannot listen on {host}:{port}: {error}") from error
    interceptor.readers.port = bound
    await server.start()
    logger.info("gRPC on %s:%d", host, bound)
    shares = asyncio.create_task(keep_shares(most_connections, bound))

    async def drain() -> None:
        """Once the service ends, report it, accept no calls, and finish those in progress, beside HTTP."""
        await state.ending.wait()
        await asyncio.gather(checks.enter_graceful_shutdown(), server.stop(limits.SHUTDOWN_SECONDS))

    draining = asyncio.create_task(drain())
    try:
        yield bound
    finally:
        shares.cancel()
        state.ending.set()
        await draining


class _Pools:
    """Descriptors of this service and of the others, for reflection."""

    def __getattr__(self, name: str) -> Any:
        own, others = getattr(inference_pb2.DESCRIPTOR.pool, name), getattr(descriptor_pool.Default(), name)

        def find(*arguments: Any) -> Any:
            try:
                return own(*arguments)
            except KeyError:
                return others(*arguments)

        return find


def _typed(one: Any, shape: tuple[int, ...]) -> Any:
    member = CONTENTS.get(one.datatype)
    if member is None:
        raise InvalidInput(
            f"The input {one.name!r:.100} has the type {one.datatype!r:.50}; send it as raw contents."
        )
    values = getattr(one.contents, member)
    if len(values) != math.prod(shape):
        raise InvalidInput(
            f"The input {one.name!r:.100} of the shape {list(shape)} has {len(values)} values in `{member}`."
        )
    if one.datatype == BYTES:
        elements = np.empty(len(values), object)
        elements[:] = list(values)
        return elements.reshape(shape)
    dtype = {"F": np.float64, "B": np.bool_}.get(one.datatype[0], np.int64)
    if one.datatype == "UINT64":
        dtype = np.uint64
    array: Any = np.empty(len(values), dtype)
    for start in range(0, len(values), NUMBERS_AT_ONCE):
        some = values[start : start + NUMBERS_AT_ONCE]
        array[start : start + len(some)] = np.fromiter(some, dtype, len(some))
    check_range(one.name, one.datatype, array)
    return array.reshape(shape)


def _value(parameter: Any) -> Any:
    chosen = parameter.WhichOneof("parameter_choice")
    return None if chosen is None else getattr(parameter, chosen)
