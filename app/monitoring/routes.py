"""The routes of feedback and of the monitor; they translate, the writer and the monitor work."""

from __future__ import annotations

from fastapi import APIRouter, Request

from boxcal.app.errors import (
    BodyTooLarge,
    InvalidParameter,
    MalformedBody,
    QueueFull,
    UnsupportedMediaType,
    problems,
)
from boxcal.app.monitoring.items import Read, read_csv, read_items
from boxcal.app.monitoring.schemas import BODY, CSV, Feedback
from boxcal.app.predict.bodies import JSON, header, json_object, read_body, unblocked
from boxcal.app.predict.options import Labels
from boxcal.app.registry.errors import RegistryUnavailable
from boxcal.app.state import CurrentState

router = APIRouter(tags=["feedback"])


@router.post(
    "/feedback",
    openapi_extra=BODY,
    responses=problems(
        MalformedBody, BodyTooLarge, UnsupportedMediaType, InvalidParameter, QueueFull, RegistryUnavailable
    ),
)
async def give_feedback(request: Request, state: CurrentState) -> Feedback:
    """Store the true labels of earlier predictions, or logits with labels; sending them twice is harmless."""
    kind = header(request, b"content-type").partition(";")[0].strip().lower()
    if kind not in (JSON, CSV):
        sent = f"{kind!r:.100}" if kind else "missing"
        raise UnsupportedMediaType(f"The content type is {sent}; this route accepts {JSON}, {CSV}.")
    body = await read_body(request)
    labels, malformed = await unblocked(len(body), _read, kind, body, state.pipeline.labels)
    outcome = await state.feedback.label(labels)
    outcome.problems = sorted([*outcome.problems, *malformed], key=lambda problem: problem.index)
    for result in ("accepted", "duplicates", "conflicts"):
        state.telemetry.feedback(result, getattr(outcome, result))
    for reason in ("unknown", "expired", "malformed"):
        state.telemetry.feedback(reason, outcome.count(reason))
    return Feedback.of(outcome)


def _read(kind: str, body: bytes, labels: Labels) -> Read:
    if kind == CSV:
        return read_csv(body, labels)
    return read_items(json_object(body, ("items",)).get("items"), labels)
