"""What each request requires, and the keys that it is checked against."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from starlette.routing import BaseRoute, Match
from starlette.types import Scope as AsgiScope

from boxcal.app.http.scopes import ROUTES, Level, Requirement, Scope

SCOPE_KEY = "boxcal.key"
"""Under this name a request's ASGI scope has its key."""


class KeyCheck(Protocol):
    """The keys of the service, as requests are checked against them."""

    is_required: bool
    """Whether requests need a key."""

    def admit(self, headers: list[tuple[bytes, bytes]], requirement: Requirement) -> Any:
        """Return the key of a request that may pass, or raise the problem that refuses it."""


class Requirements:
    """What each request requires, by the route that will answer it."""

    def __init__(self, routes: Sequence[BaseRoute]) -> None:
        self._routes = routes

    def of(self, scope: AsgiScope) -> Requirement:
        """Return the requirement of a request; paths without a route require a key, but no scope."""
        route = next((route for route in self._routes if route.matches(scope)[0] is Match.FULL), None)
        if route is None:
            return Level.KEY
        scope["route"] = route  # the label of the request in the metrics, also if it is refused
        return ROUTES.get((scope["method"], getattr(route, "path_format", "")), Scope.ADMIN)
