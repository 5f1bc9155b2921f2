"""Replicas on a Ray cluster: Ray Serve starts, checks and replaces them, and spreads the requests.

A Serve config names `boxcal.app.protocols.ray.replica:application`; see deploy/ray/serve.yaml. Each replica
is the whole service in one process; its settings are the `args` of the config and the environment of the
node.
"""

from __future__ import annotations

import sys
from functools import partial
from logging.config import dictConfig
from typing import Any

from ray import serve
from ray.serve._private.common import RequestMetadata, RequestProtocol
from starlette.middleware import Middleware

from boxcal.app.main import create_app
from boxcal.app.observability.logs import log_config
from boxcal.app.protocols.ray.asgi import Direct, ServedApp
from boxcal.app.protocols.ray.serve_config import ongoing_limit, replica_settings
from boxcal.app.server import SWITCH_SECONDS
from boxcal.app.settings import limits

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
