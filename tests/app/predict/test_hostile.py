"""Bodies that cost far more than their size: each is refused or bounded, and the event loop goes on."""

from __future__ import annotations

import gc
import itertools
import string
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import orjson
import pytest

from boxcal.app.http.problems import BodyTooLarge, InvalidInput
from boxcal.app.observability.supervised_task import FreeMemory, resident_bytes
from boxcal.app.predict.bodies import COLLECTION_PAUSE, parse_json
from boxcal.app.predict.inputs import csv_rows
from boxcal.app.predict.lanes import BatchSizer
from boxcal.models.digits_data import Digits
from boxcal.models.inputs import images
from tests.app.raising import raises_problem
from tests.app.running import JSON, NPY, PNG, Service, running
from tests.models.files import write_onnx
from tests.pauses import PAUSES
from tools.hostile.bodies import MIB, json_bodies, npy, png, progressive_jpeg

RAMP = [float(k) for k in range(10)]


def memory_in_use() -> int:
    """Resident bytes of this process, which serves, without the free memory that its schedule returns."""
    gc.collect()
    FreeMemory().give_back()
    return resident_bytes()


@pytest.mark.parametrize("size", [(60_000, 1), (1, 60_000), (49_000_000, 1), (3000, 1)])
def test_images_have_limits_on_sides_and_aspect(http: httpx.Client, size: tuple[int, int]) -> None:
    before = memory_in_use()
    refused = http.post("/predict", content=png(*size), headers=PNG)
    assert refused.status_code == 413
    assert f"{size[0]:,} x {size[1]:,} pixels" in refused.json()["detail"]
    assert memory_in_use() - before < 300 * MIB


def test_a_long_image_within_the_limits_is_read(http: httpx.Client) -> None:
    assert http.post("/predict", content=png(20_000, 150), headers=PNG).status_code == 200


def test_the_memory_of_a_large_image_is_returned(http: httpx.Client) -> None:
    large = png(7000, 7000)
    before = memory_in_use()
    for _ in range(3):
        assert http.post("/predict", content=large, headers=PNG).status_code == 200
    assert memory_in_use() - before < 100 * MIB


def test_a_jpeg_with_many_scans_is_refused(http: httpx.Client) -> None:
    jpeg = {"content-type": "image/jpeg"}
    refused = http.post("/predict", content=progressive_jpeg(1500), headers=jpeg)
    assert refused.status_code == 422
    assert "scans; at most 100" in refused.json()["detail"]
    assert http.post("/predict", content=progressive_jpeg(1), headers=jpeg).status_code == 200


