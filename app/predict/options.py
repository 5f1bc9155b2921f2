"""Options of a request: from JSON or the query string to checked values, its bounds to two vectors."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Any, Literal
from unicodedata import normalize

import numpy as np
import orjson
from numpy.typing import NDArray
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, WithJsonSchema
from pydantic_core import PydanticCustomError

from boxcal.app.http.problems import (
    BoxcalError,
    DeadlineExceeded,
    InvalidBounds,
    InvalidParameter,
    describe_validation,
)
from boxcal.calibrators.errors import hint, nearest
from boxcal.calibrators.operator.constants import sum_tolerance
from boxcal.calibrators.scores import integer_of, names_are_integers

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
"""A bound as sent; `check_bounds` reads it, because it knows the labels."""


def _version(value: Any) -> Any:
    if isinstance(value, str) and value != "active" and value.isdecimal():
        value = int(value)
    if value == "active" or (isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**31):
        return value
    raise PydanticCustomError("calibrator", 'should be "active" or the number of a version')


class BoundsOption(BaseModel):
    """Hard bounds on the probabilities of this request's response."""

    model_config = ConfigDict(extra="forbid")

    lower: Bound = 0.0
    upper: Bound = 1.0


class Options(BaseModel):
    """Options of a request."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    bounds: BoundsOption | None = None  # Hard bounds; fitted bounds are relaxed to satisfy them
    top_k: Annotated[int, Field(ge=1)] = 5  # How many classes `top` lists, K at most
    # Whether each prediction carries all K of them; logits are the backbone's, as `/fit` takes them
    probabilities: bool = False
    logits: bool = False
    explain: bool = False  # Whether each prediction carries its mapped logits and the fitted bounds
    # Whether each prediction gets an `id` for `POST /feedback`; its logits are then kept
    feedback: bool = False
    # Whether the calibrator is adjusted to the class frequencies of recent predictions
    prior_adjustment: bool = False
    # The active one, or a version of the registry; 0 is `uncalibrated`
    calibrator: Annotated[
        Literal["active"] | int,
        BeforeValidator(_version),
        WithJsonSchema(
            {"anyOf": [{"const": "active"}, {"type": "integer", "minimum": 0}], "default": "active"}
        ),
    ] = "active"
    # Timeout in milliseconds; work that has not begun by then is dropped and the response is 504
    timeout_ms: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None


DEFAULT = Options()
SIDES = ("lower", "upper")
NAMES = tuple(Options.model_fields)
FLAT = tuple(name for name in NAMES if name != "bounds")
FEW_LABELS = 50
"""A class name that is not known is compared with so many labels: a comparison takes some microseconds."""


class OwnTimeout:
    """A block in which a timeout that passes is counted as that of the client."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        if isinstance(error, BoxcalError) and error.kind is DeadlineExceeded:
            error.reason = "client-timeout"


OWN, DEFAULT_TIMEOUT = OwnTimeout(), nullcontext()


def timeout_of(options: Options) -> AbstractContextManager[None]:
    """Give the block that a request runs in: of a client who sets the timeout, or does not."""
    return DEFAULT_TIMEOUT if options.timeout_ms is None else OWN


def place_of(name: str) -> str | None:
    """Say in which member of a JSON body an option belongs; None if it is no option."""
    if name in SIDES:
        return "options.bounds"
    return "options" if name in NAMES else None


def from_json(document: Any) -> Options:
    """Read the `options` member of a JSON body or form."""
    return DEFAULT if document is None else _checked(document, strict=True)


