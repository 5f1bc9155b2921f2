"""What each route and RPC requires, and how much it reads. No other place says so; a test compares the table.

One that is missing here requires `admin`.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final, NamedTuple

from boxcal.app.settings import limits


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


class Rule(NamedTuple):
    """What a route or RPC requires of the API key, and the most bytes of its body or message.

    `most_bytes`: None for uploads, which are limited as they are stored.
    """

    requirement: Requirement
    most_bytes: int | None = limits.SMALL_BODY_BYTES


INPUTS = Rule(Scope.PREDICT, limits.MAX_BODY_BYTES)
ROUTES: Final[dict[tuple[str, str], Rule]] = {
    ("POST", "/predict"): INPUTS,
    ("POST", "/calibrate"): INPUTS,
    ("POST", "/feedback"): INPUTS,
    ("GET", "/monitor"): Rule(Scope.READ),
    ("GET", "/monitor/events"): Rule(Scope.READ),
    ("POST", "/monitor/acknowledge"): Rule(Scope.ACTIVATE),
    ("GET", "/refits"): Rule(Scope.READ),
    ("POST", "/fit"): Rule(Scope.FIT, None),
    ("POST", "/compare"): Rule(Scope.FIT, None),
    ("DELETE", "/fits/{fit_id}"): Rule(Scope.FIT),
    ("GET", "/fits"): Rule(Scope.READ),
    ("GET", "/fits/{fit_id}"): Rule(Scope.READ),
    ("GET", "/fits/{fit_id}/events"): Rule(Scope.READ),
    ("GET", "/calibrators"): Rule(Scope.READ),
    ("GET", "/calibrators/{version}"): Rule(Scope.READ),
    ("GET", "/calibrators/{version}/report"): Rule(Scope.READ),
    ("GET", "/calibrators/{version}/report.html"): Rule(Scope.READ),
    ("GET", "/calibrators/{version}/reliability.json"): Rule(Scope.READ),
    ("GET", "/calibrators/{version}/reliability.svg"): Rule(Scope.READ),
    ("GET", "/calibrators/{version}/reliability.png"): Rule(Scope.READ),
    ("GET", "/calibrators/{version}/artifact"): Rule(Scope.READ),
    ("GET", "/activations"): Rule(Scope.READ),
    ("POST", "/calibrators/rollback"): Rule(Scope.ACTIVATE),
    ("POST", "/calibrators/{version}/activate"): Rule(Scope.ACTIVATE),
    ("GET", "/audit"): Rule(Scope.ADMIN),
    ("GET", "/metrics"): Rule(Scope.READ),
    ("GET", "/stats"): Rule(Scope.READ),
    ("GET", "/model"): Rule(Level.KEY),
    ("GET", "/methods"): Rule(Level.KEY),
    ("GET", "/version"): Rule(Level.KEY),
    ("GET", "/whoami"): Rule(Level.KEY),
    ("POST", "/v2/models/{model}/infer"): INPUTS,
    ("POST", "/v2/models/{model}/versions/{version}/infer"): INPUTS,
    ("GET", "/v2"): Rule(Level.KEY),
    ("GET", "/v2/models/{model}"): Rule(Level.KEY),
    ("GET", "/v2/models/{model}/versions/{version}"): Rule(Level.KEY),
    ("GET", "/v2/models/{model}/ready"): Rule(Level.KEY),
    ("GET", "/v2/models/{model}/versions/{version}/ready"): Rule(Level.KEY),
    ("GET", "/v2/models/{model}/config"): Rule(Level.KEY),
    ("GET", "/v2/models/{model}/versions/{version}/config"): Rule(Level.KEY),
    ("GET", "/v2/models/stats"): Rule(Scope.READ),
    ("GET", "/v2/models/{model}/stats"): Rule(Scope.READ),
    ("GET", "/v2/models/{model}/versions/{version}/stats"): Rule(Scope.READ),
    ("POST", "/v2/repository/index"): Rule(Level.KEY),
    ("GET", "/v2/health/live"): Rule(Level.OPEN),
    ("GET", "/v2/health/ready"): Rule(Level.OPEN),
    ("GET", "/health/live"): Rule(Level.OPEN),
    ("GET", "/health/ready"): Rule(Level.OPEN),
    ("GET", "/openapi.json"): Rule(Level.OPEN),
    ("GET", "/docs"): Rule(Level.OPEN),
    ("GET", "/docs/"): Rule(Level.OPEN),
    ("GET", "/"): Rule(Level.OPEN),
    ("GET", "/ui"): Rule(Level.OPEN),
    ("GET", "/ui/"): Rule(Level.OPEN),
    ("GET", "/ui/{digest}/{name}"): Rule(Level.OPEN),
}
"""By method and path template. To add a route to the service, add it here."""
RPCS: Final[dict[str, Rule]] = {
    "/inference.GRPCInferenceService/ModelInfer": Rule(Scope.PREDICT, limits.MAX_MESSAGE_BYTES),
    "/inference.GRPCInferenceService/ModelStatistics": Rule(Scope.READ),
    "/inference.GRPCInferenceService/ModelReady": Rule(Level.KEY),
    "/inference.GRPCInferenceService/ModelMetadata": Rule(Level.KEY),
    "/inference.GRPCInferenceService/ModelConfig": Rule(Level.KEY),
    "/inference.GRPCInferenceService/ServerMetadata": Rule(Level.KEY),
    "/inference.GRPCInferenceService/RepositoryIndex": Rule(Level.KEY),
    "/inference.GRPCInferenceService/ServerLive": Rule(Level.OPEN),
    "/inference.GRPCInferenceService/ServerReady": Rule(Level.OPEN),
    "/grpc.health.v1.Health/Check": Rule(Level.OPEN),
    "/grpc.health.v1.Health/List": Rule(Level.OPEN),
    "/grpc.health.v1.Health/Watch": Rule(Level.OPEN),
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": Rule(Level.KEY),
}
UNKNOWN = Rule(Scope.ADMIN)
"""Of a route or RPC that is missing."""


def permitted(scopes: frozenset[Scope]) -> frozenset[Requirement]:
    """Return every requirement that a key with these scopes meets."""
    granted = frozenset(Scope) if Scope.ADMIN in scopes else scopes
    return frozenset({*granted, Level.KEY, Level.OPEN})