def test_an_image_that_takes_too_long_frees_its_thread(
    http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(images, "DECODE_SECONDS", -1.0)
        refused = http.post("/predict", content=png(1001, 1000), headers=PNG)
    assert refused.status_code == 422
    assert "to decode" in refused.json()["detail"]


def test_a_form_of_many_large_images_is_refused_before_it_is_decoded(
    http: httpx.Client,
) -> None:
    large = png(7000, 7000)
    files = [("file", large) for _ in range(900)]
    refused = http.post("/predict", files=files)
    assert refused.status_code == 413
    assert "44,100,000,000 pixels" in refused.json()["detail"]
    broken = http.post("/predict", files=[("file", b"broken"), *files])
    assert broken.status_code == 422
    assert broken.json()["detail"].startswith("inputs[0]: ")


def test_a_broken_image_cancels_the_others_of_its_request(
    service: Service, monkeypatch: pytest.MonkeyPatch, digits: Digits
) -> None:
    decoded = []
    decoder = service.state.default.pipeline.decoder
    true_sample = decoder._sample

    def sample(sent: Any, name: str) -> Any:
        decoded.append(name)
        return true_sample(sent, name)

    monkeypatch.setattr(decoder, "_sample", sample)
    damaged = digits.png(0)[:-30]
    files = [("file", damaged), *(("file", png(2500, 2500)) for _ in range(100))]
    assert httpx.post(f"{service.url}/predict", files=files, timeout=60).status_code == 422
    assert httpx.post(f"{service.url}/predict", content=digits.png(0), headers=PNG).status_code == 200
    while begun := decoded[:]:  # until nothing more is decoded
        time.sleep(0.5)
        if len(decoded) == len(begun):
            break
    assert len(decoded) < 20


@pytest.mark.parametrize(
    ("path", "body", "statuses"), [pytest.param(*body[1:], id=body[0]) for body in json_bodies()]
)
def test_large_json_does_not_stop_the_event_loop(
    service: Service, path: str, body: bytes, statuses: set[int]
) -> None:
    """Orjson alone would stop it for 1 to 19 s; any test fails where it stops for 0.1 s."""
    answer = httpx.post(f"{service.url}{path}", content=body, headers=JSON, timeout=120)
    assert answer.status_code in statuses, answer.text[:300]


@pytest.mark.parametrize("member", ["image", "text", "unknown"])
def test_long_strings_that_are_not_utf_8_are_refused(http: httpx.Client, member: str) -> None:
    for path, body in (
        ("/predict", b'{"inputs":[{"%b":"%b"}]}'),
        ("/calibrate", b'{"logits":[[0]],"%b":"%b"}'),
    ):
        refused = http.post(path, content=body % (member.encode(), b"\xff" * 2**17), headers=JSON)
        assert refused.status_code in (400, 422), refused.text


@pytest.mark.parametrize(
    ("path", "others"),
    [
        (
            "/predict",
            "image/jpeg or image/png or image/webp or multipart/form-data or application/x-npy or binary",
        ),
        ("/calibrate", "application/x-npy or binary tensors to /v2"),
        ("/v2/models/digits.calibrator/infer", "binary tensors (`binary_data_size`)"),
        ("/feedback", "text/csv"),
    ],
)
@pytest.mark.parametrize("is_announced", [True, False])
def test_json_has_at_most_four_mebibytes(
    http: httpx.Client, path: str, others: str, is_announced: bool
) -> None:
    body = b'{"inputs":[' + b" " * 4 * MIB + b"]}"
    content = body if is_announced else iter([body[: 3 * MIB], body[3 * MIB :]])
    refused = http.post(path, content=content, headers=JSON)
    assert refused.status_code == 413, refused.text
    assert refused.json()["type"] == "urn:boxcal:problem:body-too-large"
    assert "at most 4,194,304 bytes; send more as " in refused.json()["detail"]
    assert others in refused.json()["detail"]


def test_a_small_body_with_a_huge_response_is_refused(service: Service) -> None:
    before = memory_in_use()
    query = {"probabilities": "true", "logits": "true"}
    body = npy(np.zeros((31 * MIB // 10, 10), np.int8))
    refused = httpx.post(f"{service.url}/calibrate", content=body, headers=NPY, params=query, timeout=60)
    assert refused.status_code == 413
    assert f"the limit is {16 * 32 * MIB:,}" in refused.json()["detail"]
    assert memory_in_use() - before < 300 * MIB


@pytest.mark.parametrize(
    "header",
    [
        b"{'descr': '<f8', 'fortran_order': False, 'shape': (1, 10), ",
        b"{'descr': '|S0', 'fortran_order': False, 'shape': (0, 10), }",
        b"{'descr': '|V0', 'fortran_order': False, 'shape': (0, 10), }",
        b"{'descr': '<f8', 'fortran_order': False, 'shape': (%s), }" % (b"0, " * 100),
        b"{'descr': '<f8', 'fortran_order': False, 'shape': (10**30, 0), }",
        b"{'descr': [], 'fortran_order': False, 'shape': (1, 10), }",
        b"'''",
        b"\xff\xfe(",
        b"",
    ],
)
def test_npy_headers_that_lie_are_refused(http: httpx.Client, header: bytes) -> None:
    body = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header) + 1) + header + b"\n" + bytes(80)
    assert http.post("/calibrate", content=body, headers=NPY).status_code in (400, 422)
    assert http.post("/predict", content=body, headers=NPY).status_code in (400, 422)


def test_logits_of_the_backbone_that_are_not_finite_are_a_failure_of_the_service(
    service: Service, monkeypatch: pytest.MonkeyPatch, digits: Digits, caplog: pytest.LogCaptureFixture
) -> None:
    lanes: Any = service.state.default.pipeline.batcher._lanes
    forward = lanes.forward
    monkeypatch.setattr(lanes, "forward", lambda samples, alone: forward(samples, alone) * float("nan"))
    value = service.state.telemetry.registry.get_sample_value
    before = value("boxcal_rejected_total", {"reason": "backbone-failed"}) or 0
    answer = httpx.post(f"{service.url}/predict", content=digits.png(0), headers=PNG)
    assert answer.status_code == 500
    assert "NaN or infinity" in answer.json()["detail"]
    assert value("boxcal_rejected_total", {"reason": "backbone-failed"}) == before + 1
    assert "NaN or infinity" in caplog.text


def test_inputs_on_which_the_model_overflows_are_no_failure_of_the_service(tmp_path: Path) -> None:
    values = np.ones((2, 3, 4, 4), np.float32)
    values[1, 0] = 1e38
    values[1, 0, 3, 1] = 3e38
    with running(tmp_path, model=f"onnx:{write_onnx(tmp_path / 'linear.onnx')}") as service:
        refused = httpx.post(f"{service.url}/predict", content=npy(values), headers=NPY)
        assert refused.status_code == 422
        assert "whose value at [1, 0, 3, 1] is 3e+38" in refused.json()["detail"]
        inputs = {"inputs": [{"tensor": sample.tolist()} for sample in values]}
        assert httpx.post(f"{service.url}/predict", json=inputs).status_code == 422


def test_one_stall_teaches_little_and_is_forgotten() -> None:
    now = 0.0
    sizer = BatchSizer(32, 0.1, clock=lambda: now)
    for _ in range(50):
        sizer.measured(8, 0.08)
        sizer.observe_throughput(8, 0.08)
    before = sizer.wait_for(100)
    sizer.observe_throughput(8, 60.0)
    assert sizer.wait_for(100) < 1.5 * before
    for _ in range(60):
        sizer.observe_throughput(8, 60.0)
    assert sizer.wait_for(100) > 100 * before
    now = 120.0
    assert sizer.wait_for(100) < 1.1 * before


@pytest.mark.parametrize("nested", ["[" * 1000 + "1" + "]" * 1000, '{"a":' * 1000 + "1" + "}" * 1000])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/calibrate", '{"logits":%s}'),
        ("/calibrate", '{"logits":[%s]}'),
        ("/predict", '{"inputs":[1],"options":{"bounds":{"lower":%s}}}'),
        ("/feedback", '{"items":[{"id":%s,"label":1}]}'),
        ("/feedback", '{"items":[{"id":"x","label":%s}]}'),
        ("/feedback", '{"items":[{"logits":[1,2],"label":1,"key":%s}]}'),
        ("/monitor/acknowledge", '{"note":%s}'),
        ("/v2/models/digits/infer", '{"inputs":[{"name":"a","datatype":"FP32","shape":%s,"data":[1]}]}'),
        ("/v2/models/digits/infer", '{"inputs":[],"parameters":%s}'),
        ("/v2/models/digits/infer", '{"inputs":[],"outputs":%s}'),
    ],
)
def test_documents_that_are_nested_too_deeply_are_refused(
    http: httpx.Client, path: str, body: str, nested: str
) -> None:
    answer = http.post(path, content=body % nested, headers=JSON)
    assert answer.status_code in {200, 400, 422}, answer.text
    if answer.status_code == 200:  # a label that cannot be read is named in the answer
        assert answer.json()["malformed"] == 1


