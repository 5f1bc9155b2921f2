"""What both clients know: where the service is, how long to wait, and the arguments of each request."""

import os
import ssl
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import httpx

from boxcal.app.client import calls
from boxcal.app.client.errors import AnswerTimeoutError, FitNotSucceededError, InvalidUrlError
from boxcal.app.client.exchange import Call, RetryPolicy
from boxcal.app.client.following import SILENCE_SECONDS
from boxcal.app.schemas.fits import Fit

DEFAULT_URL = "http://127.0.0.1:8000"
DEFAULT_TIMEOUT = 35.0
"""Five seconds longer than the service's default."""


class ClientBase:
    """What both clients know: where the service is, how long to wait, and when to retry."""

    _open: Callable[..., Any]

    def __init__(
        self,
        url: str = DEFAULT_URL,
        *,
        api_key: str | None = None,
        timeout: float = DEFAULT_TIMEOUT,
        retries: RetryPolicy | None = None,
        headers: Mapping[str, str] | None = None,
        verify: ssl.SSLContext | bool = True,
        http_client: Any = None,
        model: str | None = None,
    ) -> None:
        try:
            parsed_url = httpx.URL(url)
        except httpx.InvalidURL as error:
            raise InvalidUrlError(f"{url!r} is not a URL: {error}") from error
        if parsed_url.scheme not in ("http", "https") or not parsed_url.host:
            raise InvalidUrlError(f"{url!r} is not the URL of a service, such as {DEFAULT_URL}")
        self._url, self._timeout, self._retries = url.rstrip("/"), timeout, retries or RetryPolicy()
        key = api_key or os.environ.get("BOXCAL_API_KEY", "")
        self._headers = {**({"Authorization": f"Bearer {key}"} if key else {}), **(headers or {})}
        self._model = {} if model is None else {"model": model}
        self._owns_client = http_client is None
        self._http = self._open(verify=verify) if http_client is None else http_client

    def _arguments(self, call: Call[Any]) -> dict[str, Any]:
        """Keyword arguments of httpx for one call."""
        timeout = httpx.Timeout(self._timeout, read=self._timeout + call.extra_seconds)
        given = dict(call.arguments)
        if self._model:
            given["params"] = {**given.get("params", {}), **self._model}
        if self._headers:
            given["headers"] = {**self._headers, **given.get("headers", {})}
        return {"method": call.method, "url": self._url + call.path, "timeout": timeout, **given}

    def _stream_arguments(self, fit_id: str) -> dict[str, Any]:
        """Keyword arguments of httpx for the event stream of a fit."""
        call = calls.fit_events(fit_id)
        return self._arguments(call) | {"timeout": httpx.Timeout(self._timeout, read=SILENCE_SECONDS)}

    def not_ready(self, seconds: float) -> AnswerTimeoutError:
        """Describe a wait that was too short."""
        return AnswerTimeoutError(f"{self._url} was not ready within {seconds:g} s")


def until(seconds: float) -> Iterator[None]:
    """Yield at once, and again as long as the time is not over."""
    end = time.monotonic() + seconds
    yield
    while time.monotonic() < end:
        yield


def succeeded(fit: Fit | None) -> Fit:
    """Return the final state of a fit that succeeded; FitNotSucceededError for any other."""
    if fit is None:
        raise AssertionError("following a fit ends with its final state")
    if fit.state != "succeeded":
        raise FitNotSucceededError(fit)
    return fit
