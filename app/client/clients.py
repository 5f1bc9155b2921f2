"""The two clients, blocking and for asyncio.

Every method that is one route is made from its function in `calls.py`, which holds its arguments and
documentation for both clients.

The states of a fit come from its event stream and from polling, in order and each once. A stream may never
open (a buffering proxy), break (a restart) or fall silent. So the state is polled between two streams, and
after `STREAM_FAILURES` streams without an event it is only polled.
"""

import asyncio
import functools
import inspect
import os
import ssl
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from contextlib import suppress
from dataclasses import KW_ONLY, InitVar, dataclass, field, replace
from typing import Any, ClassVar, Concatenate, ParamSpec, Self, TypeVar

import httpx
from httpx_sse import SSEError, aconnect_sse, connect_sse
from pydantic import ValidationError

from boxcal.app.client import calls
from boxcal.app.client.errors import (
    AnswerTimeoutError,
    ClientError,
    FitNotSucceededError,
    InvalidKeyError,
    InvalidUrlError,
)
from boxcal.app.client.exchange import Call, RetryPolicy, attempts, parsed, transport_error
from boxcal.app.schemas.fits import Fit
from boxcal.app.schemas.service import Health

DEFAULT_URL = "http://127.0.0.1:8000"
PROXIES = ("ALL_PROXY", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY")
AUTHORITIES = ("SSL_CERT_FILE", "SSL_CERT_DIR")
"""What httpx reads from the environment."""
DEFAULT_TIMEOUT = 35.0
"""Five seconds longer than the service's default."""


@dataclass(repr=False, eq=False)
class ClientBase:
    """What both clients know: where the service is, how long to wait, and when to retry."""

    url: str = field(default_factory=lambda: os.environ.get("BOXCAL_URL") or DEFAULT_URL)
    _: KW_ONLY
    api_key: str | None = None
    timeout: float = DEFAULT_TIMEOUT
    retries: RetryPolicy | None = None
    headers: Mapping[str, str] | None = None
    verify: ssl.SSLContext | bool = True
    http_client: Any = None
    model: InitVar[str | None] = None

    _open: ClassVar[Callable[..., Any]]

    def __post_init__(self, model: str | None) -> None:
        try:
            parsed_url = httpx.URL(self.url)
        except httpx.InvalidURL as error:
            raise InvalidUrlError(f"{self.url!r} is not a URL: {error}") from error
        if parsed_url.scheme not in ("http", "https") or not parsed_url.host:
            raise InvalidUrlError(f"{self.url!r} is not the URL of a service, such as {DEFAULT_URL}")
        self.url = self.url.rstrip("/")
        # Files of secrets end with a line break, which no header may have.
        key = (self.api_key or "").strip() or os.environ.get("BOXCAL_API_KEY", "").strip()
        if not (key.isascii() and key.isprintable()):
            raise InvalidKeyError("the API key has characters that are not printable ASCII; is it complete?")
        self._headers = {**({"Authorization": f"Bearer {key}"} if key else {}), **(self.headers or {})}
        self._policy = self.retries or RetryPolicy()
        self._model = {} if model is None else {"model": model}
        self._http = self._opened() if self.http_client is None else self.http_client

    def _opened(self) -> Any:
        try:
            return self._open(verify=self.verify)
        except (ImportError, ValueError, OSError, httpx.InvalidURL) as error:
            may = AUTHORITIES if isinstance(error, OSError) else PROXIES
            names = [name for name in may if os.environ.get(name) or os.environ.get(name.lower())]
            if not names:
                raise
            raise InvalidUrlError(f"what {' or '.join(names)} names cannot be used: {error}") from error

    def _arguments(self, call: Call[Any]) -> dict[str, Any]:
        """Keyword arguments of httpx for one call."""
        timeout = httpx.Timeout(self.timeout, read=self.timeout + call.extra_seconds)
        given = dict(call.arguments)
        if self._model:
            given["params"] = {**given.get("params", {}), **self._model}
        if self._headers:
            given["headers"] = {**self._headers, **given.get("headers", {})}
        return {"method": call.method, "url": self.url + call.path, "timeout": timeout, **given}

    def _stream_arguments(self, fit_id: str) -> dict[str, Any]:
        """Keyword arguments of httpx for the event stream of a fit."""
        call = calls.fit_events(fit_id)
        return self._arguments(call) | {"timeout": httpx.Timeout(self.timeout, read=SILENCE_SECONDS)}

    def _ready_within(self, seconds: float) -> Call[Health]:
        """Ask whether the service is ready, for at most as long as is left, but at least a second."""
        longest = min(max(seconds, SHORTEST_WAIT), self.timeout)
        return replace(calls.ready(), arguments={"timeout": longest})

    def not_ready(self, seconds: float) -> AnswerTimeoutError:
        """Describe a wait that was too short."""
        return AnswerTimeoutError(f"{self.url} was not ready within {seconds:g} s")


def until(seconds: float) -> Iterator[float]:
    """Yield the seconds that are left: at once, and again as long as the time is not over."""
    end = time.monotonic() + seconds
    yield seconds
    while (left := end - time.monotonic()) > 0:
        yield left


def succeeded(fit: Fit | None) -> Fit:
    """Return the final state of a fit that succeeded; FitNotSucceededError for any other."""
    if fit is None:
        raise AssertionError("following a fit ends with its final state")
    if fit.state != "succeeded":
        raise FitNotSucceededError(fit)
    return fit


STREAM_FAILURES = 3
SHORTEST_WAIT = 1.0
SILENCE_SECONDS = 45.0  # a stream that is silent for longer is closed
FIRST_PAUSE, LONGEST_PAUSE = 0.2, 2.0


class Following:
    """The client's side of following one fit: what to do next, and which states are new."""

    def __init__(self) -> None:
        self.last: Fit | None = None
        self._failures = 0
        self._pause = FIRST_PAUSE

    @property
    def done(self) -> bool:
        """Whether the last state is final."""
        return self.last is not None and self.last.done

    def try_stream(self) -> bool:
        """Whether to open a stream now; one without an event counts as a failure."""
        self._failures += 1  # reset by the first event
        return self._failures <= STREAM_FAILURES

    def event(self, data: str) -> Iterator[Fit]:
        """Take an event of the stream; events of other kinds are skipped."""
        try:
            fit = Fit.model_validate_json(data)
        except ValidationError:
            return
        self._failures = 0
        yield from self.state(fit)

    def state(self, fit: Fit) -> Iterator[Fit]:
        """Take a state, and give it if it is new."""
        if fit != self.last:
            self.last = fit
            self._pause = FIRST_PAUSE
            yield fit

    def pause(self) -> float:
        """Seconds before the next round: longer each time, short again after a change."""
        pause, self._pause = self._pause, min(self._pause * 1.5, LONGEST_PAUSE)
        return pause


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
        Where the service listens; by default the environment variable BOXCAL_URL, else this host's port 8000.
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
    InvalidKeyError
        The API key has characters that are not printable ASCII.

    Examples
    --------
    >>> with BoxcalClient() as client:  # doctest: +SKIP
    ...     client.predict("seven.png", upper=0.75).predictions[0].label
    '7'
    """

    _open = httpx.Client
    _http: httpx.Client

    predict = _blocking(calls.predict)
    predict_tensors = _blocking(calls.predict_tensors)
    predict_features = _blocking(calls.predict_features)
    predict_texts = _blocking(calls.predict_texts)
    calibrate = _blocking(calls.calibrate)
    calibrate_probabilities = _blocking(calls.calibrate_probabilities)
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
        for attempt in attempts(call, retries or self._policy):
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
        for left in until(seconds):
            try:
                if (health := self.send(self._ready_within(left), ONCE)).ready:
                    return health
            except ClientError as error:
                cause = error
            time.sleep(READY_PAUSE)
        raise self.not_ready(seconds) from cause

    def close(self) -> None:
        """Close the connections."""
        if self.http_client is None:
            self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AsyncBoxcalClient(ClientBase):
    """A client of a running service for asyncio; the same methods as `BoxcalClient`, awaited."""

    _open = httpx.AsyncClient
    _http: httpx.AsyncClient

    predict = _awaiting(calls.predict)
    predict_tensors = _awaiting(calls.predict_tensors)
    predict_features = _awaiting(calls.predict_features)
    predict_texts = _awaiting(calls.predict_texts)
    calibrate = _awaiting(calls.calibrate)
    calibrate_probabilities = _awaiting(calls.calibrate_probabilities)
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
        async for attempt in attempts(call, retries or self._policy):
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
        for left in until(seconds):
            try:
                if (health := await self.send(self._ready_within(left), ONCE)).ready:
                    return health
            except ClientError as error:
                cause = error
            await asyncio.sleep(READY_PAUSE)
        raise self.not_ready(seconds) from cause

    async def aclose(self) -> None:
        """Close the connections."""
        if self.http_client is None:
            await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()