def listed(item: bytes, count: int) -> bytes:
    return b"[" + b",".join([item] * count) + b"]"


@pytest.mark.parametrize(
    ("item", "most", "says"),
    [
        (b"[1,2,3]", 249_999, "250,001 lists and objects; the limit is 250,000"),
        (b'{"a":100000000}', 149_999, "300,001 lists, objects and members; the limit is 300,000"),
        (b'""', 750_000, "750,001 strings; the limit is 750,000"),
    ],
)
def test_what_is_slow_to_parse_is_counted_first(item: bytes, most: int, says: str) -> None:
    assert len(parse_json(listed(item, most))) == most
    with raises_problem(BodyTooLarge, says):
        parse_json(listed(item, most + 1))


def peak(body: bytes, parse: str) -> float:
    """Return the most resident memory that a process needs to parse a body, as multiples of its size."""
    code = (
        "import gc, orjson, sys; from psutil import Process; body = sys.stdin.buffer.read(); gc.disable(); "
        "from boxcal.app.predict.bodies import parse_json; open('/proc/self/clear_refs', 'w').write('5'); "
        f"before = Process().memory_info().rss; document = {parse}(body); "
        "most = next(line.split()[1] for line in open('/proc/self/status') if line.startswith('VmHWM')); "
        "print((int(most) * 1024 - before) / len(body))"
    )
    run = subprocess.run([sys.executable, "-c", code], input=body, capture_output=True, check=True)
    return float(run.stdout)


