"""The two clients, blocking and for asyncio.

Every method that is one route is made from its function in `calls.py` or `predictions.py`, which holds its
arguments and documentation for both clients.
"""

import asyncio
import functools
import inspect
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import suppress
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

import httpx
from httpx_sse import SSEError, aconnect_sse, connect_sse

from boxcal.app.client import calls, predictions
from boxcal.app.client.base import DEFAULT_URL, ClientBase, succeeded, until
from boxcal.app.client.errors import ClientError
from boxcal.app.client.exchange import Call, RetryPolicy, attempts, parsed, transport_error
from boxcal.app.client.following import Following
from boxcal.app.schemas.fits import Fit
from boxcal.app.schemas.health import Health

__all__ = ["DEFAULT_URL", "AsyncBoxcalClient", "BoxcalClient"]

READY_PAUSE = 0.1
ONCE = RetryPolicy(retries=0)

P = ParamSpec("P")
T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])


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


def _documented(method: F, build: Callable[..., Any]) -> F:
    """Let `help` and editors show the route's own name, words and arguments, behind `self`."""
    functools.update_wrapper(method, build)
    signature = inspect.signature(build)
    this = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    parameters = [this, *signature.parameters.values()]
    method.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return method


class BoxcalClient(ClientBase):
    """A blocking client of a running service; safe to share between threads.

    Parameters
    ----------
    url
        Where the service listens.
    api_key
        Sent with every request; by default the environment variable BOXCAL_API_KEY.
    timeout
        Seconds to connect, to send and to wait for a response. The default is longer than the service's own
        timeout, so that the service says what took too long.
    retries
        When requests are retried (`RetryPolicy`).
    headers
        Headers of every request, for example of a proxy that checks who asks.
    verify
        How certificates are verified: False for not at all, or an `ssl.SSLContext`.
    http_client
        An `httpx.Client` (`httpx.AsyncClient` for `AsyncBoxcalClient`) to send requests with: for a proxy, a
        Unix socket (`httpx.HTTPTransport(uds=...)`) or a client certificate. It is not closed, and `verify`
        does not apply to it.
    model
        Name of the model, where the service has several; by default its first one.

    Raises
    ------
    InvalidUrlError
        `url` is not an http or https URL.

    Examples
    --------
    >>> with BoxcalClient() as client:  # doctest: +SKIP
    ...     client.predict("seven.png", upper=0.75).predictions[0].label
    '7'
    """

    _open = httpx.Client
    _http: httpx.Client

    predict = _blocking(predictions.predict)
    predict_tensors = _blocking(predictions.predict_tensors)
    predict_features = _blocking(predictions.predict_features)
    predict_texts = _blocking(predictions.predict_texts)
    calibrate = _blocking(predictions.calibrate)
    calibrate_probabilities = _blocking(predictions.calibrate_probabilities)
    feedback = _blocking(calls.feedback)
    monitor = _blocking(calls.monitor)
    acknowledge = _blocking(calls.acknowledge)
    refits = _blocking(calls.refits)
    fit = _blocking(calls.fit)
    fit_arrays = _blocking(calls.fit_arrays)
    compare = _blocking(calls.compare)
    fits = _blocking(calls.fits)
    fit_state = _blocking(calls.fit_state)
    cancel_fit = _blocking(calls.cancel_fit)
    calibrators = _blocking(calls.calibrators)
    calibrator = _blocking(calls.calibrator)
    report = _blocking(calls.report)
    reliability_diagram = _blocking(calls.reliability_diagram)
    reliability_image = _blocking(calls.reliability_image)
    reliability_data = _blocking(calls.reliability_data)
    report_page = _blocking(calls.report_page)
    activations = _blocking(calls.activations)
    model = _blocking(calls.model)
    calibration_methods = _blocking(calls.calibration_methods)
    version = _blocking(calls.version)
    whoami = _blocking(calls.whoami)
    audit = _blocking(calls.audit)
    stats = _blocking(calls.stats)
    artifact = _blocking(calls.artifact)
    activate = _blocking(calls.activate)
    rollback = _blocking(calls.rollback)
    live = _blocking(calls.live)
    ready = _blocking(calls.ready)
    metrics = _blocking(calls.metrics)

    def send(self, call: Call[T], retries: RetryPolicy | None = None) -> T:
        """Send one call and return its result, with the client's retries or others."""
        for attempt in attempts(call, retries or self._retries):
            with attempt:
                try:
                    response = self._http.request(**self._arguments(call))
                except httpx.RequestError as error:
                    raise transport_error(error) from error
                return parsed(call, response)
        raise AssertionError("the last attempt returns or raises")

    def follow(self, fit_id: str) -> Iterator[Fit]:
        """Yield a fit's states as they change, the final one last; from its event stream, else by polling."""
        following = Following()
        while not following.done:
            if following.try_stream():
                stream = connect_sse(self._http, **self._stream_arguments(fit_id))
                with suppress(httpx.RequestError, SSEError), stream as events:
                    for event in events.iter_sse():
                        yield from following.event(event.data)
            if not following.done:
                yield from following.state(self.send(calls.fit_state(fit_id)))
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
        return succeeded(last)

    def wait_until_ready(self, seconds: float = 60.0) -> Health:
        """Wait for the service to be ready; AnswerTimeoutError when it is not ready in time."""
        cause = None
        for _ in until(seconds):
            try:
                if (health := self.send(calls.ready(), ONCE)).ready:
                    return health
            except ClientError as error:
                cause = error
            time.sleep(READY_PAUSE)
        raise self.not_ready(seconds) from cause

    def close(self) -> None:
        """Close the connections."""
        if self._owns_client:
            self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AsyncBoxcalClient(ClientBase):
    """A client of a running service for asyncio; the same methods as `BoxcalClient`, awaited."""

    _open = httpx.AsyncClient
    _http: httpx.AsyncClient

    predict = _awaiting(predictions.predict)
    predict_tensors = _awaiting(predictions.predict_tensors)
    predict_features = _awaiting(predictions.predict_features)
    predict_texts = _awaiting(predictions.predict_texts)
    calibrate = _awaiting(predictions.calibrate)
    calibrate_probabilities = _awaiting(predictions.calibrate_probabilities)
    feedback = _awaiting(calls.feedback)
    monitor = _awaiting(calls.monitor)
    acknowledge = _awaiting(calls.acknowledge)
    refits = _awaiting(calls.refits)
    fit = _awaiting(calls.fit)
    fit_arrays = _awaiting(calls.fit_arrays)
    compare = _awaiting(calls.compare)
    fits = _awaiting(calls.fits)
    fit_state = _awaiting(calls.fit_state)
    cancel_fit = _awaiting(calls.cancel_fit)
    calibrators = _awaiting(calls.calibrators)
    calibrator = _awaiting(calls.calibrator)
    report = _awaiting(calls.report)
    reliability_diagram = _awaiting(calls.reliability_diagram)
    reliability_image = _awaiting(calls.reliability_image)
    reliability_data = _awaiting(calls.reliability_data)
    report_page = _awaiting(calls.report_page)
    activations = _awaiting(calls.activations)
    model = _awaiting(calls.model)
    calibration_methods = _awaiting(calls.calibration_methods)
    version = _awaiting(calls.version)
    whoami = _awaiting(calls.whoami)
    audit = _awaiting(calls.audit)
    stats = _awaiting(calls.stats)
    artifact = _awaiting(calls.artifact)
    activate = _awaiting(calls.activate)
    rollback = _awaiting(calls.rollback)
    live = _awaiting(calls.live)
    ready = _awaiting(calls.ready)
    metrics = _awaiting(calls.metrics)

    async def send(self, call: Call[T], retries: RetryPolicy | None = None) -> T:
        """Send one call and return its result, with the client's retries or others."""
        async for attempt in attempts(call, retries or self._retries):
            with attempt:
                try:
                    response = await self._http.request(**self._arguments(call))
                except httpx.RequestError as error:
                    raise transport_error(error) from error
                return parsed(call, response)
        raise AssertionError("the last attempt returns or raises")

    async def follow(self, fit_id: str) -> AsyncIterator[Fit]:
        """Yield a fit's states as they change, the final one last; from its event stream, else by polling."""
        following = Following()
        while not following.done:
            if following.try_stream():
                with suppress(httpx.RequestError, SSEError):
                    async with aconnect_sse(self._http, **self._stream_arguments(fit_id)) as events:
                        async for event in events.aiter_sse():
                            for fit in following.event(event.data):
                                yield fit
            if not following.done:
                for fit in following.state(await self.send(calls.fit_state(fit_id))):
                    yield fit
            if not following.done:
                await asyncio.sleep(following.pause())

    async def wait_for_fit(self, fit_id: str, on_progress: Callable[[Fit], object] = lambda _: None) -> Fit:
        """Follow a fit to its end and return its final state; raises as `BoxcalClient.wait_for_fit`."""
        last = None
        async for last in self.follow(fit_id):
            on_progress(last)
        return succeeded(last)

    async def wait_until_ready(self, seconds: float = 60.0) -> Health:
        """Wait for the service to be ready; AnswerTimeoutError when it is not ready in time."""
        cause = None
        for _ in until(seconds):
            try:
                if (health := await self.send(calls.ready(), ONCE)).ready:
                    return health
            except ClientError as error:
                cause = error
            await asyncio.sleep(READY_PAUSE)
        raise self.not_ready(seconds) from cause

    async def aclose(self) -> None:
        """Close the connections."""
        if self._owns_client:
            await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()
