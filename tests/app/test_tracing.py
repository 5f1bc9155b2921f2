"""Spans reach a real OTLP receiver: one per request, with the client's trace as parent, and one per stage."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from boxcal.app.http.problems import InvalidParameter
from boxcal.app.main import create_app
from boxcal.app.observability import tracing
from boxcal.app.settings.service import Settings
from boxcal.models.digits_data import Digits
from tests.app.answering import Quiet, answering
from tests.app.raising import raises_problem
from tests.app.running import running

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@contextmanager
def receiver() -> Iterator[tuple[str, list[Any]]]:
    """Run an OTLP/HTTP receiver; gives its URL and the requests that it decodes."""
    received: list[Any] = []

    class Handler(Quiet):
        def do_POST(self) -> None:  # noqa: N802
            body = self.rfile.read(int(self.headers["content-length"]))
            assert self.path == "/v1/traces"
            received.append(ExportTraceServiceRequest.FromString(body))
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

    with answering(Handler) as url:
        yield url, received


def test_a_prediction_is_traced_by_stage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, digits: Digits
) -> None:
    with receiver() as (url, received):
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", url)
        with running(tmp_path) as service:
            headers = {"content-type": "image/png", "traceparent": f"00-{TRACE}-{PARENT}-01"}
            assert httpx.post(f"{service.url}/predict", content=digits.png(0), headers=headers).is_success
            own = {"traceparent": "00-nonsense"}
            assert httpx.get(f"{service.url}/calibrators/99", headers=own).status_code == 404
            assert httpx.get(f"{service.url}/health/live").is_success
    resources = [one.resource for request in received for one in request.resource_spans]
    names = {a.value.string_value for r in resources for a in r.attributes if a.key == "service.name"}
    assert names == {"boxcal"}
    spans = [
        s for r in received for one in r.resource_spans for scope in one.scope_spans for s in scope.spans
    ]
    by_name = {span.name: span for span in spans}
    stages = {f"boxcal.{stage}" for stage in ("decode", "queue", "backbone", "calibrate")}
    assert set(by_name) == {"POST /predict", "GET /calibrators/{version}", *stages}
    whole = by_name["POST /predict"]
    assert (whole.trace_id.hex(), whole.parent_span_id.hex()) == (TRACE, PARENT)
    assert {a.key: a.value.int_value for a in whole.attributes}["http.response.status_code"] == 200
    for stage in stages:
        span = by_name[stage]
        assert (span.trace_id, span.parent_span_id) == (whole.trace_id, whole.span_id)
        assert span.start_time_unix_nano <= span.end_time_unix_nano <= whole.end_time_unix_nano
    other = by_name["GET /calibrators/{version}"]
    assert other.trace_id.hex() != TRACE
    assert not other.parent_span_id


def test_without_an_endpoint_nothing_is_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in tracing.ENDPOINTS:
        monkeypatch.delenv(name, raising=False)
    assert not isinstance(create_app(Settings()).build_middleware_stack(), tracing.Tracing)


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setitem(__import__("sys").modules, "opentelemetry.sdk.trace", None)
    with raises_problem(InvalidParameter, match=r"pip install 'boxcal\[otel\]'"):
        create_app(Settings())