LETTERS = string.ascii_letters + string.digits
NAMES = ["".join(letters) for letters in itertools.islice(itertools.product(LETTERS, repeat=3), 175_000)]


@pytest.mark.parametrize(
    "body",
    [
        *(listed(item, 200_000) for item in (b"[1.555]", b"[0,1,2]", b"[300,300]")),
        listed(b'{"a":0.5,"b":0.25}', 80_000),
        ("{" + ",".join(f'"{name}aa":0' for name in NAMES) + "}").encode(),
        ("[" + ",".join(f'"{name[1:]}"' for name in 4 * NAMES) + "]").encode(),
    ],
    ids=lambda body: body[:20].decode(),
)
def test_a_body_takes_at_most_20_times_its_size_to_parse(body: bytes) -> None:
    assert peak(body, "parse_json") < 20


@pytest.mark.parametrize("cell", [b"1", b"12", b"1.5", b"1.25"])
def test_rows_of_csv_take_at_most_20_times_their_size(cell: bytes) -> None:
    line = b",".join([cell] * 10_000) + b"\n"
    rows = "__import__('boxcal.app.predict.inputs', fromlist=['_']).csv_rows"
    assert peak(line * 100, f"(lambda body: {rows}(body, 1024))") < 20


def test_csv_is_refused_before_it_is_read(http: httpx.Client) -> None:
    """The model reads images, and this would take a second."""
    csv = {"content-type": "text/csv"}
    answer = http.post("/predict", content=b"x," * 4_000_000 + b"x\n1\n", headers=csv)
    assert answer.status_code == 422
    assert answer.json()["detail"] == "The model takes image or tensor, not rows of CSV."
    PAUSES.settle()
    assert PAUSES.longest <= 0.05


def test_lines_of_csv_have_a_limit() -> None:
    most = b",".join([b"1"] * 65_536)
    assert len(csv_rows(most + b"\n" + most, 1)) == 1
    with raises_problem(InvalidInput, "line 2 has 65,537 values; the limit is 65,536"):
        csv_rows(most + b"\n1," + most, 1)


@pytest.mark.parametrize(
    "body",
    [
        *(listed(item, 200_000) for item in (b"[]", b"[[]]", b"[1.5]", b"[300]", b"{}", b'{"a":0}')),
        listed(b'{"a":[]}', 200_000),
        ("{" + ",".join(f'"{name}a":0' for name in NAMES) + "}").encode(),
    ],
    ids=lambda body: body[:20].decode(),
)
def test_a_body_that_would_take_more_is_refused(body: bytes) -> None:
    assert peak(body, "orjson.loads") > 20
    with raises_problem(BodyTooLarge, "The JSON body has about"):
        parse_json(body)


