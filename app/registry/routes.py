"""The routes of `/calibrators`; the registry and the activator do the work in threads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Annotated, Any

import orjson
from fastapi import APIRouter, Depends, Path, Query, Request, Response

from boxcal.app.access.routes import CurrentCaller
from boxcal.app.http.dependencies import Limit, OnlyDeclared, no_body, part_of_model
from boxcal.app.http.problem_documents import problems
from boxcal.app.http.problems import (
    CalibratorNotFound,
    CalibratorPruned,
    DamagedArtifact,
    ForeignCalibrator,
    InvalidParameter,
    NoReport,
    NothingToRollBack,
    OtherVersionActive,
    ProblemType,
    RegistryFull,
    RegistryUnavailable,
)
from boxcal.app.registry.activator import Activator
from boxcal.app.registry.records import Activation, CalibratorRecord
from boxcal.app.registry.store import Registry
from boxcal.app.schemas.calibrators import (
    Activated,
    Activations,
    BackboneName,
    CalibratorDocument,
    Calibrators,
)

CurrentRegistry = Annotated[Registry, part_of_model("registry")]
CurrentActivator = Annotated[Activator, part_of_model("activator")]


router = APIRouter(prefix="/calibrators", tags=["calibrators"], dependencies=[Depends(OnlyDeclared())])
history = APIRouter(tags=["calibrators"], dependencies=[Depends(OnlyDeclared())])

LARGEST_VERSION = 2**31 - 1
REPORT_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
"""What the report's page may load: nothing but what is in it."""
Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]
Version = Annotated[
    int, Path(ge=0, le=LARGEST_VERSION, description="Version of the calibrator; 0 is uncalibrated.")
]


Expected = Annotated[
    int | None,
    Query(
        ge=0,
        le=LARGEST_VERSION,
        description="The version that you believe active: if another one is, the request changes nothing.",
    ),
]


def described(record: CalibratorRecord, active: int) -> CalibratorDocument:
    """Describe a calibrator, given the active version."""
    own = record.backbone
    backbone = None
    if own is not None:
        backbone = BackboneName(
            name=own.name, num_classes=own.num_classes, fingerprint=own.fingerprint, model=own.model or None
        )
    values = {field.name: getattr(record, field.name) for field in fields(record)}
    values |= {"active": record.version == active, "backbone": backbone}
    if backbone is None:
        values["created_at"] = None
    return CalibratorDocument(**values)


def activated(activation: Activation) -> Activated:
    """Describe an activation."""
    return Activated(
        version=activation.version,
        method=activation.method,
        reason=activation.reason.value,
        activated_at=activation.created_at,
    )


def part(path: str, media_type: str, description: str, *errors: ProblemType) -> Decorator:
    """Declare a route that answers with one part of a calibrator, as JSON or as bytes."""
    schema = (
        {"type": "object"} if media_type == "application/json" else {"type": "string", "format": "binary"}
    )
    success: dict[int | str, dict[str, Any]] = {
        200: {"description": description, "content": {media_type: {"schema": schema}}}
    }
    refusals = problems(
        CalibratorNotFound, CalibratorPruned, NoReport, InvalidParameter, RegistryUnavailable, *errors
    )
    return router.get(f"/{{version}}/{path}", response_class=Response, responses={**success, **refusals})


@router.get("", response_model_exclude_none=True, responses=problems(InvalidParameter, RegistryUnavailable))
async def list_calibrators(
    request: Request,
    registry: CurrentRegistry,
    activator: CurrentActivator,
    limit: Limit = 100,
    before_version: Annotated[
        int | None, Query(ge=0, le=LARGEST_VERSION, description="Only lower versions than this one.")
    ] = None,
) -> Calibrators:
    """List the calibrators of all backbones, or those of one model, newest first."""
    own = "model" in request.query_params
    records = await registry.run(registry.list, limit, before_version, own=own)
    active = activator.active.current.version
    return Calibrators(calibrators=tuple(described(record, active) for record in records))


