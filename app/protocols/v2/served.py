"""What the Open Inference Protocol uses of the running service, over HTTP and gRPC."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from boxcal.app.http.admission import Admission
from boxcal.app.observability.telemetry import Telemetry
from boxcal.app.protocols.v2.inference import Models
from boxcal.app.registry.activator import ActiveCalibrator
from boxcal.app.registry.store import Registry


class ProtocolModel(Protocol):
    """What it uses of a model."""

    @property
    def telemetry(self) -> Telemetry: ...

    @property
    def registry(self) -> Registry:
        """Its calibrators, which are its versions."""

    @property
    def active(self) -> ActiveCalibrator:
        """The calibrator that predictions use."""

    @property
    def v2(self) -> Models:
        """Answers inference requests."""


class ProtocolState(Protocol):
    """What it uses of the service."""

    @property
    def telemetry(self) -> Telemetry:
        """The metrics of the service."""

    @property
    def admission(self) -> Admission:
        """Checks API keys, and counts the bytes of messages."""

    @property
    def is_shared(self) -> bool:
        """Whether several processes serve."""

    @property
    def v2(self) -> Mapping[str, ProtocolModel]:
        """The models by their names in the protocol."""

    def v2_model(self, name: str) -> ProtocolModel:
        """Return a model by its name; raises ModelNotFound."""

    def check_ready(self) -> None:
        """Raise NotReady if a model can no longer predict."""

    def has_failed(self) -> bool:
        """Whether a model can no longer predict."""
