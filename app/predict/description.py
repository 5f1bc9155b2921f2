"""What the service is, for clients that adapt to it: `GET /model`, `GET /methods` and `GET /version`."""

from __future__ import annotations

import platform
from functools import cache
from importlib.metadata import version
from importlib.resources import files
from typing import Annotated, Any

import orjson
from fastapi import APIRouter, Depends

from boxcal.app.http.dependencies import OnlyDeclared, current_state, part_of_model
from boxcal.app.http.problem_documents import problems
from boxcal.app.predict.options import BoundsOption
from boxcal.app.registry.tables import HEAD
from boxcal.app.schemas.service import Example, Limits, MethodDescription, Methods, ModelDescription, Release
from boxcal.app.settings import limits
from boxcal.calibrators.method import reads_of_methods
from boxcal.models.backends.backbone import Backbone

router = APIRouter(tags=["model"], dependencies=[Depends(OnlyDeclared())])

IMAGE_FORMATS = ("image/jpeg", "image/png", "image/webp")


RELEASE = Release(version=version("boxcal"), registry=HEAD, python=platform.python_version())


@router.get("/model", responses=problems())
async def get_model(
    name: Annotated[str, part_of_model("name")],
    backbone: Annotated[Backbone, part_of_model("backbone")],
    bounds: Annotated[BoundsOption, part_of_model("bounds")],
    state: Annotated[Any, Depends(current_state)],
) -> ModelDescription:
    """Describe the model: labels, default bounds, limits and accepted formats."""
    return ModelDescription(
        name=name,
        models=list(state.models),
        num_classes=backbone.num_classes,
        labels=list(backbone.labels),
        inputs=backbone.inputs.kind,
        input_shape=list(backbone.input_shape),
        bounds={"lower": bounds.lower, "upper": bounds.upper},
        formats=list(IMAGE_FORMATS) if backbone.preprocessing else [],
        device=str(backbone.device),
        limits=Limits(
            body_bytes=limits.MAX_BODY_BYTES,
            upload_bytes=limits.MAX_UPLOAD_BYTES,
            pixels=limits.MAX_PIXELS,
            queue_samples=limits.MAX_QUEUE_SAMPLES,
            timeout_ms=1e3 * limits.TIMEOUT_SECONDS,
        ),
        example=backbone.inputs.example(),
        examples=list(examples(backbone.name)),
    )


@router.get("/methods", responses=problems())
async def get_methods() -> Methods:
    """List the methods that `/fit` accepts besides `auto`, and what each needs."""
    known = reads_of_methods()
    listed = [{"name": name, "reads": reads} for name, reads in known.items() if name != "auto"]
    return Methods(methods=[MethodDescription.model_validate(one) for one in listed])


@router.get("/version", responses=problems())
async def get_version() -> Release:
    """Return the release of the service."""
    return RELEASE


@cache
def examples(model: str) -> tuple[Example, ...]:
    """Return the example images that come with a model: those of `digits` are of its test split."""
    if model != "digits":
        return ()
    found = orjson.loads(files("boxcal.models").joinpath("digits_examples.json").read_bytes())
    return tuple(Example(**one) for one in found)
