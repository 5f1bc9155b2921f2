"""Every documented route asked in order, so that answers of two services can be compared."""

from __future__ import annotations

import io
import json
import re
import time
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
from PIL import Image

from boxcal.app.http.scopes import ROUTES
from tests.app.fitting.validation_data import CONTENT_TYPE, form, overconfident, validation_npz

JSON = "application/json"
ROW = [0.5 * n for n in range(10)]
UPLOAD = {"content-type": CONTENT_TYPE}
SECONDS = 120.0
COMPARED = re.compile(
    r"boxcal-.*|content-type|content-disposition|allow|location|retry-after|cache-control|etag"
)
BY_SHAPE = {"/stats", "/metrics", "/monitor", "/v2/models/digits/stats", "/v2/models/digits/versions/1/stats"}
"""Answers that tell what a process has done, or how far the monitor is."""
OF_ONE_REPLICA = re.compile(r"boxcal_fit_seconds.*|rejected")
"""Metrics that only the process has that fitted or refused something."""
ENDLESS = {"/monitor/events"}
SKIPPABLE = {"/refits"}
"""The monitor skips an activation that another one follows at once: only what kinds there are is compared."""
CHANGING = re.compile(
    r"[0-9a-f]{16,}(-\d+)?|\d{4}-\d\d-\d\d[T ][\d:.]+(Z|\+00:00)?|[0-9a-f]{8}-[0-9a-f-]{27}"
    r"|in \d+(\.\d+)? (ms|s)"
)
"""Ids, moments and durations."""
NUMBERS = re.compile(r"\w+_ms|(fit_|uptime_)?seconds|progress|stage")

Request = tuple[str, str, dict[str, Any]]


def image() -> bytes:
    buffer = io.BytesIO()
    pixels = np.random.default_rng(0).integers(0, 255, (8, 8), dtype=np.uint8)
    Image.fromarray(pixels).resize((64, 64)).save(buffer, "PNG")
    return buffer.getvalue()


def get(*paths: str) -> Iterator[Request]:
    for path in paths:
        yield "GET", path, {}


def requests(found: dict[str, Any]) -> Iterator[Request]:
    """Yield method, path and arguments of httpx; `found` has earlier answers by path."""
    yield from predictions()
    yield from fits(found)
    yield from changes()
    yield from everything_else(found)


def predictions() -> Iterator[Request]:
    upload, rows = {"content": image(), "headers": {"content-type": "image/png"}}, [ROW]
    yield from get("/health/live", "/health/ready", "/model", "/methods", "/version", "/whoami")
    yield "HEAD", "/health/ready", {}
    yield "POST", "/predict?top_k=3&probabilities=true", upload
    yield "POST", "/predict", {"files": {"file": image()}, "data": {"options": '{"bounds": {"upper": 0.5}}'}}
    yield "POST", "/predict", {"content": b"no image", "headers": {"content-type": "image/png"}}
    yield "POST", "/predict", {"json": {"inputs": []}}
    options = {"probabilities": True, "explain": True}
    yield "POST", "/calibrate", {"json": {"logits": rows, "options": options}}
    yield "POST", "/calibrate", {"json": {"logits": [[1, 2]]}}
    yield "POST", "/calibrate", {"content": b'{"logits": [[', "headers": {"content-type": JSON}}
    buffer = io.BytesIO()
    np.save(buffer, np.asarray(rows))
    npy = {"content-type": "application/x-npy", "accept": "application/x-npy"}
    yield "POST", "/calibrate", {"content": buffer.getvalue(), "headers": npy}
    yield "POST", "/calibrate", {"content": b" " * (33 * 2**20), "headers": {"content-type": JSON}}


def fits(found: dict[str, Any]) -> Iterator[Request]:
    uploaded = form(validation_npz(500), method="ts", activate="always")
    yield "POST", "/fit?wait=60", {"content": uploaded, "headers": UPLOAD}
    fit = f"/fits/{found['/fit?wait=60']['id']}"
    yield "POST", "/fit", {"content": form(b"no file", method="ts"), "headers": UPLOAD}
    yield from get(fit, f"{fit}/events")
    yield "DELETE", fit, {}
    yield from get("/fits/none", "/fits?limit=2")
    compared = {"content": form(validation_npz(300, seed=1)), "headers": UPLOAD}
    yield "POST", "/compare?versions=1&methods=ts", compared
    yield from get("/calibrators", "/calibrators/1", "/calibrators/9")
    kinds = ("report", "report.html", "reliability.json", "reliability.svg", "reliability.png", "artifact")
    yield from get(*(f"/calibrators/1/{kind}" for kind in kinds))


def changes() -> Iterator[Request]:
    rows = [ROW]
    yield "POST", "/calibrators/rollback", {}
    yield "POST", "/calibrators/1/activate", {}
    yield "POST", "/calibrate", {"json": {"logits": rows, "options": {"calibrator": 1}}}
    yield "GET", "/activations", {}
    logits, labels = overconfident(50)
    items = [{"logits": row.tolist(), "label": int(label)} for row, label in zip(logits, labels, strict=True)]
    yield "POST", "/feedback", {"json": {"items": items}}
    yield from get("/monitor", "/monitor/events")
    yield "POST", "/monitor/acknowledge", {}
    yield "GET", "/refits", {}


