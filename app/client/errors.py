"""What can go wrong between a caller and the service: the client's error tree.

ClientError
  x InvalidUrlError           the service's address is none; also a ValueError
  x TransportError            no usable answer came
    + UnreachableError        no connection could be made, so nothing was sent
    + ConnectionLostError     the connection broke before the answer was whole
    + AnswerTimeoutError      the answer did not come in time
    + UnreadableAnswerError   something answered, but not as this service does
  x ProblemError              the service refused, and said why in a problem document (RFC 9457)
    + InvalidRequestError     400 to 499, but the two below: what was sent is wrong
      - NotFoundError         404: no such calibrator, fit or route
      - ConflictError         409: the request does not fit the present state
    + UnavailableError        503: try again after `retry_after` seconds
    + ServiceFaultError       the service failed, or ran out of the time it was given
  x FitNotSucceededError      a fit that was waited for failed, was cancelled or was interrupted
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from boxcal.app.client.results import Fit

__all__ = [
    "AnswerTimeoutError",
    "ClientError",
    "ConflictError",
    "ConnectionLostError",
    "FitNotSucceededError",
    "InvalidRequestError",
    "InvalidUrlError",
    "NotFoundError",
    "ProblemError",
    "ServiceFaultError",
    "TransportError",
    "UnavailableError",
    "UnreachableError",
    "UnreadableAnswerError",
]


class ClientError(Exception):
    """Root of everything the client raises on its own account."""


class InvalidUrlError(ClientError, ValueError):
    """What was given as the service's address is no http or https URL."""


class TransportError(ClientError):
    """No usable answer came back."""


class UnreachableError(TransportError):
    """No connection could be made: the service never saw the request."""


class ConnectionLostError(TransportError):
    """The connection broke; the service may or may not have acted on the request."""


class AnswerTimeoutError(TransportError):
    """The answer did not come within the client's timeout."""


class UnreadableAnswerError(TransportError):
    """Something answered that does not speak this service's contract."""


class ProblemError(ClientError):
    """The service refused, and said why.

    Parameters
    ----------
    status
        HTTP status of the answer.
    problem
        The members of the `application/problem+json` document.
    retry_after
        Seconds the service asks to wait, or None where it does not say.

    Attributes
    ----------
    status, type, title, detail, instance
        The standard members of RFC 9457; absent ones have its defaults.
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
        self.retry_after = retry_after
        super().__init__(f"{self.detail} (HTTP {status})")


class InvalidRequestError(ProblemError):
    """What was sent is wrong; `detail` names the class, the sum, the limit or the value."""


class NotFoundError(InvalidRequestError):
    """There is no such calibrator, fit or route."""


class ConflictError(InvalidRequestError):
    """The request does not fit the present state, such as a rollback with nothing to roll back to."""


class UnavailableError(ProblemError):
    """The service refuses for now: its queue is full, it is starting or it is stopping."""


class ServiceFaultError(ProblemError):
    """The service failed, or could not answer within its own limit."""


class FitNotSucceededError(ClientError):
    """A fit ended without a calibrator; `fit` holds its last state."""

    def __init__(self, fit: "Fit") -> None:
        self.fit = fit
        super().__init__(f"fit {fit.id} {fit.state}" + (f": {fit.error}" if fit.error else ""))


def problem_error(status: int, problem: Mapping[str, Any], retry_after: float | None) -> ProblemError:
    """Build the leaf of the tree that belongs to an HTTP status."""
    leaves = {404: NotFoundError, 409: ConflictError, 503: UnavailableError}
    fallback = InvalidRequestError if 400 <= status < 500 else ServiceFaultError
    return leaves.get(status, fallback)(status, problem, retry_after)
