"""The HTTP routes `/fit` and `/fits`; `receive` and `FitJobs` do the work."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Annotated, Any
from urllib.parse import urlencode

from fastapi import APIRouter, Depends, Path, Query, Request, Response, status
from fastapi.sse import EventSourceResponse

from boxcal.app.access.access import LoadedKey
from boxcal.app.access.routes import CurrentCaller, CurrentKey
from boxcal.app.fitting.fields import DECLARED
from boxcal.app.fitting.messages import BODY_FILE, BUDGET_SECONDS
from boxcal.app.fitting.server.jobs import FitJobs
from boxcal.app.fitting.server.upload_validation import receive
from boxcal.app.http.admission import TICKET, count_event_stream, while_valid
from boxcal.app.http.dependencies import Limit, OnlyDeclared, part_of_model
from boxcal.app.http.problem_documents import problems
from boxcal.app.http.problems import (
    CalibratorNotFound,
    CalibratorPruned,
    ConcurrencyLimited,
    DamagedArtifact,
    FitAlreadyOver,
    FitElsewhere,
    FitNotFound,
    FitQueueFull,
    ForeignCalibrator,
    InsufficientScope,
    InvalidParameter,
    InvalidUpload,
    MalformedBody,
    NotReady,
    RegistryFull,
    RegistryUnavailable,
    StorageFull,
    StorageUnavailable,
    UnknownMethod,
    UnknownUploadFormat,
    UnsupportedMediaType,
    UploadStalled,
    UploadTooLarge,
)
from boxcal.app.http.scopes import Scope
from boxcal.app.predict.routes import unless_disconnected
from boxcal.app.registry.records import ActivatePolicy
from boxcal.app.schemas.fits import ComparisonDocument, Fit, Fits
from boxcal.app.settings import limits

CurrentJobs = Annotated[FitJobs, part_of_model("fit_jobs")]
FitId = Annotated[str, Path(description="The fit's `id`.")]


FIELDS: dict[str, Any] = {
    "method": {"type": "string", "default": "auto", "description": "A calibration method, or `auto`."},
    "activate": {
        "type": "string",
        "enum": [policy.value for policy in ActivatePolicy],
        "default": ActivatePolicy.IF_BETTER.value,
        "description": "Whether to activate the new calibrator.",
    },
    "budget_seconds": {
        "type": "number",
        "exclusiveMinimum": 0,
        "maximum": 3600,
        "default": BUDGET_SECONDS,
        "description": "Processor seconds after which `auto` begins no further method.",
    },
    "scores": {
        "type": "string",
        "enum": ["logits", "probabilities", "percent"],
        "description": "What the scores are; default: as they are named, else logits.",
    },
    "label": {"type": "string", "default": "label", "description": "The column of the labels."},
    "group": {
        "type": "string",
        "description": "The column of the groups; default: `group`, if there is one.",
    },
    "ignore": {"type": "string", "description": "Columns of a table to leave out, separated by commas."},
    "labels_as": {
        "type": "string",
        "enum": ["index", "name"],
        "description": "What numbers among the labels are where numbers name the classes; default: names.",
    },
    "class_mix": {
        "type": "string",
        "enum": ["as_traffic", "resampled"],
        "description": "How the samples were drawn: with classes as frequent as among requests, or by class; "
        "weights then make classes as frequent as the logits expect.",
    },
}
FILE = {
    "type": "string",
    "format": "binary",
    "description": "`.npz` with `logits` or `probabilities` (N, K), `labels`, and optionally `features` "
    "(N, D) for the methods that read them; `.parquet`, `.arrow` or `.csv` with the column `label` and "
    "either `logits` (lists) or one column per class; `.json` with `logits` and `labels`; or a `.zip` of "
    "images, with one folder per class. Labels are class indices or names. Arrays, tables and documents may "
    "have `groups` (a column `group`): samples of one group, such as a patient or a video, share a fold. "
    "They may have `sample_weight`: how much each sample counts, at least 0. A model of features or texts "
    "also takes what it reads in place of logits: columns of its features or a column `text`, `.npz` with "
    "`features`, `.json` with `features` or `texts`.",
}
NPY_PARTS = ("logits", "probabilities", "labels", "features", "groups", "sample_weight")
ROWS = {"type": "array", "items": {"type": "array", "items": {"type": "number"}}}
GROUPS = {
    "type": "array",
    "items": {"anyOf": [{"type": "integer"}, {"type": "string"}]},
    "description": "Samples of one group, such as a patient or a video, share a fold.",
}
WEIGHTS = {
    "type": "array",
    "items": {"type": "number", "minimum": 0},
    "description": "How much each sample counts in fits, metrics and the gate.",
}
FEATURES = {
    "type": "array",
    "items": {"anyOf": [{"type": "array", "items": {}}, {"type": "object", "additionalProperties": True}]},
    "description": "In place of logits, rows for a model of features: lists, or objects by name. Beside "
    "logits, what the last layer reads (N, D), for the methods that read it.",
}
TEXTS = {
    "type": "array",
    "items": {"type": "string"},
    "description": "For a model of texts, in place of logits.",
}
CLASSES = {
    "type": "array",
    "items": {"type": "string"},
    "description": "The classes in the order of the columns; they are matched with those of the model.",
}
router = APIRouter(
    tags=["fits"], dependencies=[Depends(OnlyDeclared({"/fit": FIELDS, "/compare": DECLARED}))]
)

LABELS = {"type": "array", "items": {"anyOf": [{"type": "integer"}, {"type": "string"}]}}


EXAMPLE: dict[str, Any] = {"logits": [[9.1, 0.3, 0, 0, 0, 0, 0, 0, 6.5, 0.1]] * 2, "labels": ["9", "8"]}


def _body(fields: dict[str, Any], example: dict[str, Any]) -> dict[str, Any]:
    form = {
        "type": "object",
        "description": "A part `file`, or `.npy` parts `labels` and `logits` or `probabilities`.",
        "properties": {
            "file": FILE,
            **{name: {"type": "string", "format": "binary"} for name in NPY_PARTS},
            **fields,
        },
    }
    document = {
        "type": "object",
        "required": ["labels"],
        "additionalProperties": False,
        "properties": {
            "logits": ROWS,
            "probabilities": ROWS,
            "labels": LABELS,
            "features": FEATURES,
            "texts": TEXTS,
            "groups": GROUPS,
            "sample_weight": WEIGHTS,
            "classes": CLASSES,
            **fields,
        },
    }
    content = {
        "multipart/form-data": {"schema": form},
        "application/json": {"schema": document, "example": example},
    }
    return {"requestBody": {"required": True, "content": content}}


UPLOAD_PROBLEMS = (
    MalformedBody,
    UploadStalled,
    UploadTooLarge,
    UnsupportedMediaType,
    UnknownUploadFormat,
    InvalidUpload,
    InvalidParameter,
    UnknownMethod,
    FitQueueFull,
    NotReady,
    StorageFull,
    StorageUnavailable,
    RegistryUnavailable,
)


def check_policy(key: LoadedKey | None, policy: ActivatePolicy) -> None:
    """Refuse a fit that may activate its calibrator if the key of the request may not activate one."""
    if key is not None and policy is not ActivatePolicy.NEVER and Scope.ACTIVATE not in key.permits:
        raise InsufficientScope(
            f"The API key {key.record.id} does not have the scope activate: it may only start fits with "
            f"activate=never, not {policy.value}."
        )


@router.post(
    "/fit",
    status_code=status.HTTP_202_ACCEPTED,
    response_model_exclude_none=True,
    openapi_extra=_body(FIELDS, EXAMPLE | {"method": "ts"}),
    response_description="The fit is queued. The `Location` header is its URL.",
    responses={
        200: {"model": Fit, "description": "The fit ended within `wait` seconds."},
        **problems(*UPLOAD_PROBLEMS),
    },
)
async def start_fit(
    request: Request,
    response: Response,
    jobs: CurrentJobs,
    *,
    caller: CurrentCaller,
    key: CurrentKey,
    wait: Annotated[
        float,
        Query(
            ge=0,
            le=limits.LONGEST_WAIT_SECONDS,
            description="Maximum number of seconds to wait for the end of the fit.",
        ),
    ] = 0,
) -> Fit:
    """Fit a calibrator to validation data, evaluate it by cross-fitting, and activate it if it is better."""
    client = request.scope[TICKET].address
    async with jobs.reserve_slot(client) as folder:
        limit = limits.MAX_UPLOAD_BYTES
        await receive(request.headers, request.stream(), folder / BODY_FILE, limit)
        record = await jobs.submit(
            folder, request.headers["content-type"], caller, lambda policy: check_policy(key, policy)
        )
    if wait:
        record = await jobs.wait(record.id, wait)
    if record.state.is_final:
        response.status_code = status.HTTP_200_OK
    root_path = request.app.state.settings.root_path
    response.headers["Location"] = f"{root_path}/fits/{record.id}{_query(request)}"
    return Fit.model_validate(record)


def _query(request: Request) -> str:
    """Return the query string that names the model of a request, if it names one."""
    name = request.query_params.get("model")
    return "" if name is None else f"?{urlencode({'model': name})}"


@router.post(
    "/compare",
    openapi_extra=_body({name: FIELDS[name] for name in DECLARED}, EXAMPLE),
    responses=problems(
        *UPLOAD_PROBLEMS, CalibratorNotFound, CalibratorPruned, ForeignCalibrator, DamagedArtifact
    ),
)
async def compare(
    request: Request,
    jobs: CurrentJobs,
    versions: Annotated[
        list[Annotated[int, Query(ge=0, le=2**31 - 1)]],
        Query(max_length=8, description="Versions; the others are compared with the first one."),
    ] = [],  # noqa: B006 - FastAPI copies it
    methods: Annotated[
        list[str], Query(max_length=32, description="Methods, which are cross-fitted on the data.")
    ] = [],  # noqa: B006
) -> ComparisonDocument:
    """Evaluate versions, and methods, on one validation set; the differences are paired by sample."""
    if not versions and not methods:
        raise InvalidParameter("/compare needs `versions` or `methods` in the query string.")
    client = request.scope[TICKET].address
    chosen = await jobs.comparisons.find(list(dict.fromkeys(versions)), methods)
    async with jobs.reserve_slot(client) as folder:
        limit = limits.MAX_UPLOAD_BYTES
        await receive(request.headers, request.stream(), folder / BODY_FILE, limit)
        work = jobs.comparisons.compare(folder, request.headers["content-type"], chosen, methods)
        return ComparisonDocument.model_validate(await unless_disconnected(request, work))


@router.get(
    "/fits", response_model_exclude_none=True, responses=problems(InvalidParameter, RegistryUnavailable)
)
async def list_fits(
    jobs: CurrentJobs,
    limit: Limit = 100,
    before_fit: Annotated[str | None, Query(description="Only fits older than the fit with this id.")] = None,
) -> Fits:
    """List fits, newest first."""
    return Fits(fits=tuple(map(Fit.model_validate, await jobs.list(limit, before_fit))))


@router.get(
    "/fits/{fit_id}", response_model_exclude_none=True, responses=problems(FitNotFound, RegistryUnavailable)
)
async def get_fit(fit_id: FitId, jobs: CurrentJobs) -> Fit:
    """Return the state of a fit."""
    return Fit.model_validate(await jobs.get(fit_id))


@router.delete(
    "/fits/{fit_id}",
    response_model_exclude_none=True,
    responses=problems(FitNotFound, FitAlreadyOver, FitElsewhere, RegistryUnavailable, RegistryFull),
)
async def cancel_fit(fit_id: FitId, jobs: CurrentJobs, caller: CurrentCaller) -> Fit:
    """Cancel a queued or running fit."""
    return Fit.model_validate(await jobs.cancel(fit_id, caller))


async def known_fit(fit_id: FitId, jobs: CurrentJobs) -> str:
    """Refuse an unknown fit before a stream begins."""
    await jobs.get(fit_id)
    return fit_id


@router.get(
    "/fits/{fit_id}/events",
    response_class=EventSourceResponse,
    response_description="Server-sent events; the `data` of each event is a fit.",
    response_model_exclude_none=True,
    responses=problems(FitNotFound, RegistryUnavailable, ConcurrencyLimited),
    dependencies=[Depends(count_event_stream)],
)
async def follow_fit(
    request: Request, fit_id: Annotated[str, Depends(known_fit)], jobs: CurrentJobs
) -> AsyncIterator[Fit]:
    """Stream the state of a fit, now and after every change, until it ends."""
    async for record in while_valid(request, jobs.watch(fit_id)):
        yield Fit.model_validate(record)
