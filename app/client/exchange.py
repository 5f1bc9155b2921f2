"""One request and its answer without any input or output: retries, waiting and reading what came back.

The core is a generator: it yields `Request`s and `Sleep`s, is sent what became of them, and returns the
parsed answer. The transports in `clients.py` only carry those out, one by blocking calls, one by asyncio.

What may be repeated: a request that never left (no connection) and one the service refused with 503 had no
effect, so any call repeats them, after `Retry-After` where the service names it. A request that may have
arrived is repeated only where asking twice does no more than asking once. A request that timed out is not:
the service is slow already.
"""

import email.utils
import random
import time
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import httpx
from pydantic import ValidationError

from boxcal.app.client import errors

__all__ = ["Call", "Outcome", "Request", "RetryPolicy", "Sleep", "Steps", "exchange", "problem_of"]

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Call(Generic[T]):
    """A request to one route and how its answer is read.

    Attributes
    ----------
    arguments
        Further keyword arguments of `httpx.Client.build_request`: params, headers, content, files, data.
    parse
        Turns the answer into the result; called for `accepts` statuses only.
    repeatable
        Asking twice does no more than asking once.
    accepts
        Statuses that are an answer; every other one is an error.
    extra_seconds
        What the route may take beyond the client's timeout because it was asked to wait.
    """

    method: str
    path: str
    parse: Callable[[httpx.Response], T]
    arguments: Mapping[str, Any] = field(default_factory=dict)
    repeatable: bool = True
    accepts: frozenset[int] = frozenset({200, 202, 204})
    extra_seconds: float = 0.0


@dataclass(frozen=True)
class Request:
    """A step: send this and report the response or the transport's exception."""

    call: Call[Any]


@dataclass(frozen=True)
class Sleep:
    """A step: wait this long."""

    seconds: float


Outcome = httpx.Response | httpx.RequestError | None
Steps = Generator[Request | Sleep, Outcome, T]


@dataclass(frozen=True)
class RetryPolicy:
    """How long to go on asking.

    Parameters
    ----------
    retries
        How often a request is repeated at most; 0 never repeats.
    longest_wait
        Seconds of waiting in all. A `Retry-After` beyond what is left of it raises at once.
    first_wait
        Seconds before the first repetition where the service names none; each further one doubles it.
    """

    retries: int = 4
    longest_wait: float = 30.0
    first_wait: float = 0.2

    def wait(self, repetition: int, retry_after: float | None) -> float:
        """Seconds before a repetition (0 is the first), never less than `retry_after`, a little random."""
        if retry_after is not None:
            return retry_after * random.uniform(1.0, 1.1)  # noqa: S311 - spreads load, guards nothing
        return self.first_wait * 2.0**repetition * random.uniform(0.5, 1.0)  # noqa: S311


def exchange(call: Call[T], policy: RetryPolicy) -> Steps[T]:
    """Send a call, repeat it as the policy and the call allow, and return its parsed answer.

    Raises
    ------
    ClientError
        The last failure, once nothing is left to try.
    """
    waited = 0.0
    for repetition in range(policy.retries + 1):
        outcome = yield Request(call)
        if isinstance(outcome, httpx.Response) and outcome.status_code in call.accepts:
            return _parsed(call, outcome)
        failure = _failure(outcome)
        wait = policy.wait(repetition, getattr(failure, "retry_after", None))
        if (
            repetition == policy.retries
            or not _may_repeat(call, failure)
            or waited + wait > policy.longest_wait
        ):
            raise failure from (outcome if isinstance(outcome, Exception) else None)
        waited += wait
        yield Sleep(wait)
    raise AssertionError("the last repetition returns or raises")


def problem_of(response: httpx.Response) -> errors.ClientError:
    """Read an answer that is an error; its body must have been read."""
    try:
        problem = response.json()
    except ValueError:
        problem = None
    if not isinstance(problem, dict):
        text = " ".join(response.text.split())[:200]
        if response.status_code in (502, 503, 504):  # a proxy in front speaks for the service
            problem = {"title": response.reason_phrase, "detail": text or response.reason_phrase}
        else:
            return errors.UnreadableAnswerError(
                f"{response.request.url} answered HTTP {response.status_code}, no problem document: {text!r}"
            )
    return errors.problem_error(response.status_code, problem, _retry_after(response))


def _may_repeat(call: Call[Any], failure: errors.ClientError) -> bool:
    if isinstance(failure, errors.UnreachableError | errors.UnavailableError):
        return True
    return call.repeatable and isinstance(failure, errors.ConnectionLostError)


def _failure(outcome: Outcome) -> errors.ClientError:
    """Name what went wrong in the client's own tree."""
    if isinstance(outcome, httpx.Response):
        return problem_of(outcome)
    if outcome is None:
        raise AssertionError("a request must be answered by a response or an exception")
    url = outcome.request.url
    reason = str(outcome) or type(outcome).__name__
    if isinstance(outcome, httpx.ConnectError | httpx.ConnectTimeout):
        return errors.UnreachableError(f"cannot reach {url}: {reason}")
    if isinstance(outcome, httpx.TimeoutException):
        return errors.AnswerTimeoutError(f"{url} did not answer in time")
    return errors.ConnectionLostError(f"the connection to {url} broke: {reason}")


def _parsed(call: Call[T], response: httpx.Response) -> T:
    try:
        return call.parse(response)
    except (ValidationError, ValueError, KeyError) as error:
        raise errors.UnreadableAnswerError(
            f"{response.request.url} answered something else than this client expects: {error}"
        ) from error


def _retry_after(response: httpx.Response) -> float | None:
    """Seconds named by Retry-After, which is a number of seconds or a date (RFC 9110, section 10.2.3)."""
    value = response.headers.get("retry-after", "").strip()
    if not value:
        return None
    try:
        return max(0.0, float(value))
    except ValueError:
        pass
    try:
        return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - time.time())
    except ValueError:
        return None
