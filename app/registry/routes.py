"""The HTTP side of the registry: `/calibrators`; the registry and the activator do the work, in threads."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

import orjson
from fastapi import APIRouter, Path, Response

from boxcal.app.errors import InvalidParameter, problems
from boxcal.app.registry.errors import (
    CalibratorNotFound,
    DamagedArtifact,
    ForeignCalibrator,
    NoReport,
    NothingToRollBack,
)
from boxcal.app.registry.schemas import Activated, Calibrator, Calibrators
from boxcal.app.state import CurrentState

router = APIRouter(prefix="/calibrators", tags=["calibrators"])

LARGEST_VERSION = 2**31 - 1
Version = Annotated[int, Path(ge=0, le=LARGEST_VERSION, description="0 is `uncalibrated`.")]

PART = problems(CalibratorNotFound, NoReport, InvalidParameter)


def content(media_type: str, schema: dict[str, Any], description: str) -> dict[int | str, dict[str, Any]]:
    """Declare a successful answer that is no pydantic model."""
    return {200: {"description": description, "content": {media_type: {"schema": schema}}}}


BINARY = {"type": "string", "format": "binary"}


@router.get("", response_model_exclude_none=True, responses=problems())
async def list_calibrators(state: CurrentState) -> Calibrators:
    """List the calibrators of every backbone, newest first, the active one marked."""
    records = await asyncio.to_thread(state.registry.list)
    active = state.active.current.version
    return Calibrators(calibrators=[Calibrator.of(record, active) for record in records])


@router.post("/rollback", responses=problems(NothingToRollBack, DamagedArtifact))
async def rollback(state: CurrentState) -> Activated:
    """Return to the calibrator before the active one; twice goes back twice."""
    return Activated.of(await asyncio.to_thread(state.activator.rollback))


@router.get(
    "/{version}", response_model_exclude_none=True, responses=problems(CalibratorNotFound, InvalidParameter)
)
async def get_calibrator(version: Version, state: CurrentState) -> Calibrator:
    """Describe one calibrator."""
    record = await asyncio.to_thread(state.registry.get, version)
    return Calibrator.of(record, state.active.current.version)


@router.get(
    "/{version}/report",
    response_class=Response,
    responses={**content("application/json", {"type": "object"}, "The report."), **PART},
)
async def get_report(version: Version, state: CurrentState) -> Response:
    """Give the report: metrics before and after on data the fit never saw, with intervals."""
    report = await asyncio.to_thread(state.registry.report, version)
    return Response(orjson.dumps(report), media_type="application/json")


@router.get(
    "/{version}/reliability.svg",
    response_class=Response,
    responses={**content("image/svg+xml", BINARY, "The image."), **PART},
)
async def get_reliability_diagram(version: Version, state: CurrentState) -> Response:
    """Draw the report's reliability diagram, before and after."""
    image = await asyncio.to_thread(state.registry.reliability_svg, version)
    return Response(image, media_type="image/svg+xml")


@router.get(
    "/{version}/reliability.png",
    response_class=Response,
    responses={**content("image/png", BINARY, "The image."), **PART},
)
async def get_reliability_image(version: Version, state: CurrentState) -> Response:
    """Draw the same as a PNG."""
    image = await asyncio.to_thread(state.registry.reliability_png, version)
    return Response(image, media_type="image/png")


@router.get(
    "/{version}/reliability.json",
    response_class=Response,
    responses={**content("application/json", {"type": "object"}, "The data."), **PART},
)
async def get_reliability_data(version: Version, state: CurrentState) -> Response:
    """Give the numbers that the reliability diagram draws."""
    report = await asyncio.to_thread(state.registry.report, version)
    return Response(orjson.dumps(report["reliability"]), media_type="application/json")


@router.get(
    "/{version}/artifact",
    response_class=Response,
    responses={
        **content("application/octet-stream", BINARY, "A safetensors file."),
        **problems(CalibratorNotFound, NoReport, InvalidParameter, DamagedArtifact),
    },
)
async def get_artifact(version: Version, state: CurrentState) -> Response:
    """Give the calibrator itself, for `Calibrator.from_bytes`."""
    artifact = await asyncio.to_thread(state.registry.artifact, version)
    name = f"calibrator-{version}.safetensors"
    return Response(
        artifact,
        media_type="application/octet-stream",
        headers={"Content-Disposition": f'attachment; filename="{name}"'},
    )


@router.post(
    "/{version}/activate",
    responses=problems(CalibratorNotFound, ForeignCalibrator, InvalidParameter, DamagedArtifact),
)
async def activate(version: Version, state: CurrentState) -> Activated:
    """Activate a calibrator; where it already is, nothing changes."""
    return Activated.of(await asyncio.to_thread(state.activator.activate, version))
