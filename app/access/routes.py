"""`GET /whoami` and `GET /audit`, and who sends the request, for the routes that change something."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Request
from pydantic import BaseModel, ConfigDict, Field

from boxcal.app.access.access import LoadedKey
from boxcal.app.http.admission import TICKET
from boxcal.app.http.dependencies import CurrentState, Limit, OnlyDeclared
from boxcal.app.http.problem_documents import problems
from boxcal.app.http.problems import InvalidParameter, RegistryUnavailable
from boxcal.app.http.scopes import Scope
from boxcal.app.registry.audit import Action, Caller, entries
from boxcal.app.registry.store import Registry

router = APIRouter(tags=["access"], dependencies=[Depends(OnlyDeclared())])

ANONYMOUS = "anonymous"


class Identity(BaseModel):
    """What the sender of the request may do."""

    key_required: bool = Field(description="Whether the service requires API keys.")
    key: str | None = Field(description="Id of the key; null without one.", examples=["6c1f0e5ab2d94c77"])
    name: str = Field(description="Name of the key, or `anonymous`.", examples=["ci"])
    scopes: list[Scope] = Field(description="What the key permits; `admin` permits everything.")
    expires_at: datetime | None = Field(
        description="When the key expires; null if it does not.", examples=["2027-01-01T00:00:00Z"]
    )


class AuditEntry(BaseModel):
    """One change."""

    model_config = ConfigDict(from_attributes=True)

    id: int = Field(examples=[17])
    at: datetime = Field(examples=["2026-11-21T03:00:00Z"])
    action: Action
    subject: str = Field(description="What was changed, such as `calibrator 3`.", examples=["calibrator 1"])
    name: str = Field(description="Name of the API key, or what else made the change.", examples=["ci"])
    key: str | None = Field(description="Id of the API key.", examples=["6c1f0e5ab2d94c77"])
    address: str = Field(
        description="Address from which the request came; empty for the service itself.",
        examples=["10.0.0.7"],
    )
    details: dict[str, Any] = Field(examples=[{"method": "ts"}])


class AuditLog(BaseModel):
    """Some entries of the audit log, newest first."""

    entries: list[AuditEntry]


async def current_key(request: Request) -> LoadedKey | None:
    """Return the key of a request; None where keys are not required."""
    key: LoadedKey | None = request.scope[TICKET].key
    return key


CurrentKey = Annotated[LoadedKey | None, Depends(current_key)]


async def current_caller(request: Request, key: CurrentKey) -> Caller:
    """Return who sends a request, for the audit log."""
    address = request.scope[TICKET].address
    return (
        Caller(ANONYMOUS, None, address) if key is None else Caller(key.record.name, key.record.id, address)
    )


CurrentCaller = Annotated[Caller, Depends(current_caller)]


@router.get("/whoami", responses=problems())
async def get_identity(key: CurrentKey) -> Identity:
    """Return the name and the scopes of the API key of this request."""
    if key is None:
        return Identity(key_required=False, key=None, name=ANONYMOUS, scopes=list(Scope), expires_at=None)
    record = key.record
    return Identity(
        key_required=True,
        key=record.id,
        name=record.name,
        scopes=[scope for scope in Scope if scope in key.permits],
        expires_at=record.expires_at,
    )


@router.get("/audit", responses=problems(InvalidParameter, RegistryUnavailable))
async def list_audit(
    state: CurrentState,
    limit: Limit = 100,
    before_entry: Annotated[
        int | None, Query(ge=1, le=2**31 - 1, description="Only entries older than the one with this id.")
    ] = None,
) -> AuditLog:
    """List who fitted, activated and rolled back calibrators and changed keys, newest first."""
    registry: Registry = state.default.registry  # those of all models share one audit log
    found = await registry.run(entries, registry.database, limit, before_entry)
    return AuditLog(entries=[AuditEntry.model_validate(entry) for entry in found])
