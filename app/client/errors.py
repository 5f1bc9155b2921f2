"""The error tree of the client.

ClientError
  x InvalidUrlError           the service's address is not a URL; also a ValueError
  x InvalidKeyError           the API key has characters that no key has; also a ValueError
  x TransportError            no usable response
    + UnreachableError        no connection; nothing was sent
    + ConnectionLostError     the connection closed before the response was complete
    + AnswerTimeoutError      the response did not arrive within the timeout
    + UnreadableAnswerError   the response does not follow this service's API
  x ProblemError              the service returned a problem document (RFC 9457)
    + InvalidRequestError     400 to 499: the request is wrong
      - UnauthorizedError     401: the API key is missing, invalid or expired
      - ForbiddenError        403: the API key does not have the scope
      - NotFoundError         404: no such calibrator, fit or route
      - ConflictError         409: the request conflicts with the current state
    + UnavailableError        503: retry after `retry_after` seconds
      - TooManyRequestsError  429: a limit of the API key is reached
    + ServiceFaultError       500 to 599: internal error or timeout
  x FitNotSucceededError      the fit failed, was cancelled or was interrupted
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from boxcal.app.schemas.fits import Fit

__all__ = [
    "AnswerTimeoutError",
    "ClientError",
    "ConflictError",
    "ConnectionLostError",
    "FitNotSucceededError",
    "ForbiddenError",
    "InvalidKeyError",
    "InvalidRequestError",
    "InvalidUrlError",
    "NotFoundError",
    "ProblemError",
    "ServiceFaultError",
    "TooManyRequestsError",
    "TransportError",
    "UnauthorizedError",
    "UnavailableError",
    "UnreachableError",
    "UnreadableAnswerError",
]


class ClientError(Exception):
    """Base class of the errors that the client raises."""


class InvalidUrlError(ClientError, ValueError):
    """The service's address is not an http or https URL."""


class InvalidKeyError(ClientError, ValueError):
    """The API key has characters that no key has; the message does not quote it."""


class TransportError(ClientError):
    """No usable response arrived."""


class UnreachableError(TransportError):
    """No connection could be opened; the service did not receive the request."""


class ConnectionLostError(TransportError):
    """The connection closed; the service may have processed the request."""


class AnswerTimeoutError(TransportError):
    """The response did not arrive within the client's timeout."""


class UnreadableAnswerError(TransportError):
    """The response does not follow this service's API."""


class ProblemError(ClientError):
    """The service returned an error as a problem document.

    Parameters
    ----------
    status
        HTTP status of the response.
    problem
        The members of the `application/problem+json` document.
    retry_after
        Seconds to wait before a retry, or None if the response does not say.

    Attributes
    ----------
    status, type, title, detail, instance
        The standard members of RFC 9457, with its defaults.
    request_id
        Id of the request in the log of the service.
    members
        Every member of the document, extension members included.
    """

    def __init__(self, status: int, problem: Mapping[str, Any], retry_after: float | None = None) -> None:
        self.status = status
        self.members = MappingProxyType(dict(problem))
        self.type = str(problem.get("type", "about:blank"))
        self.title = str(problem.get("title", ""))
        self.detail = str(problem.get("detail", "") or self.title or f"HTTP {status}")
        self.instance: str | None = problem.get("instance")
        self.request_id: str | None = problem.get("request_id")
        self.retry_after = retry_after
        super().__init__(f"{self.detail} (HTTP {status})")

    def __reduce__(self) -> tuple[type[Self], tuple[int, dict[str, Any], float | None]]:
        """Pickle by the arguments: process pools send errors from one process to another."""
        return type(self), (self.status, dict(self.members), self.retry_after)


class InvalidRequestError(ProblemError):
    """The request is wrong; `detail` quotes the offending value and the limit."""


class UnauthorizedError(InvalidRequestError):
    """The API key is missing, invalid, revoked or expired."""


class ForbiddenError(InvalidRequestError):
    """The API key does not permit the request."""


class NotFoundError(InvalidRequestError):
    """The calibrator, fit or route does not exist."""


class ConflictError(InvalidRequestError):
    """The request conflicts with the current state, such as a rollback without an earlier activation."""


class UnavailableError(ProblemError):
    """The service is temporarily unavailable: its queue is full, or it is starting or stopping."""


class TooManyRequestsError(UnavailableError):
    """The API key has reached its rate limit or its limit of concurrent requests."""


class ServiceFaultError(ProblemError):
    """Internal error of the service, or the timeout of the request passed."""


class FitNotSucceededError(ClientError):
    """The fit ended without a calibrator; `fit` is its last state."""

    def __init__(self, fit: "Fit") -> None:
        self.fit = fit
        super().__init__(f"fit {fit.id} {fit.state}" + (f": {fit.error}" if fit.error else ""))

    def __reduce__(self) -> tuple[type[Self], tuple["Fit"]]:
        """Pickle by the argument."""
        return type(self), (self.fit,)


def problem_error(status: int, problem: Mapping[str, Any], retry_after: float | None) -> ProblemError:
    """Return the error class for an HTTP status."""
    leaves: dict[int, type[ProblemError]] = {
        401: UnauthorizedError,
        403: ForbiddenError,
        404: NotFoundError,
        409: ConflictError,
        429: TooManyRequestsError,
        503: UnavailableError,
    }
    fallback = InvalidRequestError if 400 <= status < 500 else ServiceFaultError
    return leaves.get(status, fallback)(status, problem, retry_after)