def test_50_000_labels_with_every_member_are_below_the_limits() -> None:
    item = b'{"id":"01936d8f2b7c4d0e9a5f6b1c2d3e4f50","label":1,"propensity":0.5,"source":"a"}'
    assert len(parse_json(listed(item, 50_000))) == 50_000


def test_no_garbage_is_collected_while_a_document_is_parsed() -> None:
    runs: list[Any] = []

    def note(phase: str, info: dict[str, int]) -> None:
        runs.append((phase, info["generation"]))

    body = listed(b"[1,2,3]", 100_000)
    gc.callbacks.append(note)
    try:
        orjson.loads(body)
        assert len(runs) > 20  # without the pause
        runs.clear()
        with COLLECTION_PAUSE:
            parse_json(body)
            assert not gc.isenabled()
            assert runs == []
    finally:
        gc.callbacks.remove(note)
    assert gc.isenabled()


def test_a_parse_that_fails_leaves_the_collector_on() -> None:
    for body in (b"[" + b"1," * 100_000, listed(b"[1.255]", 20_000)[:-1], listed(b"[1,NaN]", 40_000)):
        with pytest.raises(ValueError, match="line 1 column"):
            parse_json(body)
    assert gc.isenabled()


MEMBERS = b"{" + b",".join(b'"%x":1' % n for n in range(299_000)) + b"}"
BODIES = {
    "rows": b'{"%s":' + listed(listed(b"0.25", 10), 79_000) + b"}",
    "lists": b'{"%s":' + listed(b"[1,2]", 249_000) + b"}",
    "strings": b'{"%s":' + listed(b'"a"', 749_000) + b"}",
    "integers": b'{"%s":' + listed(b"18446744073709551615", 199_000) + b"}",
    "members": MEMBERS,
    "options": b'{"%s":[[1]],"options":' + MEMBERS + b"}",
}
ROUTES = {
    "/calibrate": b"logits",
    "/predict": b"inputs",
    "/feedback": b"items",
    "/v2/models/digits.calibrator/infer": b"inputs",
}


@pytest.mark.parametrize("name", BODIES)
@pytest.mark.parametrize("route", ROUTES)
def test_4_mib_of_json_pause_the_event_loop_for_50_ms_at_most(
    http: httpx.Client, route: str, name: str
) -> None:
    body = BODIES[name].replace(b"%s", ROUTES[route])
    assert 2**19 < len(body) <= 2**22
    answer = http.post(route, content=body, headers=JSON)
    assert answer.status_code in (200, 413, 422), answer.text[:500]
    PAUSES.settle()
    assert PAUSES.longest <= 0.05


def test_parameters_of_the_protocol_are_counted(http: httpx.Client) -> None:
    route = "/v2/models/digits.calibrator/infer"
    logits = {"name": "logits", "shape": [1, 10], "datatype": "FP64", "data": [0.0] * 10}
    for count, status in ((64, 200), (65, 422), (299_000, 422)):
        body = {"inputs": [logits], "parameters": {f"zz{n}": 1 for n in range(count)}}
        answer = http.post(route, content=orjson.dumps(body), headers=JSON)
        assert answer.status_code == status, answer.text[:500]
    assert "at most 64 parameters" in answer.text
    PAUSES.settle()
    assert PAUSES.longest <= 0.05


def test_options_of_a_form_are_limited_as_a_json_body_is(http: httpx.Client) -> None:
    too_long = http.post("/predict", files={"file": b"x", "options": b" " * 4_194_304 + b"{}"})
    assert too_long.status_code == 413
    assert "4,194,306 bytes; the limit of JSON is 4,194,304" in too_long.json()["detail"]
    members = http.post("/predict", files={"file": b"x", "options": MEMBERS[:-1] + b',"a":1' * 1_000 + b"}"})
    assert members.status_code == 413
    assert "lists, objects and members" in members.json()["detail"]
    PAUSES.settle()
    assert PAUSES.longest <= 0.05
