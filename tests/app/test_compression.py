"""Compressed bodies are what they are without the compression: on every route, for every limit."""

from __future__ import annotations

import asyncio
import gzip
import json
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.http as triton
from starlette.types import Message

from boxcal.app.client import BoxcalClient
from boxcal.app.http.middleware import STEP, Decompression
from boxcal.models.digits_data import Digits
from tests.app.fitting.files import npy
from tests.app.fitting.validation_data import validation_npz
from tests.app.running import Service, running

LOGITS = np.array([[1.0, 2.0, 4.0, 0.5, *range(6)]])
JSON = json.dumps({"logits": LOGITS.tolist()}).encode()
HEADERS = {"content-type": "application/json"}


def several_members(data: bytes) -> bytes:
    return gzip.compress(data[:7]) + gzip.compress(b"") + gzip.compress(data[7:])


Compress = Callable[[bytes], bytes]
CODINGS: list[tuple[str, Compress]] = [
    ("gzip", gzip.compress),
    ("X-GZip", gzip.compress),
    ("gzip", several_members),
    ("deflate", zlib.compress),
    ("identity, gzip", gzip.compress),
    ("identity", bytes),
    ("", bytes),
]


def posted(http: httpx.Client, path: str, body: Any, encoding: str, kind: str = "application/json") -> Any:
    return http.post(path, content=body, headers={"content-type": kind, "content-encoding": encoding})


@pytest.mark.parametrize(("encoding", "compress"), CODINGS)
def test_a_body_is_read_without_its_coding(
    http: httpx.Client, digits: Digits, encoding: str, compress: Compress
) -> None:
    image = digits.png(3)
    plain = http.post("/predict", content=image, headers={"content-type": "image/png"}).json()
    found = posted(http, "/predict", compress(image), encoding, "image/png").json()
    assert found["predictions"] == plain["predictions"]
    for body, kind in ((JSON, "application/json"), (npy(LOGITS), "application/x-npy")):
        answer = posted(http, "/calibrate", compress(body), encoding, kind)
        assert (answer.status_code, answer.json()["predictions"][0]["index"]) == (200, 9)


def test_a_body_that_comes_byte_by_byte(http: httpx.Client) -> None:
    def pieces() -> Iterator[bytes]:
        for byte in several_members(JSON):
            yield bytes([byte])

    assert posted(http, "/calibrate", pieces(), "gzip").json()["predictions"][0]["index"] == 9


def test_labels_fits_and_tensors(tmp_path: Path) -> None:
    with (
        running(tmp_path, model="logits:3") as service,
        httpx.Client(base_url=service.url, timeout=60) as http,
    ):
        labels = gzip.compress(b"id,label\nx,1\n")
        assert posted(http, "/feedback", labels, "gzip", "text/csv").json()["unknown"] == 1
        request = http.build_request("POST", "/fit", files={"file": ("v", validation_npz(60, 3))})
        packed = zlib.compress(request.read())
        fit = posted(http, "/fit", packed, "deflate", request.headers["content-type"])
        with BoxcalClient(service.url) as client:
            assert client.wait_for_fit(fit.json()["id"]).samples == 60
        tritons = triton.InferenceServerClient(service.url.removeprefix("http://"))
        given = triton.InferInput("logits", [2, 3], "FP64")
        given.set_data_from_numpy(20 * np.eye(3)[1:])
        for name in ("gzip", "deflate"):
            tensors = tritons.infer("logits:3.calibrator", [given], request_compression_algorithm=name)
            assert tensors.as_numpy("index").tolist() == [1, 2]
        tritons.close()


@pytest.mark.parametrize("encoding", ["br", "zstd", "gzip, gzip", "compress", "utf-8"])
def test_other_codings_are_refused_with_those_that_are_read(http: httpx.Client, encoding: str) -> None:
    answer = posted(http, "/calibrate", JSON, encoding)
    assert (answer.status_code, answer.headers["accept-encoding"]) == (415, "gzip, deflate")
    assert f"The content encoding is '{encoding}'" in answer.json()["detail"]


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (JSON, "not gzip: Error -3 while decompressing data: incorrect header check"),
        (gzip.compress(JSON)[:-3], "ends before its end"),
        (gzip.compress(JSON)[:-8] + bytes(8), "incorrect data check"),
        (gzip.compress(JSON) + b"more", "incorrect header check"),
        (zlib.compress(JSON), "incorrect header check"),
        (b"", "ends before its end"),
        (gzip.compress(b"[") * 1001, "has more than 1,000 members"),
    ],
)
def test_damaged_bodies_are_refused(http: httpx.Client, body: bytes, reason: str) -> None:
    answer = posted(http, "/calibrate", body, "gzip")
    assert (answer.status_code, answer.json()["type"]) == (400, "urn:boxcal:problem:malformed-body")
    assert reason in answer.json()["detail"]


@pytest.mark.parametrize(
    ("path", "kind"), [("/calibrate", "x-npy"), ("/feedback", "json"), ("/predict", "json")]
)
def test_the_limit_of_a_body_is_that_of_its_decompressed_bytes(
    service: Service, path: str, kind: str
) -> None:
    bomb = gzip.compress(bytes(100 * 2**20))
    assert len(bomb) < 2**17
    with httpx.Client(base_url=service.url, timeout=30) as http:
        answer = posted(http, path, bomb, "gzip", f"application/{kind}")
    assert (answer.status_code, answer.json()["type"]) == (413, "urn:boxcal:problem:body-too-large")


def test_each_step_of_decompression_takes_and_gives_at_most_64_kb() -> None:
    data = np.random.default_rng(0).integers(0, 4, 5 * STEP, np.uint8).tobytes() + bytes(20 * STEP)
    packed = gzip.compress(data)

    async def receive() -> Message:
        return {"type": "http.request", "body": packed}

    async def received() -> list[bytes]:
        pieces, more, body = [], True, Decompression(receive, "gzip")
        while more:
            message = await body()
            pieces.append(message["body"])
            more = message["more_body"]
        return pieces

    pieces = asyncio.run(received())
    assert b"".join(pieces) == data
    assert max(map(len, pieces)) == STEP == 65536
