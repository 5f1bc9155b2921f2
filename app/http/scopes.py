"""Which scope each route requires. No other place says so; a test compares the table with the routes.

A route that is missing here requires `admin`.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final


class Scope(StrEnum):
    """What a key permits; `admin` permits everything."""

    PREDICT = "predict"
    READ = "read"
    FIT = "fit"
    ACTIVATE = "activate"
    ADMIN = "admin"


class Level(StrEnum):
    """What a route requires instead of a scope."""

    OPEN = "no key"
    KEY = "any key"


Requirement = Scope | Level

ROUTES: Final[dict[tuple[str, str], Requirement]] = {
    ("POST", "/predict"): Scope.PREDICT,
    ("POST", "/calibrate"): Scope.PREDICT,
    ("POST", "/feedback"): Scope.PREDICT,
    ("GET", "/monitor"): Scope.READ,
    ("GET", "/monitor/events"): Scope.READ,
    ("POST", "/monitor/acknowledge"): Scope.ACTIVATE,
    ("GET", "/refits"): Scope.READ,
    ("POST", "/fit"): Scope.FIT,
    ("POST", "/compare"): Scope.FIT,
    ("DELETE", "/fits/{fit_id}"): Scope.FIT,
    ("GET", "/fits"): Scope.READ,
    ("GET", "/fits/{fit_id}"): Scope.READ,
    ("GET", "/fits/{fit_id}/events"): Scope.READ,
    ("GET", "/calibrators"): Scope.READ,
    ("GET", "/calibrators/{version}"): Scope.READ,
    ("GET", "/calibrators/{version}/report"): Scope.READ,
    ("GET", "/calibrators/{version}/report.html"): Scope.READ,
    ("GET", "/calibrators/{version}/reliability.json"): Scope.READ,
    ("GET", "/calibrators/{version}/reliability.svg"): Scope.READ,
    ("GET", "/calibrators/{version}/reliability.png"): Scope.READ,
    ("GET", "/calibrators/{version}/artifact"): Scope.READ,
    ("GET", "/activations"): Scope.READ,
    ("POST", "/calibrators/rollback"): Scope.ACTIVATE,
    ("POST", "/calibrators/{version}/activate"): Scope.ACTIVATE,
    ("GET", "/audit"): Scope.ADMIN,
    ("GET", "/metrics"): Scope.READ,
    ("GET", "/stats"): Scope.READ,
    ("GET", "/model"): Level.KEY,
    ("GET", "/methods"): Level.KEY,
    ("GET", "/version"): Level.KEY,
    ("GET", "/whoami"): Level.KEY,
    ("POST", "/v2/models/{model}/infer"): Scope.PREDICT,
    ("POST", "/v2/models/{model}/versions/{version}/infer"): Scope.PREDICT,
    ("GET", "/v2"): Level.KEY,
    ("GET", "/v2/models/{model}"): Level.KEY,
    ("GET", "/v2/models/{model}/versions/{version}"): Level.KEY,
    ("GET", "/v2/models/{model}/ready"): Level.KEY,
    ("GET", "/v2/models/{model}/versions/{version}/ready"): Level.KEY,
    ("GET", "/v2/models/{model}/config"): Level.KEY,
    ("GET", "/v2/models/{model}/versions/{version}/config"): Level.KEY,
    ("GET", "/v2/models/stats"): Scope.READ,
    ("GET", "/v2/models/{model}/stats"): Scope.READ,
    ("GET", "/v2/models/{model}/versions/{version}/stats"): Scope.READ,
    ("POST", "/v2/repository/index"): Level.KEY,
    ("GET", "/v2/health/live"): Level.OPEN,
    ("GET", "/v2/health/ready"): Level.OPEN,
    ("GET", "/health/live"): Level.OPEN,
    ("GET", "/health/ready"): Level.OPEN,
    ("GET", "/openapi.json"): Level.OPEN,
    ("GET", "/docs"): Level.OPEN,
    ("GET", "/docs/"): Level.OPEN,
    ("GET", "/"): Level.OPEN,
    ("GET", "/ui"): Level.OPEN,
    ("GET", "/ui/"): Level.OPEN,
    ("GET", "/ui/{digest}/{name}"): Level.OPEN,
}
"""The requirement by method and path template. To add a route to the service, add it here."""


def permitted(scopes: frozenset[Scope]) -> frozenset[Requirement]:
    """Return every requirement that a key with these scopes meets."""
    granted = frozenset(Scope) if Scope.ADMIN in scopes else scopes
    return frozenset({*granted, Level.KEY, Level.OPEN})
