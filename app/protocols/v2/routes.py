"""The routes of the Open Inference Protocol, version 2, with its binary tensor and classification extensions.

Clients send JSON with any content type or none, so that the body alone decides how it is read.
"""

from __future__ import annotations

from dataclasses import asdict
from importlib.metadata import version as version_of
from typing import Any

from fastapi import APIRouter

from boxcal.app.http.dependencies import (
    TELEMETRY,
    CurrentState,
    DirectRequest,
    PlainRoute,
    ServiceState,
    state_of,
)
from boxcal.app.http.problem_documents import problems
from boxcal.app.http.problems import (
    BodyTooLarge,
    CalibratorNotFound,
    DeadlineExceeded,
    InvalidInput,
    InvalidParameter,
    MalformedBody,
    ModelNotFound,
    NotReady,
    QueueFull,
    RegistryUnavailable,
    RequestTooLarge,
    UnsupportedMediaType,
)
from boxcal.app.predict.bodies import (
    QUICK_BYTES,
    header,
    read_json,
    read_tensors,
    unblocked,
)
from boxcal.app.predict.routes import unless_disconnected
from boxcal.app.protocols.v2.documents import (
    BINARY_TENSORS,
    all_binary,
    parsed_size,
    read_request,
    write_response,
)
from boxcal.app.protocols.v2.inference import CALIBRATOR, TensorDescription, check_query
from boxcal.app.protocols.v2.tensors import BYTES

# The protocol has its own OpenAPI document, and its own clients.
router = APIRouter(tags=["v2"], include_in_schema=False)

EXTENSIONS = ("binary_tensor_data", "classification", "model_configuration", "model_repository", "statistics")
HEADER_LENGTH = b"inference-header-content-length"
JSON, BINARY = "application/json", "application/octet-stream"
LONGEST_NUMBER = 9
"""Digits of a length of JSON that is read."""
INFER_ERRORS = (
    MalformedBody,
    ModelNotFound,
    BodyTooLarge,
    RequestTooLarge,
    UnsupportedMediaType,
    InvalidInput,
    InvalidParameter,
    QueueFull,
    NotReady,
    DeadlineExceeded,
)


@router.get("/v2", responses=problems())
async def server_metadata() -> dict[str, Any]:
    """Describe the server."""
    return {"name": "boxcal", "version": version_of("boxcal"), "extensions": EXTENSIONS}


@router.get("/v2/health/live", responses=problems())
async def live() -> dict[str, bool]:
    """Return true while the process runs."""
    return {"live": True}


@router.get("/v2/health/ready", responses=problems(NotReady))
async def ready(state: CurrentState) -> dict[str, bool]:
    """Return true if the service can predict."""
    state.check_ready()
    return {"ready": True}


@router.get("/v2/models/stats", responses=problems(ModelNotFound))
@router.get("/v2/models/{model}/stats", responses=problems(ModelNotFound))
@router.get("/v2/models/{model}/versions/{version}/stats", responses=problems(ModelNotFound))
async def model_statistics(state: CurrentState, model: str = "", version: str = "") -> dict[str, Any]:
    """Return how much this process has answered with this protocol, of one model or of all."""
    if version:
        _check_version(model, version, await model_versions(state.v2_model(model)))
    return {"model_stats": [_statistics(name, version, state) for name in ([model] if model else state.v2)]}


def _statistics(model: str, version: str, state: ServiceState) -> dict[str, Any]:
    served = state.v2_model(model)
    counts = served.v2.counts
    success, fail = counts[model, "success"], counts[model, "fail"]
    return {
        "name": model,
        "version": version or str(served.active.current.version),
        "inference_count": counts[model, "samples"],
        "execution_count": success,
        "inference_stats": {
            "success": {"count": success, "ns": counts[model, "ns"]},
            "fail": {"count": fail, "ns": 0},
        },
    }


@router.get("/v2/models/{model}", responses=problems(ModelNotFound))
@router.get("/v2/models/{model}/versions/{version}", responses=problems(ModelNotFound))
async def model_metadata(model: str, state: CurrentState, version: str = "") -> dict[str, Any]:
    """Describe a model: its versions, which are those of its calibrators, its inputs and outputs."""
    served = state.v2_model(model)
    versions = await model_versions(served)
    _check_version(model, version, versions)
    return {
        "name": model,
        "versions": [version] if version else versions,
        "platform": "boxcal",
        "inputs": [asdict(one) for one in served.v2.inputs(model)],
        "outputs": [asdict(one) for one in served.v2.outputs()],
    }