@router.post(
    "/rollback",
    dependencies=[Depends(no_body)],
    responses=problems(
        NothingToRollBack,
        OtherVersionActive,
        InvalidParameter,
        CalibratorPruned,
        DamagedArtifact,
        RegistryUnavailable,
        RegistryFull,
    ),
)
async def rollback(
    registry: CurrentRegistry, activator: CurrentActivator, caller: CurrentCaller, expected: Expected = None
) -> Activated:
    """Activate the previous calibrator; a second call goes back by one more."""
    return activated(await registry.run(activator.rollback, caller, expected))


@router.get(
    "/{version}",
    response_model_exclude_none=True,
    responses=problems(CalibratorNotFound, InvalidParameter, RegistryUnavailable),
)
async def get_calibrator(
    version: Version, registry: CurrentRegistry, activator: CurrentActivator
) -> CalibratorDocument:
    """Return one calibrator."""
    record = await registry.run(registry.get, version)
    return described(record, activator.active.current.version)


@part("report", "application/json", "Samples, metrics with intervals, warnings and the verdict.")
async def get_report(version: Version, registry: CurrentRegistry) -> Response:
    """Return the report: metrics before and after calibration, on data that the fit did not use."""
    report = await registry.run(registry.report, version)
    return Response(orjson.dumps(report), media_type="application/json")


@part("report.html", "text/html", "The page.")
async def get_report_page(version: Version, registry: CurrentRegistry) -> Response:
    """Return the report as one HTML page that loads nothing else."""
    from boxcal.calibrators.evaluation.html_report import html_report  # noqa: PLC0415 - rarely needed

    report = await registry.run(registry.report, version)
    diagram = await registry.run(registry.reliability, version, "svg")
    page = html_report(report, diagram, title=f"Calibrator {version}")
    return Response(page, media_type="text/html", headers={"Content-Security-Policy": REPORT_POLICY})


@part("reliability.json", "application/json", "The bins before and after.")
async def get_reliability_data(version: Version, registry: CurrentRegistry) -> Response:
    """Return the data of the reliability diagram."""
    report = await registry.run(registry.report, version)
    return Response(orjson.dumps(report["reliability"]), media_type="application/json")


@part("reliability.svg", "image/svg+xml", "The image.")
async def get_reliability_diagram(version: Version, registry: CurrentRegistry) -> Response:
    """Return the reliability diagram before and after calibration as SVG."""
    return Response(await registry.run(registry.reliability, version, "svg"), media_type="image/svg+xml")


@part("reliability.png", "image/png", "The image.")
async def get_reliability_image(version: Version, registry: CurrentRegistry) -> Response:
    """Return the reliability diagram as PNG."""
    return Response(await registry.run(registry.reliability, version, "png"), media_type="image/png")


@part("artifact", "application/octet-stream", "A safetensors file.", DamagedArtifact)
async def get_artifact(version: Version, registry: CurrentRegistry) -> Response:
    """Return the artifact (safetensors), for `Calibrator.from_bytes`."""
    disposition = f'attachment; filename="calibrator-{version}.safetensors"'
    return Response(
        await registry.run(registry.artifact, version),
        media_type="application/octet-stream",
        headers={"Content-Disposition": disposition},
    )


@router.post(
    "/{version}/activate",
    dependencies=[Depends(no_body)],
    responses=problems(
        CalibratorNotFound,
        CalibratorPruned,
        ForeignCalibrator,
        OtherVersionActive,
        InvalidParameter,
        DamagedArtifact,
        RegistryUnavailable,
        RegistryFull,
    ),
)
async def activate(
    version: Version,
    registry: CurrentRegistry,
    activator: CurrentActivator,
    caller: CurrentCaller,
    expected: Expected = None,
) -> Activated:
    """Activate a calibrator; if it is already active, nothing changes."""
    activate = activator.activate
    return activated(await registry.run(activate, version, caller=caller, expected=expected))


@history.get("/activations", responses=problems(InvalidParameter, RegistryUnavailable))
async def list_activations(registry: CurrentRegistry, limit: Limit = 50) -> Activations:
    """List the newest activations, newest first, and the version that a rollback activates."""

    def read() -> tuple[Sequence[Activation], int | None]:
        found = registry.activations.list(limit)  # before the target: `expected` then refuses a later one
        try:
            target: int | None = registry.activations.rollback_target()
        except NothingToRollBack:
            target = None
        return found, target

    found, target = await registry.run(read)
    return Activations(activations=tuple(map(activated, found)), rollback_to=target)
