"""The metrics of a service with several models: each model counts its own, told apart by the label `model`.

With one model no series has the label.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from prometheus_client.core import Metric

from boxcal.app.observability.telemetry import Telemetry

OF_SERVICE = ("process_", "boxcal_process_", "boxcal_registry_", "boxcal_background_restarts")
"""Beginnings of the names of metrics that a model does not have."""
OF_BOTH = ("boxcal_request_seconds", "boxcal_rejected")
"""Requests that are for no model, such as health checks, have no label."""


class MetricsOfModels:
    """The metrics of the service and of its models."""

    def __init__(self, service: Telemetry, models: Mapping[str, Telemetry]) -> None:
        self._service = service
        self._models = models

    def collect(self) -> Iterable[Metric]:
        """Return the metrics, each once, with the series of all models."""
        found: dict[str, Metric] = {}
        for metric in self._service.registry.collect():
            if not metric.name.startswith((*OF_SERVICE, *OF_BOTH)):
                metric.samples = []
            found[metric.name] = metric
        for name, telemetry in self._models.items():
            for metric in telemetry.registry.collect():
                if not metric.name.startswith(OF_SERVICE):
                    found[metric.name].samples += [
                        sample._replace(labels={**sample.labels, "model": name}) for sample in metric.samples
                    ]
        return found.values()