@router.get("/v2/models/{model}/config", responses=problems(ModelNotFound))
@router.get("/v2/models/{model}/versions/{version}/config", responses=problems(ModelNotFound))
async def model_config(model: str, state: CurrentState, version: str = "") -> dict[str, Any]:
    """Describe a model as Triton does; its batch size is 0, so that the shapes have the batch dimension."""
    served = state.v2_model(model)
    if version:
        _check_version(model, version, await model_versions(served))
    return {
        "name": model,
        "platform": "boxcal",
        "backend": "boxcal",
        "max_batch_size": 0,
        "input": [_configured(one) for one in served.v2.inputs(model)],
        "output": [_configured(one) for one in served.v2.outputs()],
    }


def _configured(one: TensorDescription) -> dict[str, Any]:
    kind = "STRING" if one.datatype == BYTES else one.datatype
    return {"name": one.name, "data_type": f"TYPE_{kind}", "dims": one.shape}


@router.get("/v2/models/{model}/ready", responses=problems(ModelNotFound, NotReady))
@router.get("/v2/models/{model}/versions/{version}/ready", responses=problems(ModelNotFound, NotReady))
async def model_ready(model: str, state: CurrentState, version: str = "") -> dict[str, Any]:
    """Return true if a model can predict."""
    served = state.v2_model(model)
    if version:
        _check_version(model, version, await model_versions(served))
    state.check_ready()
    return {"name": model, "ready": True}


@router.post("/v2/repository/index", responses=problems())
async def repository_index(state: CurrentState) -> list[dict[str, str]]:
    """List the models with the active version of each."""
    return [
        {"name": name, "version": str(model.active.current.version), "state": "READY", "reason": ""}
        for name, model in state.v2.items()
    ]


async def infer(request: DirectRequest) -> None:
    """Answer one inference request."""
    state = state_of(request)
    model, version = request.path_params["model"], request.path_params.get("version", "")
    if request.scope["query_string"]:
        check_query(request.query_params)
    length = header(request, HEADER_LENGTH)
    if length.isascii() and length.isdecimal() and len(length) <= LONGEST_NUMBER:
        body: bytes | memoryview = await read_tensors(request, int(length))
    else:
        body = await read_json(request, [BINARY_TENSORS])
    asked, head = await unblocked(
        parsed_size(body, length), read_request, body, length, model, version, copied=len(body)
    )
    served = state.v2_model(model)
    if served.telemetry is not state.telemetry:
        request.scope[TELEMETRY] = served.telemetry
    work = served.v2.infer(asked)
    # Nothing is queued for a calibrator alone, so that a disconnect would free nothing.
    answered = await (work if model.endswith(CALIBRATOR) else unless_disconnected(request, work))
    size = sum(array.nbytes for _, array in answered.outputs)
    written = 0 if size > QUICK_BYTES and all_binary(answered, head) else size
    content, header_length = await unblocked(written, write_response, answered, head, copied=size)
    headers = [(HEADER_LENGTH, str(header_length).encode())] if header_length else []
    await request.reply(BINARY if header_length else JSON, content, headers)


infer_routes = tuple(
    PlainRoute(path, infer, include_in_schema=False, responses=problems(*INFER_ERRORS))
    for path in ("/v2/models/{model:path}/versions/{version}/infer", "/v2/models/{model:path}/infer")
)


async def model_versions(model: Any) -> list[str]:
    """List the versions of the calibrators of the backbone; only the active one if the registry is away."""
    active = model.active.current.version
    try:
        records = await model.registry.run(model.registry.list, 1000)
    except RegistryUnavailable:
        return [str(active)]
    own = {
        record.version
        for record in records
        if record.sha256 is not None and record.backbone == model.registry.backbone
    }
    return [str(version) for version in sorted({0, active, *own})]


def _check_version(model: str, version: str, versions: list[str]) -> None:
    if version and version not in versions:
        raise CalibratorNotFound(
            f"{model} has no version {version!r:.50}; it has {', '.join(versions[-20:])}."
        )
