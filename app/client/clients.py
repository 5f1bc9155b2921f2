"""The two clients: thin transports that carry out the steps of `exchange` and hand its results to the caller.

Every method that is one route is made from its function in `calls.py`, so its arguments and documentation
stand there, once, for both clients.
"""

import asyncio
import functools
import inspect
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import suppress
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

import httpx

from boxcal.app.client import calls
from boxcal.app.client.errors import AnswerTimeoutError, ClientError, FitNotSucceededError, InvalidUrlError
from boxcal.app.client.exchange import Call, Outcome, Request, RetryPolicy, Sleep, exchange
from boxcal.app.client.following import SILENCE_SECONDS, Following
from boxcal.app.client.results import Fit, Health

__all__ = ["DEFAULT_URL", "AsyncBoxcalClient", "BoxcalClient"]

DEFAULT_URL = "http://127.0.0.1:8000"
READY_PAUSE = 0.1
ONCE = RetryPolicy(retries=0)

P = ParamSpec("P")
T = TypeVar("T")


class _Settings:
    """What both clients are told: where the service is and how patient to be."""

    def __init__(self, url: str, timeout: float, retries: RetryPolicy | None) -> None:
        self.url = _checked(url)
        self.timeout = timeout
        self.retries = RetryPolicy() if retries is None else retries

    def arguments(self, call: Call[Any]) -> dict[str, Any]:
        """Keyword arguments of httpx for one call."""
        timeout = httpx.Timeout(self.timeout, read=self.timeout + call.extra_seconds)
        return {"method": call.method, "url": self.url + call.path, "timeout": timeout, **call.arguments}

    def stream_arguments(self, call: Call[Any]) -> dict[str, Any]:
        """Keyword arguments of httpx for a call whose answer goes on."""
        return self.arguments(call) | {"timeout": httpx.Timeout(self.timeout, read=SILENCE_SECONDS)}


def _checked(url: str) -> str:
    """Refuse what can never be reached."""
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise InvalidUrlError(f"{url!r} is not a URL: {error}") from error
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise InvalidUrlError(f"{url!r} is not the URL of a service, such as {DEFAULT_URL}")
    return url.rstrip("/")


