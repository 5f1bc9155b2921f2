"""Every problem that a request can have, in one table, and the exceptions that carry them.

A row of the table is called to make an exception: `raise InvalidParameter("top_k is 0; it is at least 1.")`.
An exception has a class of its own where somebody catches it.
"""

from __future__ import annotations

import builtins
import errno
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

CHALLENGE = {"WWW-Authenticate": 'Bearer realm="boxcal"'}
SOON, LATER = {"Retry-After": "1"}, {"Retry-After": "2"}


@dataclass(frozen=True, slots=True, eq=False)
class ProblemType:
    """A kind of problem that a client can tell apart."""

    status: int
    type: str  # The last part of the document's `type`
    title: str  # The title of the document; one sentence for the documentation
    meaning: str
    headers: Mapping[str, str] = field(default_factory=dict)  # Of every response with it
    error: builtins.type[BoxcalError] | None = None  # The class of the exception

    def __call__(
        self, detail: str, *, headers: Mapping[str, str] | None = None, retry_after: int | None = None
    ) -> BoxcalError:
        """Return an exception; parameters as those of `BoxcalError`."""
        return (self.error or BoxcalError)(detail, kind=self, headers=headers, retry_after=retry_after)


InternalError = ProblemType(500, "internal-error", "Internal error", "Internal error; see the server log.")


