"""Replicas on a Ray cluster: Ray Serve starts, checks and replaces them, and spreads the requests.

A Serve config names `boxcal.app.protocols.ray.replica:application`; see deploy/ray/serve.yaml. Each replica
is the whole service in one process; its settings are the `args` of the config and the environment of the
node.

Stands between Ray Serve and the application, and makes requests arrive as from uvicorn.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from functools import partial
from logging.config import dictConfig
from typing import Any

from ray import serve
from ray.serve._private.common import RequestMetadata, RequestProtocol
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from boxcal.app.main import create_app
from boxcal.app.observability.logs import HEADER, log_config
from boxcal.app.protocols.ray.serve_config import ongoing_limit, replica_settings
from boxcal.app.server import SWITCH_SECONDS
from boxcal.app.settings import limits

REPLICA_MODULE = "boxcal.app.protocols.ray.replica"
ROUTES_OF_RAY = "/-/"


def middlewares() -> list[Middleware]:
    """Return the layers that Ray Serve puts around a replica, and around nothing else on its node.

    The nodes name this function in `RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH`.
    """
    replica = sys.modules.get(REPLICA_MODULE)
    return [] if replica is None else [*replica.layers()]


class ServedApp:
    """The application as Ray Serve calls it.

    Ray Serve runs the lifespan, but does not pass its state to requests (its issue 45395), adds the header
    `X-Request-Id` to every response itself, and cancels a request whose client has disconnected, before the
    application can notice and count it.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self.state: dict[str, Any] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the lifespan, or answer a request."""
        if scope["type"] == "lifespan":
            self.state = scope.setdefault("state", self.state)
            await self._app(scope, receive, send)
            return

        async def send_without_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [pair for pair in message["headers"] if pair[0] != HEADER]
            await send(message)

        request = asyncio.ensure_future(self.answer(scope, receive, send_without_id))
        try:
            await asyncio.shield(request)
        except asyncio.CancelledError:
            await request  # it receives the disconnection, and ends
            raise

    async def answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request that arrives as from uvicorn, but for the state."""
        scope["state"] = self.state.copy()
        await self._app(scope, receive, send)


class Direct:
    """Hands a request to the application without what Ray Serve does for each, but for its own routes."""

    def __init__(
        self, app: ASGIApp, served: ServedApp, began: Callable[[], object], ended: Callable[[], object]
    ) -> None:
        self._app = app
        self._served = served
        self._began = began
        self._ended = ended

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"].startswith(ROUTES_OF_RAY):
            await self._app(scope, receive, send)
            return
        self._began()
        try:
            await self._served.answer(scope, receive, send)
        finally:
            self._ended()


NAME = "boxcal"
CHECK_SECONDS = 2.0


@serve.ingress()
class Replica:
    def __init__(self, args: dict[str, Any]) -> None:
        settings = replica_settings(args)
        sys.setswitchinterval(SWITCH_SECONDS)
        dictConfig(log_config(settings))
        self._app = ServedApp(create_app(settings))

    def __serve_build_asgi_app__(self) -> ServedApp:
        """Return the application; Ray Serve runs its lifespan next."""
        return self._app

    async def check_health(self) -> None:
        """Fail if the replica cannot predict; Ray Serve then replaces it."""
        self._app.state["boxcal"].check_ready()


def application(args: dict[str, Any]) -> Any:
    settings = replica_settings(args)
    deployment = serve.deployment(
        name=NAME,
        max_ongoing_requests=ongoing_limit(settings),
        graceful_shutdown_timeout_s=limits.SHUTDOWN_SECONDS,
        health_check_period_s=CHECK_SECONDS,
        # Ray Serve formats a line of each request even where it is not written, unless the level is higher.
        logging_config={"enable_access_log": False, "log_level": "WARNING"},
    )
    return deployment(Replica).bind(args)


def layers() -> list[Middleware]:
    """Return what stands around this replica, in place of most that Ray Serve does for each request."""
    return [Middleware(_direct)]


def _direct(app: Any) -> Direct:
    # The next layer draws ids; then follows a method of the replica. Ray Serve has no public way to count a
    # request that it does not see.
    replica = app._app.__self__
    counts = replica._metrics_manager
    request = RequestMetadata("", "", _request_protocol=RequestProtocol.HTTP, is_direct_ingress=True)
    return Direct(
        app,
        replica._user_callable_asgi_app,
        partial(counts.inc_num_ongoing_requests, request),
        partial(counts.dec_num_ongoing_requests, request),
    )