def everything_else(found: dict[str, Any]) -> Iterator[Request]:
    tensor = {"name": "input", "shape": [1, 10], "datatype": "FP32", "data": ROW}
    yield from get("/audit?limit=3", "/metrics", "/stats", "/v2", "/v2/health/live", "/v2/health/ready")
    yield "POST", "/v2/repository/index", {}
    for model in ("/v2/models/digits", "/v2/models/digits/versions/1"):
        yield from get(model, f"{model}/ready", f"{model}/stats")
        yield "POST", f"{model}/infer", {"json": {"inputs": [{**tensor, "name": "logits"}]}}
        yield "POST", f"{model}/infer", {"json": {"inputs": [tensor]}}
    yield from get("/openapi.json", "/docs", "/", "/ui", "/ui/")
    digest = re.search(r"/?ui/([^/\"]+)/main.js", found["/ui/"]) or re.search(
        r"([0-9a-f]{8,})/main.js", found["/ui/"]
    )
    yield from get(f"/ui/{digest[1] if digest else 'none'}/main.js", "/none")
    yield "PUT", "/predict", {}


def answers(url: str) -> list[tuple[str, Any]]:
    """Ask one service everything; gives each request with what is compared of its answer."""
    found: dict[str, Any] = {}
    told = []
    with httpx.Client(base_url=url, timeout=SECONDS) as client:
        for number, (method, path, arguments) in enumerate(requests(found)):
            id_ = f"request-{number}"
            headers = {**arguments.pop("headers", {}), "x-request-id": id_, "host": "service.example"}
            with client.stream(method, path, headers=headers, **arguments) as answer:
                if path not in ENDLESS:
                    answer.read()
            kind = answer.headers.get("content-type", "")
            content = b"" if path in ENDLESS else answer.content
            is_json = "json" in kind.partition(";")[0] and content
            document = json.loads(content) if is_json else content.decode(errors="replace")
            found[path] = document
            told.append((f"{method} {path}", comparable(path, answer, document, id_)))
            if method != "GET":
                time.sleep(0.5)  # the other replicas follow
    return told


def comparable(path: str, answer: httpx.Response, document: Any, id_: str) -> dict[str, Any]:
    """Take ids, moments and durations out of an answer."""
    headers = {name: value for name, value in answer.headers.items() if COMPARED.fullmatch(name)}
    place = path.partition("?")[0]
    if place in BY_SHAPE:
        names = {re.split(r"[{ ]", line)[0] for line in str(document).splitlines()}
        names = {name for name in names if not OF_ONE_REPLICA.fullmatch(name)}
        body: Any = shape(document) if isinstance(document, dict) else dict.fromkeys(names)
    elif place in SKIPPABLE:
        body = {decision["kind"]: shape(decision) for decision in document["decisions"]}
    elif isinstance(document, str):
        body = CHANGING.sub("?", document) if "svg" not in place and "png" not in place else len(document) > 0
    else:
        body = masked(document)
    ids = answer.headers.get_list("x-request-id")
    return {"status": answer.status_code, "headers": masked(headers), "body": body, "id": ids == [id_]}


def masked(value: Any) -> Any:
    """Replace ids, moments and durations, at any depth."""
    if isinstance(value, dict):
        return {name: masked(one) for name, one in value.items() if not NUMBERS.fullmatch(name)}
    if isinstance(value, list):
        return [masked(one) for one in value]
    return CHANGING.sub("?", value) if isinstance(value, str) else value


def shape(value: Any) -> Any:
    if not isinstance(value, dict):
        return None
    return {name: shape(one) for name, one in value.items() if not OF_ONE_REPLICA.fullmatch(name)}


def template_of(method: str, path: str) -> tuple[str, str]:
    place = path.partition("?")[0]
    for route in ROUTES:
        pattern = re.sub(r"\{\w+\}", "[^/]+", route[1])
        if route[0] == ("GET" if method == "HEAD" else method) and re.fullmatch(pattern, place):
            return route
    return method, place


def differing(here: Any, there: Any, place: str = "") -> Iterator[str]:
    if isinstance(here, dict) and isinstance(there, dict):
        for name in here.keys() ^ there.keys():
            yield f"{place}.{name} is in one only"
        for name in here.keys() & there.keys():
            yield from differing(here[name], there[name], f"{place}.{name}")
    elif isinstance(here, list) and isinstance(there, list) and len(here) == len(there):
        for number, (one, other) in enumerate(zip(here, there, strict=True)):
            yield from differing(one, other, f"{place}[{number}]")
    elif here != there:
        yield f"{place} is {here!s:.200} | {there!s:.200}"


def compare(one: str, other: str) -> tuple[int, int, set[tuple[str, str]], list[str]]:
    """Compare two services; gives requests, routes, the routes that were not asked, and the differences."""
    first, second = answers(one), answers(other)
    asked = {template_of(*name.split(" ", 1)) for name, _ in first}
    differences = [
        f"{name}: {found}"
        for (name, here), (_, there) in zip(first, second, strict=True)
        for found in differing(here, there)
    ]
    return len(first), len(asked & set(ROUTES)), set(ROUTES) - asked, differences