def from_query(query: Mapping[str, str]) -> Options:
    """Read options from a query string: `options` as one JSON document, or one parameter each.

    The parameters `lower` and `upper` are the two members of `bounds`.
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
        elif name in SIDES:
            bounds = document.setdefault("bounds", {})
            if not isinstance(bounds, dict) or name in bounds:
                raise InvalidParameter(f"Give the {name} bounds once, in `bounds` or as `{name}`.")
            bounds[name] = parse(name, text)
        else:
            known = ("options", "bounds", *SIDES, *FLAT)
            takes = f"the query string takes {', '.join(known)}."
            raise InvalidParameter(f"There is no option {name!r:.100}{hint(name, known, takes)}")
    return _checked(document, strict=False)


def parse(name: str, text: str | bytes) -> Any:
    """Parse an option that is written as JSON."""
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError as error:
        shown = text if isinstance(text, str) else text.decode("utf-8", "replace")
        raise InvalidParameter(f"{name} is not JSON ({error}), got {shown!r:.200}.") from error


def _checked(document: Any, *, strict: bool) -> Options:
    if isinstance(document, dict) and len(document) <= len(NAMES):
        try:
            # With the types, because 1, 1.0 and true are equal.
            return _remembered(strict, *[(name, type(value), value) for name, value in document.items()])
        except TypeError:  # an object or a list, which cannot be remembered
            pass
    return _validated(document, strict=strict)


@lru_cache(maxsize=256)
def _remembered(strict: bool, *members: tuple[str, type, Any]) -> Options:
    """Check options without bounds; clients send the same few with every request. Errors are not kept."""
    return _validated({name: value for name, _, value in members}, strict=strict)


def _validated(document: Any, *, strict: bool) -> Options:
    _refuse_unknown(document, NAMES, "options")
    if isinstance(document, dict):
        _refuse_unknown(document.get("bounds"), SIDES, "options.bounds")
    try:
        return Options.model_validate(document, strict=strict)
    except ValidationError as error:
        raise InvalidParameter(describe_validation(error.errors(), "options")) from error


def _refuse_unknown(document: Any, known: Sequence[str], name: str) -> None:
    """Refuse a member that is no option; pydantic would describe each of a million."""
    unknown = next((m for m in document if m not in known), None) if isinstance(document, dict) else None
    if unknown is None:
        return
    if name == "options" and unknown in SIDES:
        raise InvalidParameter(f"options.{unknown} belongs in `options.bounds`.")
    if name == "options" and (side := nearest(str(unknown), SIDES)):
        raise InvalidParameter(f"There is no option {unknown!r:.100}; did you mean options.bounds.{side}?")
    may_have = f"it may have {', '.join(known)}."
    raise InvalidParameter(f"{name} has a member {unknown!r:.100}{hint(str(unknown), known, may_have)}")


@dataclass(frozen=True, slots=True, eq=False)
class RequestBounds:
    """Feasible hard bounds of one request."""

    # (K,) float64; 0 <= lower <= upper <= 1 and, up to rounding, sum(lower) <= 1 <= sum(upper)
    lower: NDArray[np.float64]
    upper: NDArray[np.float64]


class Labels:
    """The K class names of the backbone, in the order of its logits, and the position of each."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)
        self.index = {name: position for position, name in enumerate(self.names)}
        self.longest = max(map(len, self.names), default=0)
        self.named_by_integers = names_are_integers(self.names)
        self.by_number: Mapping[int | None, int] | range = range(len(self.names))
        if self.named_by_integers:
            self.by_number = {integer_of(name): position for name, position in self.index.items()}
        self._by_part: dict[str, list[str]] = {}
        if len(self.names) > FEW_LABELS:
            for name in self.names:
                for part in _ends(name):
                    self._by_part.setdefault(part, []).append(name)

    def __len__(self) -> int:
        return len(self.names)

    def hint(self, name: str) -> str:
        """Return `; did you mean '...'?` for the nearest label, or nothing.

        Where there are many, it is looked for among some that begin or end with the same three letters.
        """
        if len(self.names) <= FEW_LABELS:
            return hint(name, self.names)
        alike = [one for part in _ends(name) for one in self._by_part.get(part, [])[: FEW_LABELS // 2]]
        return hint(name, alike)


def _ends(name: str) -> tuple[str, str]:
    return f"{name[:3].lower()}-", f"-{name[-3:].lower()}"


def check_bounds(bounds: BoundsOption | None, labels: Labels) -> RequestBounds | None:
    """Check the bounds of a request and bring them to vectors; None if they bound nothing."""
    if bounds is None or (_is(bounds.lower, 0) and _is(bounds.upper, 1)):
        return None
    lower = _vector("lower", bounds.lower, labels, default=0.0)
    upper = _vector("upper", bounds.upper, labels, default=1.0)
    crossed = lower > upper
    if crossed.any():
        worst = int(crossed.argmax())
        raise InvalidBounds(
            f"The lower bound {lower[worst]!s} of class {labels.names[worst]!r} is above its upper bound "
            f"{upper[worst]!s}."
        )
    tolerance = sum_tolerance(len(labels))
    if (total := math.fsum(lower)) > 1.0 + tolerance:
        raise InvalidBounds(f"The lower bounds of the {len(labels)} classes add up to {total!r}, above 1.")
    if (total := math.fsum(upper)) < 1.0 - tolerance:
        raise InvalidBounds(f"The upper bounds of the {len(labels)} classes add up to {total!r}, below 1.")
    return RequestBounds(lower, upper)


def _is(value: Any, number: float) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value == number


def _vector(side: str, value: Any, labels: Labels, *, default: float) -> NDArray[np.float64]:
    """Bring one side to a (K,) vector."""
    if isinstance(value, Mapping):
        vector = np.full(len(labels), default)
        named: set[int] = set()
        for name, number in value.items():
            position = labels.index.get(name)
            if position is None:
                position = labels.index.get(normalize("NFC", str(name)))
            if position is None:
                raise InvalidBounds(
                    f"bounds.{side} names {name!r:.100}, a class the model does not have"
                    f"{labels.hint(str(name)) or '.'}"
                )
            if position in named:
                raise InvalidBounds(
                    f"bounds.{side} names the class {labels.names[position]!r:.100} twice, in two spellings."
                )
            named.add(position)
            vector[position] = _number(side, number, f" of class {name!r}")
        return vector
    if isinstance(value, list | tuple):
        if value and isinstance(value[0], list | tuple):
            raise InvalidBounds(
                f"bounds.{side}[0] is a list; the bounds of a request hold for each of its rows: give one "
                f"number for each of the {len(labels)} classes."
            )
        if len(value) != len(labels):
            raise InvalidBounds(
                f"bounds.{side} has {len(value)} numbers, but the model has {len(labels)} classes."
            )
        numbers = zip(labels.names, value, strict=True)
        return np.array([_number(side, number, f" of class {name!r}") for name, number in numbers])
    return np.full(len(labels), _number(side, value, ""))


def _number(side: str, value: Any, where: str) -> float:
    if type(value) is float and 0.0 <= value <= 1.0:
        return value
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidBounds(f"bounds.{side}{where} is {value!r:.100}; a bound is a number.")
    if not 0 <= value <= 1:
        raise InvalidBounds(f"bounds.{side}{where} is {value!r:.100}; a bound is a probability in [0, 1].")
    return float(value)