def _blocking(build: Callable[P, Call[T]]) -> Callable[Concatenate["BoxcalClient", P], T]:
    def method(self: "BoxcalClient", /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self.send(build(*args, **kwargs))

    return _documented(method, build)


def _awaiting(
    build: Callable[P, Call[T]],
) -> Callable[Concatenate["AsyncBoxcalClient", P], Coroutine[Any, Any, T]]:
    async def method(self: "AsyncBoxcalClient", /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self.send(build(*args, **kwargs))

    return _documented(method, build)


F = TypeVar("F", bound=Callable[..., Any])


def _documented(method: F, build: Callable[..., Any]) -> F:
    """Let `help` and editors show the route's own name, words and arguments, behind `self`."""
    functools.update_wrapper(method, build)
    signature = inspect.signature(build)
    this = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    parameters = [this, *signature.parameters.values()]
    method.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return method


class BoxcalClient:
    """A client of a running service that blocks; safe to share between threads.

    Parameters
    ----------
    url
        Where the service listens.
    timeout
        Seconds to connect, to send and to wait for an answer.
    retries
        How refusals and broken connections are repeated.

    Raises
    ------
    InvalidUrlError
        `url` is no http or https URL.

    Examples
    --------
    >>> with BoxcalClient() as client:  # doctest: +SKIP
    ...     client.predict("seven.png", upper=0.75).predictions[0].label
    '7'
    """

    def __init__(
        self, url: str = DEFAULT_URL, *, timeout: float = 30.0, retries: RetryPolicy | None = None
    ) -> None:
        self._settings = _Settings(url, timeout, retries)
        self._http = httpx.Client()

    predict = _blocking(calls.predict)
    predict_tensors = _blocking(calls.predict_tensors)
    calibrate = _blocking(calls.calibrate)
    fit = _blocking(calls.fit)
    fit_arrays = _blocking(calls.fit_arrays)
    fits = _blocking(calls.fits)
    fit_state = _blocking(calls.fit_state)
    cancel_fit = _blocking(calls.cancel_fit)
    calibrators = _blocking(calls.calibrators)
    calibrator = _blocking(calls.calibrator)
    report = _blocking(calls.report)
    reliability_diagram = _blocking(calls.reliability_diagram)
    reliability_image = _blocking(calls.reliability_image)
    reliability_data = _blocking(calls.reliability_data)
    artifact = _blocking(calls.artifact)
    activate = _blocking(calls.activate)
    rollback = _blocking(calls.rollback)
    live = _blocking(calls.live)
    ready = _blocking(calls.ready)
    metrics = _blocking(calls.metrics)

    def send(self, call: Call[T], retries: RetryPolicy | None = None) -> T:
        """Carry out one call, with the client's retries or others."""
        steps = exchange(call, retries or self._settings.retries)
        outcome: Outcome = None
        while True:
            try:
                step = steps.send(outcome)
            except StopIteration as finished:
                result: T = finished.value
                return result
            outcome = self._take(step)

    def _take(self, step: Request | Sleep) -> Outcome:
        if isinstance(step, Sleep):
            time.sleep(step.seconds)
            return None
        try:
            return self._http.request(**self._settings.arguments(step.call))
        except httpx.RequestError as error:
            return error

    def follow(self, fit_id: str) -> Iterator[Fit]:
        """Yield a fit's states as they change, the final one last; by its event stream, or by asking."""
        following = Following()
        stream = self._settings.stream_arguments(calls.fit_events(fit_id))
        while not following.done:
            if following.try_stream():
                with suppress(httpx.RequestError), self._http.stream(**stream) as response:
                    if following.is_stream(response):
                        for line in response.iter_lines():
                            yield from following.line(line)
            if not following.done:
                yield from following.polled(self.send(calls.fit_state(fit_id)))
            if not following.done:
                time.sleep(following.pause())

    def wait_for_fit(self, fit_id: str, on_progress: Callable[[Fit], object] = lambda _: None) -> Fit:
        """Follow a fit to its end and return its final state.

        Raises
        ------
        FitNotSucceededError
            The fit failed, was cancelled or was interrupted.
        """
        last = None
        for last in self.follow(fit_id):
            on_progress(last)
        return _succeeded(last)

    def wait_until_ready(self, seconds: float = 60.0) -> Health:
        """Wait for the service to be ready; AnswerTimeoutError when it is not in time."""
        waiting = _Waiting(self._settings.url, seconds)
        while True:
            with waiting:
                health = self.send(calls.ready(), ONCE)
                if health.ready:
                    return health
            time.sleep(READY_PAUSE)

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AsyncBoxcalClient:
    """A client of a running service for asyncio; the same methods as `BoxcalClient`, awaited."""

    def __init__(
        self, url: str = DEFAULT_URL, *, timeout: float = 30.0, retries: RetryPolicy | None = None
    ) -> None:
        self._settings = _Settings(url, timeout, retries)
        self._http = httpx.AsyncClient()

    predict = _awaiting(calls.predict)
    predict_tensors = _awaiting(calls.predict_tensors)
    calibrate = _awaiting(calls.calibrate)
    fit = _awaiting(calls.fit)
    fit_arrays = _awaiting(calls.fit_arrays)
    fits = _awaiting(calls.fits)
    fit_state = _awaiting(calls.fit_state)
    cancel_fit = _awaiting(calls.cancel_fit)
    calibrators = _awaiting(calls.calibrators)
    calibrator = _awaiting(calls.calibrator)
    report = _awaiting(calls.report)
    reliability_diagram = _awaiting(calls.reliability_diagram)
    reliability_image = _awaiting(calls.reliability_image)
    reliability_data = _awaiting(calls.reliability_data)
    artifact = _awaiting(calls.artifact)
    activate = _awaiting(calls.activate)
    rollback = _awaiting(calls.rollback)
    live = _awaiting(calls.live)
    ready = _awaiting(calls.ready)
    metrics = _awaiting(calls.metrics)

    async def send(self, call: Call[T], retries: RetryPolicy | None = None) -> T:
        """Carry out one call, with the client's retries or others."""
        steps = exchange(call, retries or self._settings.retries)
        outcome: Outcome = None
        while True:
            try:
                step = steps.send(outcome)
            except StopIteration as finished:
                result: T = finished.value
                return result
            outcome = await self._take(step)

    async def _take(self, step: Request | Sleep) -> Outcome:
        if isinstance(step, Sleep):
            await asyncio.sleep(step.seconds)
            return None
        try:
            return await self._http.request(**self._settings.arguments(step.call))
        except httpx.RequestError as error:
            return error

    async def follow(self, fit_id: str) -> AsyncIterator[Fit]:
        """Yield a fit's states as they change, the final one last; by its event stream, or by asking."""
        following = Following()
        stream = self._settings.stream_arguments(calls.fit_events(fit_id))
        while not following.done:
            if following.try_stream():
                with suppress(httpx.RequestError):
                    async with self._http.stream(**stream) as response:
                        if following.is_stream(response):
                            async for line in response.aiter_lines():
                                for fit in following.line(line):
                                    yield fit
            if not following.done:
                for fit in following.polled(await self.send(calls.fit_state(fit_id))):
                    yield fit
            if not following.done:
                await asyncio.sleep(following.pause())

    async def wait_for_fit(self, fit_id: str, on_progress: Callable[[Fit], object] = lambda _: None) -> Fit:
        """Follow a fit to its end and return its final state; raises as `BoxcalClient.wait_for_fit`."""
        last = None
        async for last in self.follow(fit_id):
            on_progress(last)
        return _succeeded(last)

    async def wait_until_ready(self, seconds: float = 60.0) -> Health:
        """Wait for the service to be ready; AnswerTimeoutError when it is not in time."""
        waiting = _Waiting(self._settings.url, seconds)
        while True:
            with waiting:
                health = await self.send(calls.ready(), ONCE)
                if health.ready:
                    return health
            await asyncio.sleep(READY_PAUSE)

    async def aclose(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


def _succeeded(fit: Fit | None) -> Fit:
    if fit is None:
        raise AssertionError("following a fit ends with its final state")
    if fit.state != "succeeded":
        raise FitNotSucceededError(fit)
    return fit


class _Waiting:
    """Around each question for readiness: an unreachable service is not an error until the time is up."""

    def __init__(self, url: str, seconds: float) -> None:
        self._url, self._seconds = url, seconds
        self._until = time.monotonic() + seconds

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> bool:
        if error is None and time.monotonic() < self._until:
            return False
        if error is not None and not isinstance(error, ClientError):
            return False
        if time.monotonic() >= self._until:
            raise AnswerTimeoutError(f"{self._url} was not ready within {self._seconds:g} s") from error
        return True
