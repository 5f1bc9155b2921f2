"""Checks before the measurement that a server returns correct responses."""

from __future__ import annotations

import http.client
import io
import json
from typing import Any

from PIL import Image

from benchmarks.serving.contestants import Task
from benchmarks.serving.payloads import Request, read_answer
from benchmarks.serving.peers.work import Classifier, prepare, softmax_json, top_five
from benchmarks.serving.running import Server


def reference(task: Task, bodies: list[bytes]) -> list[list[float]]:
    """Return the expected responses; for images `BENCH_MODEL` is the model."""
    if task == "logits":
        return [read_answer(task, json.loads(softmax_json(body))) for body in bodies]
    classifier = Classifier(threads=1)
    tensors = [prepare(Image.open(io.BytesIO(body))) for body in bodies]
    return [read_answer(task, top_five(classifier.logits(tensor[None])[0])) for tensor in tensors]


def ask(server: Server, request: Request) -> Any:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    try:
        connection.request("POST", request.path, request.body, {"Content-Type": request.media_type})
        response = connection.getresponse()
        body = response.read()
    finally:
        connection.close()
    if response.status != http.HTTPStatus.OK:
        raise SystemExit(f"{server.contestant.name} answered {response.status}: {body[:500]!r}")
    return json.loads(body)


def check(server: Server, task: Task, requests: list[Request], expected: list[list[float]]) -> None:
    """Send each request once: the top class of 90 % of the images, or every probability, must be correct."""
    answers = [read_answer(task, ask(server, request)) for request in requests]
    if task == "images":
        agreeing = sum(a[0] == b[0] for a, b in zip(answers, expected, strict=True))
        is_right = len(answers[0]) == 5 and agreeing >= 0.9 * len(answers)
    else:
        agreeing = sum(
            max(abs(x - y) for x, y in zip(a, b, strict=True)) < 1e-6
            for a, b in zip(answers, expected, strict=True)
        )
        is_right = agreeing == len(answers)
    if not is_right:
        raise SystemExit(
            f"{server.contestant.name} agrees with the reference on {agreeing} of {len(answers)}"
        )
