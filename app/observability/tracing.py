"""Traces requests with OpenTelemetry, if `OTEL_EXPORTER_OTLP_ENDPOINT` is set; needs the extra `otel`.

One span per request, whose parent is the W3C `traceparent` of the client, and one span per stage of a
prediction. The OTEL_* variables of the OpenTelemetry SDK configure sampling, names and headers. Without an
endpoint nothing is imported, and no layer is added to the application.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from boxcal.app.http.problems import InvalidParameter
from boxcal.app.schemas.predictions import STAGES

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
FLUSH_SECONDS = 3.0
NOT_TRACED = ("/health/", "/metrics")
STAGES_KEY = "boxcal.stages"
"""Key of a request's scope: called with the seconds of each stage of a prediction."""


def provider_from_environment() -> TracerProvider | None:
    """Return the SDK's provider with an OTLP/HTTP exporter, or None if no endpoint is set."""
    endpoint = next((name for name in ENDPOINTS if os.environ.get(name)), None)
    if endpoint is None:
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter  # noqa: PLC0415
        from opentelemetry.sdk.resources import SERVICE_NAME, OTELResourceDetector, Resource  # noqa: PLC0415
        from opentelemetry.sdk.trace import TracerProvider  # noqa: PLC0415
        from opentelemetry.sdk.trace.export import BatchSpanProcessor  # noqa: PLC0415
    except ImportError as error:
        raise InvalidParameter(
            f"{endpoint} is set, but OpenTelemetry is not installed: pip install 'boxcal[otel]'."
        ) from error
    named = Resource.create({SERVICE_NAME: "boxcal"}).merge(OTELResourceDetector().detect())
    provider = TracerProvider(resource=named)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return provider


class Tracing:
    """The outermost layer of the application: a span around each request, but health checks and scrapes."""

    def __init__(self, app: ASGIApp, provider: TracerProvider) -> None:
        from opentelemetry.trace.propagation.tracecontext import (  # noqa: PLC0415
            TraceContextTextMapPropagator,
        )

        self._app = app
        self._provider = provider
        self._tracer = provider.get_tracer("boxcal")
        self._propagator = TraceContextTextMapPropagator()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, self._flushing(send))
        elif scope["path"].startswith(NOT_TRACED):
            await self._app(scope, receive, send)
        else:
            await self._traced(scope, receive, send)

    def _flushing(self, send: Send) -> Send:
        """Export what is left before the end of the lifespan is reported, but do not wait long for it."""

        async def flush_and_send(message: Message) -> None:
            if message["type"].startswith("lifespan.shutdown"):
                last = threading.Thread(target=self._provider.shutdown, daemon=True)
                last.start()
                await asyncio.to_thread(last.join, FLUSH_SECONDS)
            await send(message)

        return flush_and_send

    async def _traced(self, scope: Scope, receive: Receive, send: Send) -> None:
        from opentelemetry.trace import SpanKind, StatusCode  # noqa: PLC0415 - imported already

        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        attributes = {"http.request.method": scope["method"], "url.path": scope["path"]}
        status = 0

        async def send_and_note(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        with self._tracer.start_as_current_span(
            scope["method"], self._propagator.extract(headers), SpanKind.SERVER, attributes
        ) as span:
            scope[STAGES_KEY] = self._stages
            await self._app(scope, receive, send_and_note)
            route = scope["route"].path_format if "route" in scope else scope["path"] if status < 400 else ""
            if route:
                span.update_name(f"{scope['method']} {route}")
                span.set_attribute("http.route", route)
            span.set_attribute("http.response.status_code", status)
            if status >= 500:
                span.set_status(StatusCode.ERROR)

    def _stages(self, seconds: Mapping[str, float]) -> None:
        """Add a span for each stage that has just ended, one behind the other."""
        start = time.time_ns() - round(1e9 * seconds["total"])
        for stage in STAGES:
            if stage != "total" and stage in seconds:
                end = start + round(1e9 * seconds[stage])
                self._tracer.start_span(f"boxcal.{stage}", start_time=start).end(end)
                start = end
