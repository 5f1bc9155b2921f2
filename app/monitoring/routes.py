"""The routes of feedback and of the monitor; they translate, the writer and the monitor work.

The bodies that `POST /feedback` reads, for the OpenAPI document.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Header, Query, Request
from fastapi.sse import EventSourceResponse, ServerSentEvent

from boxcal.app.fitting.server.jobs import FitJobs
from boxcal.app.http.admission import count_event_stream
from boxcal.app.http.dependencies import Limit, part_of_model
from boxcal.app.http.problem_documents import problems
from boxcal.app.http.problems import (
    BodyTooLarge,
    ConcurrencyLimited,
    InvalidParameter,
    MalformedBody,
    NotReady,
    QueueFull,
    RegistryUnavailable,
    StorageFull,
    StorageUnavailable,
    UnsupportedMediaType,
    UploadTooLarge,
)
from boxcal.app.monitoring.events import StoredEvent
from boxcal.app.monitoring.items import ItemReader
from boxcal.app.monitoring.monitor import Monitor
from boxcal.app.monitoring.writer import FeedbackWriter
from boxcal.app.observability.telemetry import Telemetry
from boxcal.app.predict.bodies import JSON, header, json_object, read_body, read_json, unblocked
from boxcal.app.predict.pipeline import Pipeline
from boxcal.app.registry.store import Registry
from boxcal.app.schemas.monitoring import (
    AcknowledgeRequest,
    Feedback,
    FeedbackProblem,
    MonitorEvent,
    MonitorState,
    RefitDecisions,
)
from boxcal.app.settings import limits

CSV, PARQUET = "text/csv", "application/vnd.apache.parquet"
TABLES = (CSV, PARQUET)

LABEL = {
    "anyOf": [{"type": "string"}, {"type": "integer", "minimum": 0}],
    "description": "Name or index of the true class.",
}
PROPENSITY = {
    "type": ["number", "null"],
    "exclusiveMinimum": 0,
    "maximum": 1,
    "description": "Probability with which this prediction was chosen to be labelled.",
}
SOURCE = {"type": ["string", "null"], "description": "Who or what labelled it."}
ITEMS = {
    "type": "array",
    "minItems": 1,
    "maxItems": limits.MAX_LABELS,
    "items": {
        "type": "object",
        "required": ["label"],
        "properties": {
            "id": {"type": "string", "description": "Of the prediction."},
            "label": LABEL,
            "propensity": PROPENSITY,
            "source": SOURCE,
            "logits": {
                "type": "array",
                "items": {"type": "number"},
                "description": "K logits of a prediction that this service did not make; instead of `id`.",
            },
            "key": {"type": "string", "description": "Identifies an item with `logits`."},
        },
    },
}
COLUMNS = "Columns with the names of the members of an item."
UNKNOWN_ID = "01936d8f2b7c4d0e9a5f6b1c2d3e4f50"
EXAMPLE = {
    "items": [
        {"id": UNKNOWN_ID, "label": "9"},
        {"logits": [9.1, 0.3, 0, 0, 0, 0, 0, 0, 6.5, 0.1], "key": "order-1", "label": 0},
    ]
}
BODY: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            JSON: {
                "schema": {
                    "type": "object",
                    "required": ["items"],
                    "additionalProperties": False,
                    "properties": {"items": ITEMS},
                },
                "example": EXAMPLE,
            },
            CSV: {
                "schema": {"type": "string", "description": COLUMNS},
                "example": f"id,label\n{UNKNOWN_ID},9\n",
            },
            PARQUET: {"schema": {"type": "string", "format": "binary", "description": COLUMNS}},
        },
    }
}


CurrentRegistry = Annotated[Registry, part_of_model("registry")]
CurrentMonitor = Annotated[Monitor, part_of_model("monitor")]


router = APIRouter(tags=["feedback"])
SHOWN_PROBLEMS = 100


@router.post(
    "/feedback",
    openapi_extra=BODY,
    responses=problems(
        MalformedBody,
        BodyTooLarge,
        UploadTooLarge,
        UnsupportedMediaType,
        InvalidParameter,
        QueueFull,
        NotReady,
        StorageFull,
        StorageUnavailable,
        RegistryUnavailable,
    ),
)
async def give_feedback(
    request: Request,
    writer: Annotated[FeedbackWriter, part_of_model("feedback")],
    pipeline: Annotated[Pipeline, part_of_model("pipeline")],
    jobs: Annotated[FitJobs, part_of_model("fit_jobs")],
    telemetry: Annotated[Telemetry, part_of_model("telemetry")],
) -> Feedback:
    """Store the true labels of earlier predictions, or logits with labels; sending them twice is harmless."""
    kind = header(request, b"content-type").partition(";")[0].strip().lower()
    if kind not in (JSON, *TABLES):
        sent = f"{kind!r:.100}" if kind else "missing"
        accepted = ", ".join((JSON, *TABLES))
        raise UnsupportedMediaType(f"The content type is {sent}; this route accepts {accepted}.")
    reader = ItemReader(pipeline.labels)
    if kind == JSON:
        body = await read_json(request, TABLES)
        await unblocked(len(body), _read, body, reader)
    else:
        await jobs.checks.read_labels(await read_body(request), reader.add)
    outcome = await writer.label(reader.found)
    outcome.problems = sorted([*outcome.problems, *reader.problems], key=lambda problem: problem.index)
    for result in ("accepted", "duplicates", "conflicts"):
        telemetry.feedback(result, getattr(outcome, result))
    for reason in ("unknown", "expired", "malformed"):
        telemetry.feedback(reason, outcome.count(reason))
    return Feedback(
        seq=outcome.seq,
        accepted=outcome.accepted,
        duplicates=outcome.duplicates,
        conflicts=outcome.conflicts,
        unknown=outcome.count("unknown"),
        expired=outcome.count("expired"),
        malformed=outcome.count("malformed"),
        problems=tuple(map(FeedbackProblem.model_validate, outcome.problems[:SHOWN_PROBLEMS])),
    )


def _read(body: bytes, reader: ItemReader) -> None:
    shape = ' Write {"items": [{"id": "...", "label": "..."}]}.'
    reader.add(json_object(body, ("items",), shape).get("items"))


@router.get("/monitor", response_model_exclude_none=True, responses=problems(RegistryUnavailable))
async def get_monitor(registry: CurrentRegistry, monitor: CurrentMonitor) -> MonitorState:
    """Return the alarms, the diagnosis, the metrics and the expected accuracy of the active calibrator."""
    return MonitorState.model_validate(await registry.run(monitor.current))


@router.post(
    "/monitor/acknowledge",
    response_model_exclude_none=True,
    responses=problems(MalformedBody, BodyTooLarge, InvalidParameter, RegistryUnavailable),
)
async def acknowledge(
    registry: CurrentRegistry, monitor: CurrentMonitor, request: AcknowledgeRequest | None = None
) -> MonitorState:
    """Acknowledge the alarms: the test begins anew, and a proposal is declined."""
    note = None if request is None else request.note
    if note is not None and "\0" in note:
        raise InvalidParameter("note has a NUL character.")
    await registry.run(monitor.acknowledge, note)
    monitor.publish()
    return MonitorState.model_validate(await registry.run(monitor.current))


@router.get(
    "/monitor/events",
    response_class=EventSourceResponse,
    response_description="Server-sent events; the `data` of each event is a decision as in `GET /refits`.",
    responses=problems(InvalidParameter, RegistryUnavailable, ConcurrencyLimited),
    dependencies=[Depends(count_event_stream)],
)
async def follow_monitor(
    monitor: CurrentMonitor,
    last_event_id: Annotated[
        str | None,
        Header(pattern=r"^\d{1,9}$", description="Continue behind this event; default: the newest."),
    ] = None,
) -> AsyncIterator[ServerSentEvent]:
    """Stream alarms, refits and activations as they are recorded."""
    last = int(last_event_id) if last_event_id is not None else None
    yield ServerSentEvent(comment="open")  # sends the head of the response before there is an event
    with suppress(RegistryUnavailable):  # the client reconnects and continues
        async for event in monitor.follow(last):
            yield ServerSentEvent(data=decision(event), event=event.kind, id=str(event.id))


def decision(event: StoredEvent) -> MonitorEvent:
    """Describe an event of the monitor."""
    return MonitorEvent(id=event.id, kind=event.kind, created_at=event.created_at, **event.document)


@router.get("/refits", responses=problems(InvalidParameter, RegistryUnavailable))
async def list_refits(
    registry: CurrentRegistry,
    monitor: CurrentMonitor,
    limit: Limit = 100,
    before_event: Annotated[
        int | None, Query(ge=0, le=2**31 - 1, description="Only decisions older than this one.")
    ] = None,
) -> RefitDecisions:
    """List what the monitor decided about alarms, refits and activations, with its evidence."""
    found = await registry.run(monitor.events.newest, limit, before_event)
    return RefitDecisions(decisions=tuple(decision(event) for event in found))
