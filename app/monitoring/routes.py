"""The routes of feedback and of the monitor, and what `POST /feedback` reads.

They translate; the writer and the monitor work. An invalid item never stops the others.
"""

from __future__ import annotations

import hashlib
import reprlib
import sys
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Annotated, Any

import numpy as np
from fastapi import APIRouter, Depends, Header, Query, Request
from fastapi.sse import EventSourceResponse, ServerSentEvent

from boxcal.app.fitting.server.jobs import FitJobs
from boxcal.app.http.admission import count_event_stream, while_valid
from boxcal.app.http.dependencies import Limit, OnlyDeclared, part_of_model
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
from boxcal.app.monitoring.monitor import Monitor
from boxcal.app.monitoring.records import ItemProblem, Label
from boxcal.app.monitoring.writer import FeedbackWriter
from boxcal.app.observability.telemetry import Telemetry
from boxcal.app.predict.bodies import JSON, header, json_object, read_body, read_json, unblocked
from boxcal.app.predict.options import Labels
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
from boxcal.calibrators.class_columns import clean
from boxcal.calibrators.monitoring.stored_logits import pack
from boxcal.calibrators.scores import integer_of

CSV, PARQUET = "text/csv", "application/vnd.apache.parquet"
TABLES = (CSV, PARQUET)

SMALLEST_PROPENSITY = 1e-6
"""Its reciprocal is a weight; squares of much larger ones overflow."""

LABEL = {
    "anyOf": [{"type": "string"}, {"type": "integer", "minimum": 0}],
    "description": "Name or index of the true class.",
}
PROPENSITY = {
    "type": ["number", "null"],
    "minimum": SMALLEST_PROPENSITY,
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

HINTED = 100
"""Problems whose unknown label is compared with all that are known, which takes milliseconds."""
LONGEST_SOURCE = 64
LONGEST_KEY = 200
LARGEST = sys.float_info.max  # compared with integers exactly, however many digits they have
MEMBERS = {"id", "label", "propensity", "source", "logits", "key"}


class _Malformed(Exception):
    """What is wrong with one item."""


class ItemReader:
    """Reads items, all at once or some at a time: `found` are the labels, `problems` what is wrong."""

    def __init__(self, labels: Labels) -> None:
        self._labels = labels
        self._count = 0
        self.found: list[Label] = []
        self.problems: list[ItemProblem] = []

    def add(self, items: Any) -> None:
        """Read the next items, or the member `items` of a JSON body."""
        if not isinstance(items, list) or not items:
            raise InvalidParameter("items must be a list of at least one object.")
        if self._count + len(items) > limits.MAX_LABELS:
            raise InvalidParameter(
                f"The request has more than {limits.MAX_LABELS:,} items, which is the limit."
            )
        for index, item in enumerate(items, self._count):
            try:
                self.found.append(_item(index, item, self._labels, hints=len(self.problems) < HINTED))
            except _Malformed as error:
                sent = item.get("id") if isinstance(item, dict) else None
                shown = sent[:64] if isinstance(sent, str) else None
                self.problems.append(ItemProblem(index, shown, "malformed", f"items[{index}]: {error}"))
        self._count += len(items)


def _item(index: int, item: Any, labels: Labels, *, hints: bool) -> Label:
    if not isinstance(item, dict):
        raise _Malformed(f"{reprlib.repr(item)} is no object")
    if unknown := item.keys() - MEMBERS:
        raise _Malformed(
            f"there is no member {min(unknown)!r:.100}; an item takes {', '.join(sorted(MEMBERS))}"
        )
    if ("id" in item) == ("key" in item) or ("logits" in item) != ("key" in item):
        raise _Malformed("it needs either `id`, or `logits` and `key`")
    label = _label(item.get("label"), labels, hints=hints)
    propensity, source = item.get("propensity"), item.get("source")
    if propensity is not None and not (
        isinstance(propensity, int | float)
        and not isinstance(propensity, bool)
        and SMALLEST_PROPENSITY <= propensity <= 1
    ):
        raise _Malformed(
            f"propensity is {propensity!r:.100}; it is a probability of at least {SMALLEST_PROPENSITY:g}"
        )
    if source is not None and not _is_text(source, LONGEST_SOURCE):
        raise _Malformed(
            f"source is {source!r:.100}; it is printable text of up to {LONGEST_SOURCE} characters"
        )
    if "id" in item:
        if not isinstance(item["id"], str):
            raise _Malformed(f"id is {item['id']!r:.100}; it is text")
        return Label(index, item["id"], label, propensity, source)
    if not _is_text(item["key"], LONGEST_KEY):
        raise _Malformed(
            f"key is {item['key']!r:.100}; it is printable text of up to {LONGEST_KEY} characters"
        )
    digest = "key-" + hashlib.sha256(item["key"].encode()).hexdigest()[:32]
    return Label(index, digest, label, propensity, source, _logits(item["logits"], len(labels)))


def _label(value: Any, labels: Labels, *, hints: bool) -> int:
    if isinstance(value, str):
        for name in (value, clean(value)):
            if name in labels.index:
                return labels.index[name]
    number = integer_of(value) if isinstance(value, str) else value
    if number is None and isinstance(value, str):
        hint = labels.hint(value) if hints else ""
        raise _Malformed(f"label is {value!r:.100}, a class the model does not have{hint}")
    if isinstance(number, float) and number.is_integer():
        number = int(number)
    if type(number) is int and number in labels.by_number:
        return labels.by_number[number]
    which = (
        "the name of a class" if labels.named_by_integers else "the name of a class, or an index from 0 to"
    )
    shown = "" if labels.named_by_integers else f" {len(labels) - 1}"
    raise _Malformed(f"label is {value!r:.100}; it is {which}{shown}")


def _is_text(value: Any, longest: int) -> bool:
    return isinstance(value, str) and 0 < len(value) <= longest and value.isprintable()


def _logits(values: Any, num_classes: int) -> bytes:
    if not isinstance(values, list) or len(values) != num_classes:
        raise _Malformed(f"logits must be a list of {num_classes} numbers")
    for position, value in enumerate(values):
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= LARGEST:
            raise _Malformed(f"logits[{position}] is {value!r:.100}; logits are finite numbers")
    return pack(np.array([values], np.float64)).tobytes()


CurrentRegistry = Annotated[Registry, part_of_model("registry")]
CurrentMonitor = Annotated[Monitor, part_of_model("monitor")]


router = APIRouter(tags=["feedback"], dependencies=[Depends(OnlyDeclared())])
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
    request: Request,
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
        async for event in while_valid(request, monitor.follow(last)):
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
