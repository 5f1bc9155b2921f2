"""What a request may ask for beside its inputs: the options, from JSON or from the query string."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import orjson
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, WithJsonSchema
from pydantic_core import PydanticCustomError

from boxcal.app.errors import InvalidParameter, describe_validation

NUMBER = {"type": "number", "minimum": 0, "maximum": 1}
Bound = Annotated[
    Any,
    WithJsonSchema(
        {
            "description": "One number for every class, numbers by label, or an array of K numbers.",
            "anyOf": [
                NUMBER,
                {"type": "object", "additionalProperties": NUMBER},
                {"type": "array", "items": NUMBER},
            ],
        }
    ),
]
"""A bound as it was sent; `request_bounds` reads it, for it knows the labels."""


def _version(value: Any) -> Any:
    if isinstance(value, str) and value != "active" and value.isdecimal():
        value = int(value)
    if value == "active" or (isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**31):
        return value
    raise PydanticCustomError("calibrator", 'should be "active" or the number of a version')


class BoundsOption(BaseModel):
    """Hard bounds on the probabilities of this request's answer."""

    model_config = ConfigDict(extra="forbid")

    lower: Bound = 0.0
    upper: Bound = 1.0


class Options(BaseModel):
    """How a request wants to be answered.

    Attributes
    ----------
    bounds
        Hard bounds; fitted ones yield to them.
    top_k
        How many classes `top` lists, K at most.
    probabilities, logits
        Whether each prediction carries all K of them; logits are the backbone's, as `/fit` takes them.
    calibrator
        The active one, or a version of the registry; 0 is `uncalibrated`.
    timeout_ms
        Timeout in seconds; work that has not begun by then is dropped and the answer is 504.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    bounds: BoundsOption | None = None
    top_k: Annotated[int, Field(ge=1)] = 5
    probabilities: bool = False
    logits: bool = False
    calibrator: Annotated[
        Literal["active"] | int,
        BeforeValidator(_version),
        WithJsonSchema(
            {"anyOf": [{"const": "active"}, {"type": "integer", "minimum": 0}], "default": "active"}
        ),
    ] = "active"
    timeout_ms: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None


DEFAULT = Options()
FLAT = ("top_k", "probabilities", "logits", "calibrator", "timeout_ms")


def from_json(document: Any) -> Options:
    """Read the `options` member of a JSON body or part.

    Raises
    ------
    InvalidParameter
        Naming the option and the value.
    """
    if document is None:
        return DEFAULT
    return _checked(document, strict=True)


def from_query(query: Mapping[str, str]) -> Options:
    """Read options from a query string: `options` as one JSON document, or one parameter each.

    `lower` and `upper` stand for the two members of `bounds`.

    Raises
    ------
    InvalidParameter
        Naming the parameter and the value.
    """
    if not query:
        return DEFAULT
    if "options" in query:
        if len(query) > 1:
            other = next(name for name in query if name != "options")
            raise InvalidParameter(f"Give either `options` or {other!r} in the query string, not both.")
        return from_json(parse("options", query["options"]))
    document: dict[str, Any] = {}
    for name, text in query.items():
        if name in FLAT:
            document[name] = text
        elif name == "bounds":
            document["bounds"] = parse(name, text)
        elif name in ("lower", "upper"):
            bounds = document.setdefault("bounds", {})
            if not isinstance(bounds, dict) or name in bounds:
                raise InvalidParameter(f"Give the {name} bounds once, in `bounds` or as `{name}`.")
            bounds[name] = parse(name, text)
        else:
            known = ", ".join(("options", "bounds", "lower", "upper", *FLAT))
            raise InvalidParameter(f"There is no option {name!r:.100}; the query string takes {known}.")
    return _checked(document, strict=False)


def parse(name: str, text: str | bytes) -> Any:
    """Parse an option that is written as JSON.

    Raises
    ------
    InvalidParameter
        Where it is not JSON.
    """
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError as error:
        shown = text if isinstance(text, str) else text.decode("utf-8", "replace")
        raise InvalidParameter(f"{name} is not JSON ({error}), got {shown!r:.200}.") from error


def _checked(document: Any, *, strict: bool) -> Options:
    try:
        return Options.model_validate(document, strict=strict)
    except ValidationError as error:
        raise InvalidParameter(describe_validation(error.errors(), "options")) from error