class BoxcalError(Exception):
    """Base class of every error that the service returns.

    `retry_after`: seconds, if not those of the kind.
    """

    default: ClassVar[ProblemType] = InternalError

    def __init_subclass__(
        cls, status: int = 0, kind: str = "", title: str = "", headers: Mapping[str, str] | None = None
    ) -> None:
        """Describe the problem of a class; its docstring is the meaning."""
        if status:
            cls.default = ProblemType(status, kind, title, cls.__doc__ or "", headers or {})

    def __init__(
        self,
        detail: str,
        *,
        kind: ProblemType | None = None,
        headers: Mapping[str, str] | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(detail)
        self.detail = detail
        self.kind = kind or self.default
        self.reason = self.kind.type  # as the metrics count it
        self.headers = {**self.kind.headers, **(headers or {})}
        if retry_after is not None:
            self.headers["Retry-After"] = str(retry_after)

    @property
    def status(self) -> int:
        """Status of the response."""
        return self.kind.status

    @property
    def type(self) -> str:
        """The last part of the document's `type`."""
        return self.kind.type


class FitLost(BoxcalError, status=409, kind="fit-lost", title="The fit belongs to another process"):
    """The fit has ended, or another process or attempt owns it; nothing was changed."""


class NothingToRollBack(BoxcalError, status=409, kind="nothing-to-roll-back", title="Nothing to roll back"):
    """There is no earlier activation to roll back to."""


class InvalidUpload(BoxcalError, status=422, kind="invalid-upload", title="Invalid validation set"):
    """The uploaded file contains no valid validation set."""


class InvalidLogits(BoxcalError, status=422, kind="invalid-logits", title="Invalid logits"):
    """The logits have the wrong shape or are not finite."""


class BackboneFailed(BoxcalError, status=500, kind="backbone-failed", title="The backbone failed"):
    """The backbone failed on an input, or returned logits that cannot be calibrated."""


class RegistryUnavailable(
    BoxcalError, status=503, kind="registry-unavailable", title="The registry does not answer", headers=LATER
):
    """The database does not answer; what is active in memory still serves."""


class UnusableCalibrator(BoxcalError):
    """A version of the calibrator cannot be used: missing, deleted, damaged, or of another backbone."""


BadRequest = ProblemType(400, "bad-request", "Bad request", "The request cannot be parsed.")
MalformedBody = ProblemType(
    400, "malformed-body", "Malformed body", "The body does not match its content type."
)
ApiKeyExpired = ProblemType(401, "api-key-expired", "API key expired", "The API key has expired.", CHALLENGE)
ApiKeyRequired = ProblemType(
    401, "api-key-required", "API key required", "The request has no API key.", CHALLENGE
)
InvalidApiKey = ProblemType(
    401, "invalid-api-key", "Invalid API key", "No valid key has this value, or it was revoked.", CHALLENGE
)
CrossOrigin = ProblemType(
    403, "cross-origin", "Cross-origin request", "A web page of another origin may not send this request."
)
InsufficientScope = ProblemType(
    403,
    "insufficient-scope",
    "Insufficient scope",
    "The API key does not have the scope that the route requires.",
)
KeyNotFound = ProblemType(404, "key-not-found", "API key not found", "No API key has this id.")
ModelNotFound = ProblemType(
    404, "model-not-found", "Model not found", "No model has this name, or it has no such version."
)
NoModel = ProblemType(
    404,
    "no-model",
    "No model",
    "The service has no model: it calibrates logits of a model that runs elsewhere.",
)
RouteNotFound = ProblemType(404, "route-not-found", "Path not found", "No route has this path.")
CalibratorNotFound = ProblemType(
    404,
    "calibrator-not-found",
    "Calibrator not found",
    "No calibrator has this version.",
    error=UnusableCalibrator,
)
FitNotFound = ProblemType(404, "fit-not-found", "Fit not found", "No fit has this id.")
NoReport = ProblemType(
    404,
    "no-report",
    "No report",
    "The calibrator has no report: it was never fitted.",
    error=UnusableCalibrator,
)
MethodNotAllowed = ProblemType(
    405, "method-not-allowed", "Method not allowed", "The path does not support this HTTP method."
)
UploadStalled = ProblemType(
    408, "upload-stalled", "Upload stalled", "The upload is slower than the minimum rate."
)
FitAlreadyOver = ProblemType(
    409, "fit-already-over", "Fit already ended", "The fit has ended and cannot be cancelled."
)
FitElsewhere = ProblemType(
    409,
    "fit-elsewhere",
    "Fit runs elsewhere",
    "Another replica runs the fit; only that replica can cancel it.",
)
ForeignCalibrator = ProblemType(
    409,
    "foreign-calibrator",
    "Calibrator of another backbone",
    "The calibrator was fitted to another backbone.",
    error=UnusableCalibrator,
)
OtherVersionActive = ProblemType(
    409,
    "other-version-active",
    "Another version is active",
    "Another version than `expected` is active; nothing was changed.",
)
TooFewPredictions = ProblemType(
    409,
    "too-few-predictions",
    "Too few predictions",
    "Too few predictions are kept for an estimate of the class frequencies.",
)
CalibratorPruned = ProblemType(
    410,
    "calibrator-pruned",
    "Calibrator pruned",
    "The artifact and the report of the calibrator were deleted.",
    error=UnusableCalibrator,
)
BodyTooLarge = ProblemType(413, "body-too-large", "Body too large", "The body has more bytes than the limit.")
ImageTooLarge = ProblemType(
    413, "image-too-large", "Image too large", "An image has more pixels than the limit. It was not decoded."
)
RequestTooLarge = ProblemType(
    413,
    "request-too-large",
    "The request needs too much memory",
    "The logits and the response would take more memory than the limit.",
)
TooManySamples = ProblemType(
    413, "too-many-samples", "Too many samples", "The request has more samples than the queue can hold."
)
UploadTooLarge = ProblemType(
    413,
    "upload-too-large",
    "Upload too large",
    "The upload has more bytes than the limit, as sent or as stored.",
)
UnknownUploadFormat = ProblemType(
    415,
    "unknown-upload-format",
    "Unsupported file format",
    "The uploaded file has none of the formats that `/fit` reads.",
)
UnsupportedMediaType = ProblemType(
    415,
    "unsupported-media-type",
    "Unsupported content type",
    "The route does not accept this content type, or the service not this content encoding.",
)
MisdirectedRequest = ProblemType(
    421,
    "misdirected-request",
    "Misdirected request",
    "The `Host` header is not a name of this service (`BOXCAL_ALLOWED_HOSTS`).",
)
UnknownMethod = ProblemType(
    422,
    "unknown-method",
    "Unsupported method",
    "No method has this name, or the upload or backbone does not provide its requirements.",
)
InvalidBounds = ProblemType(
    422, "invalid-bounds", "Invalid bounds", "No probability vector satisfies the bounds."
)
InvalidInput = ProblemType(
    422,
    "invalid-input",
    "Invalid input",
    "An image cannot be decoded, or a tensor has the wrong shape for the backbone.",
)
InvalidParameter = ProblemType(
    422, "invalid-parameter", "Invalid parameter", "An option or field has the wrong type or is out of range."
)
ConcurrencyLimited = ProblemType(
    429,
    "concurrency-limited",
    "Concurrency limit exceeded",
    "The API key has its maximum number of requests in progress.",
)
RateLimited = ProblemType(
    429, "rate-limited", "Rate limit exceeded", "The API key has used its requests per minute."
)
NoApiKey = ProblemType(
    500, "no-api-key", "No API key", "The service would be open to everyone who can reach its address."
)
DamagedArtifact = ProblemType(
    500,
    "damaged-artifact",
    "Damaged artifact",
    "The stored artifact does not match its checksum.",
    error=UnusableCalibrator,
)
RegistryUnusable = ProblemType(
    500, "registry-unusable", "Registry unusable", "The database cannot be used by this release."
)
FitQueueFull = ProblemType(
    503,
    "fit-queue-full",
    "Fit queue full",
    "Too many fits are waiting, or too many uploads are arriving.",
    SOON,
)
NotReady = ProblemType(503, "not-ready", "Service not ready", "The service is starting or stopping.", SOON)
QueueFull = ProblemType(
    503, "queue-full", "Queue full", "The queue holds its maximum number of samples.", SOON
)
Unavailable = ProblemType(
    503,
    "unavailable",
    "Service unavailable",
    "The service cannot accept the request now; `Retry-After` says when to retry.",
    SOON,
)
StorageUnavailable = ProblemType(
    503,
    "storage-unavailable",
    "Storage unavailable",
    "The data directory cannot be written; the server log has the reason.",
    SOON,
)
DeadlineExceeded = ProblemType(
    504, "deadline-exceeded", "Timeout exceeded", "The timeout of the request passed before it was done."
)
RegistryFull = ProblemType(
    507,
    "storage-full",
    "Insufficient storage",
    "The disk of the database is full; nothing was changed.",
    LATER,
    error=RegistryUnavailable,
)
StorageFull = ProblemType(
    507, "storage-full", "Insufficient storage", "The data directory has no space left."
)
FULL_DISK = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""Numbers of the errors of the operating system that are this problem."""

PROBLEMS: tuple[ProblemType, ...] = tuple(
    sorted(
        dict.fromkeys(
            (
                *(one for one in globals().values() if isinstance(one, ProblemType)),
                *(one.default for one in BoxcalError.__subclasses__()),
            )
        ),
        key=lambda one: (one.status, one.type),
    )
)
"""Every problem, by status and type."""
DEFECTS = (InternalError, BackboneFailed.default)
"""Problems whose detail the log repeats."""


def describe_validation(errors: Sequence[Any], *prefix: str) -> str:
    """Describe the first pydantic error and quote the offending value."""
    first = errors[0]
    place = ".".join((*prefix, *(str(part) for part in first["loc"])))
    wrong = "Input should be an object" if first["type"] == "model_type" else first["msg"]
    message = f"{place}: {wrong}"
    if first["type"] != "missing" and isinstance(first.get("input"), str | int | float | bool | None):
        message += f", got {first['input']!r:.200}"
    more = len(errors) - 1
    return message + (f" (and {more} more)" if more else "") + "."
