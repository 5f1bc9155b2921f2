"""What a request to one route is, when it is retried, and how its response is read; shared by both clients.

Retries 503 and 429 responses, honouring `Retry-After`; never retries a request that may have taken effect. A
request that was not sent (no connection) is always retried. A request without effects is retried after any
503 and after a lost connection; one with effects only where the service's own problem document says that it
refused before any work. A timeout is never retried: the service is slow already.
"""

import email.utils
import logging
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import httpx
import stamina
from pydantic import ValidationError

from boxcal.app.client import errors

T = TypeVar("T")

REFUSED_BEFORE_WORK = frozenset(
    f"urn:boxcal:problem:{kind}"
    for kind in ("not-ready", "queue-full", "fit-queue-full", "rate-limited", "concurrency-limited")
)
"""Types of the 503 and 429 problems with which the service refuses before it does anything."""

logging.getLogger("stamina").addHandler(logging.NullHandler())  # an application may still listen to retries


@dataclass(frozen=True)
class Call(Generic[T]):
    """A request to one route and how its response is read.

    Attributes
    ----------
    parse
        Turns a response with one of the `accepts` statuses into the result.
    arguments
        Further keyword arguments of `httpx.Client.request`: params, headers, content, files, data.
    has_effect
        Whether sending it twice may do more than sending it once.
    accepts
        Statuses that are a result; every other one is an error.
    extra_seconds
        How long the service was asked to wait, in addition to the client's timeout.
    """

    method: str
    path: str
    parse: Callable[[httpx.Response], T]
    arguments: Mapping[str, Any] = field(default_factory=dict)
    has_effect: bool = False
    accepts: frozenset[int] = frozenset({200, 202, 204})
    extra_seconds: float = 0.0


@dataclass(frozen=True)
class RetryPolicy:
    """How often and how long to retry.

    Parameters
    ----------
    retries
        Maximum number of retries; 0 for none.
    longest_wait
        No retry begins later than this many seconds after the call. A longer wait raises at once.
    first_wait
        Seconds before the first retry where the service names none; each further wait is doubled. Every wait
        is up to a tenth longer, so that many clients do not retry at once.
    """

    retries: int = 4
    longest_wait: float = 30.0
    first_wait: float = 0.2


def attempts(call: Call[Any], policy: RetryPolicy) -> Any:
    """Give the attempts of a call, each a context manager that catches what the next one may repair."""
    began, doubled = time.monotonic(), policy.first_wait

    def backoff(error: Exception) -> bool | float:
        nonlocal doubled
        if not _may_retry(call, error):
            return False
        retry_after = getattr(error, "retry_after", None)
        wait = doubled if retry_after is None else float(retry_after)
        wait *= random.uniform(1.0, 1.1)  # noqa: S311 - spreads the load of many clients
        doubled *= 2
        return wait if time.monotonic() - began + wait <= policy.longest_wait else False

    return stamina.retry_context(
        backoff,
        attempts=policy.retries + 1 if policy.longest_wait > 0 else 1,
        timeout=None,
    )


def parsed(call: Call[T], response: httpx.Response) -> T:
    """Read a response.

    Raises
    ------
    ClientError
        Its status is an error, or its body is not what the route returns.
    """
    if response.status_code not in call.accepts:
        raise _problem(response)
    try:
        return call.parse(response)
    except (ValidationError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise errors.UnreadableAnswerError(
            f"{response.request.url} answered something else than this client expects: {error}"
        ) from error


def transport_error(error: httpx.RequestError) -> errors.TransportError:
    """Turn httpx's error into the client's own."""
    url = error.request.url
    if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
        return errors.UnreachableError(f"cannot reach {url}: {error or type(error).__name__}")
    if isinstance(error, httpx.PoolTimeout):
        return errors.UnreachableError(
            f"no connection became free in time to reach {url}; make fewer calls at once"
        )
    if isinstance(error, httpx.TimeoutException):
        return errors.AnswerTimeoutError(f"{url} did not answer in time")
    return errors.ConnectionLostError(f"the connection to {url} broke: {error or type(error).__name__}")


def _may_retry(call: Call[Any], error: Exception) -> bool:
    if isinstance(error, errors.UnavailableError):
        return not call.has_effect or error.type in REFUSED_BEFORE_WORK
    if isinstance(error, errors.ConnectionLostError):
        return not call.has_effect
    return isinstance(error, errors.UnreachableError)


def _problem(response: httpx.Response) -> errors.ClientError:
    try:
        problem = response.json()
    except (ValueError, RecursionError):
        problem = None
    if not isinstance(problem, dict):
        text = " ".join(response.text.split())[:200]
        if response.status_code not in (502, 503, 504):  # those a proxy sends for the service
            return errors.UnreadableAnswerError(
                f"{response.request.url} answered HTTP {response.status_code}, no problem document: {text!r}"
            )
        problem = {"title": response.reason_phrase, "detail": text or response.reason_phrase}
    return errors.problem_error(response.status_code, problem, _retry_after(response))


def _retry_after(response: httpx.Response) -> float | None:
    """Read Retry-After, a number of seconds or a date (RFC 9110, section 10.2.3), as seconds."""
    value = response.headers.get("retry-after", "").strip()
    try:
        return max(0.0, float(value))
    except ValueError:
        pass
    try:
        return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - time.time())
    except ValueError:
        return None
