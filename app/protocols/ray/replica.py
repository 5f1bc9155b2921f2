"""Replicas on a Ray cluster: Ray Serve starts, checks and replaces them, and spreads the requests.

A Serve config names `boxcal.app.protocols.ray.replica:application`; see deploy/ray/serve.yaml. Each replica
is the whole service in one process; its settings are the `args` of the config and the environment of the
node.
"""

from __future__ import annotations

import sys
from logging.config import dictConfig
from typing import Any, ClassVar

from ray import serve

from boxcal.app.main import create_app
from boxcal.app.observability.logs import log_config
from boxcal.app.protocols.ray.asgi import ServedApp
from boxcal.app.protocols.ray.serve_config import ongoing_limit, replica_settings
from boxcal.app.server import SWITCH_SECONDS
from boxcal.app.settings import limits

NAME = "boxcal"
CHECK_SECONDS = 2.0


class Replica:
    served: ClassVar[ServedApp]
    """Of this process, which has one replica: `serve.ingress` asks a function without arguments for it."""

    def __init__(self, args: dict[str, Any]) -> None:
        settings = replica_settings(args)
        sys.setswitchinterval(SWITCH_SECONDS)
        dictConfig(log_config(settings))
        Replica.served = ServedApp(create_app(settings))

    async def check_health(self) -> None:
        """Fail if the replica cannot predict; Ray Serve then replaces it."""
        self.served.state["boxcal"].check_ready()


def served() -> ServedApp:
    """Return the application, which the constructor has built; Ray Serve runs its lifespan next."""
    return Replica.served


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
    # Not as a decorator: Ray pickles the class that `ingress` makes, and `Replica` itself by its name.
    return deployment(serve.ingress(served)(Replica)).bind(args)
