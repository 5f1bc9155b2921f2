"""`/predict` and `/calibrate` over real HTTP: every kind of body, and every way to get it wrong."""

from __future__ import annotations

import base64
import io
import json
from typing import Any

import httpx
import numpy as np
import pytest

from boxcal.app.predict.answers import CalibratedAnswer, CalibrationRequest, calibrate
from boxcal.app.predict.options import Options
from boxcal.app.registry.activator import ServedCalibrator
from boxcal.calibrators.array_calibrator import ArrayCalibrator
from boxcal.models.digits_data import Digits
from tests.app.fitting.files import npy
from tests.app.fitting.validation_data import CONTENT_TYPE, multipart
from tests.app.running import JSON, NPY, PNG

RAMP = [float(k) for k in range(10)]


def problem(response: httpx.Response, status: int) -> str:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/problem+json"
    document = response.json()
    assert document["status"] == status
    assert document["error"] == document["detail"]
    assert document["type"].startswith("urn:boxcal:problem:")
    return str(document["detail"])


def test_every_kind_of_body_gets_the_same_answer(http: httpx.Client, digits: Digits) -> None:
    encoded, options = digits.png(0), {"bounds": {"upper": 0.6}, "top_k": 2, "probabilities": True}
    quoted = '{"bounds": {"upper": 0.6}, "top_k": 2, "probabilities": true}'
    rest = {"top_k": "2", "probabilities": "true"}
    query = {"upper": "0.6", **rest}
    image = {"image": base64.b64encode(encoded).decode()}
    tensor = {"tensor": digits.levels[0].tolist()}
    answers = [
        http.post("/predict", content=encoded, headers=PNG, params=query),
        http.post("/predict", content=encoded, headers=PNG, params={"options": quoted}),
        http.post("/predict", content=encoded, headers=PNG, params={**rest, "bounds": '{"upper": 0.6}'}),
        http.post("/predict", files={"file": encoded}, data={"options": quoted}),
        http.post("/predict", json={"inputs": [image], "options": options}),
        http.post("/predict", json={"inputs": [tensor], "options": options}),
        http.post("/predict", content=npy(digits.levels[:1]), headers=NPY, params=query),
        http.post("/predict", content=npy(digits.levels[:1].astype(np.float64)), headers=NPY, params=query),
        http.post("/predict", content=npy(np.asfortranarray(digits.levels[:1])), headers=NPY, params=query),
    ]
    assert [answer.status_code for answer in answers] == [200] * len(answers)
    documents = [answer.json() for answer in answers]
    predictions = [document.pop("predictions") for document in documents]
    assert all(prediction == predictions[0] for prediction in predictions)
    (prediction,) = predictions[0]
    assert prediction["label"] == str(digits.labels[0])
    assert prediction["probability"] == 0.6
    assert prediction["top"][0] == {
        "label": prediction["label"],
        "index": prediction["index"],
        "probability": 0.6,
        "bound": "upper",
    }
    assert len(prediction["top"]) == 2
    assert len(prediction["probabilities"]) == 10
    assert documents[0]["model"] == "digits"
    assert documents[0]["calibrator"] == {"version": 0, "method": "uncalibrated"}
    assert documents[0]["bounds_relaxed"] is False
    assert list(documents[0]["timing_ms"]) == ["decode", "queue", "backbone", "calibrate", "total"]


def test_several_inputs_are_answered_in_their_order(http: httpx.Client, digits: Digits) -> None:
    files = [("file", digits.png(n)) for n in range(40)]
    answer = http.post("/predict", files=files).json()
    alone = [
        http.post("/predict", content=digits.png(n), headers=PNG).json()["predictions"][0]["index"]
        for n in range(40)
    ]
    assert [prediction["index"] for prediction in answer["predictions"]] == alone
    assert np.mean(np.array(alone) == digits.labels[:40]) > 0.8


@pytest.mark.parametrize(
    "written",
    [
        lambda png: "data:image/png;base64," + base64.b64encode(png).decode(),
        lambda png: "\n DATA:image/x;name=a.png;base64,\r\n" + base64.urlsafe_b64encode(png).decode(),
        lambda png: base64.encodebytes(png).decode(),
        lambda png: base64.b64encode(png).decode().rstrip("="),
        lambda png: base64.urlsafe_b64encode(png).decode().rstrip("="),
    ],
)
def test_base64_as_programs_write_it(http: httpx.Client, digits: Digits, written: Any) -> None:
    padded = [digits.png(n) for n in range(40) if len(digits.png(n)) % 3]
    for png in (padded[0], next(png for png in padded if b"-" in base64.urlsafe_b64encode(png))):
        expected = http.post("/predict", content=png, headers=PNG).json()["predictions"]
        found = http.post("/predict", json={"inputs": [{"image": written(png)}]}).json()
        assert found["predictions"] == expected
        tensor = {"name": "image", "shape": [1], "datatype": "BYTES", "data": [written(png)]}
        (label,) = http.post("/v2/models/digits/infer", json={"inputs": [tensor]}).json()["outputs"][1][
            "data"
        ]
        assert label == expected[0]["label"]


def test_numbers_come_back_as_npy_where_that_is_accepted(http: httpx.Client) -> None:
    logits = np.random.default_rng(0).normal(size=(7, 10)) * 5
    accept = {"accept": "application/x-npy"}
    response = http.post("/calibrate", content=npy(logits), headers=NPY | accept, params={"upper": "0.5"})
    assert response.headers["content-type"] == "application/x-npy"
    assert response.headers["boxcal-calibrator-version"] == "0"
    assert response.headers["boxcal-calibrator-method"] == "uncalibrated"
    assert response.headers["boxcal-bounds-relaxed"] == "false"
    matrix = np.load(io.BytesIO(response.content))
    document = http.post(
        "/calibrate",
        json={"logits": logits.tolist(), "options": {"bounds": {"upper": 0.5}, "probabilities": True}},
    ).json()
    assert matrix.dtype == np.float64
    assert matrix.tolist() == [prediction["probabilities"] for prediction in document["predictions"]]
    assert matrix.max() <= 0.5


def test_5000_rows_that_leave_the_event_loop_keep_their_order(http: httpx.Client) -> None:
    """So many that they are worked on off the event loop."""
    logits = np.random.default_rng(1).normal(size=(5000, 10))
    document = http.post("/calibrate", content=npy(logits), headers=NPY).json()
    assert [p["index"] for p in document["predictions"]] == logits.argmax(axis=1).tolist()


def test_top_k_is_at_most_the_number_of_classes(http: httpx.Client) -> None:
    answer = http.post("/calibrate", json={"logits": [RAMP], "options": {"top_k": 500}}).json()
    assert [entry["index"] for entry in answer["predictions"][0]["top"]] == list(range(9, -1, -1))


def test_a_version_is_used_where_it_is_named(http: httpx.Client) -> None:
    for version in ("active", 0):
        answer = http.post("/calibrate", json={"logits": [RAMP], "options": {"calibrator": version}})
        assert answer.json()["calibrator"]["version"] == 0
    refused = http.post("/calibrate", json={"logits": [RAMP], "options": {"calibrator": 99}})
    assert "99" in problem(refused, 404)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"top_k": 0}, "options.top_k: Input should be greater than or equal to 1, got 0"),
        ({"top_k": "5"}, "options.top_k"),
        ({"top_k": 2.5}, "options.top_k"),
        ({"topk": 5}, "options has a member 'topk'; did you mean 'top_k'? It may have bounds, top_k, "),
        ({"uper": 0.5}, "There is no option 'uper'; did you mean options.bounds.upper?"),
        ({"calibrator": -1}, 'options.calibrator: should be "active" or the number of a version, got -1'),
        ({"calibrator": "best"}, "got 'best'"),
        ({"timeout_ms": 0}, "options.timeout_ms"),
        ({"bounds": {"upper": 0.05}}, "add up to 0.5, below 1"),
        ({"bounds": {"max": 1}}, "options.bounds has a member 'max'; it may have lower, upper."),
        ({"bounds": {"upper": [[0.5] * 10]}}, "bounds.upper[0] is a list; the bounds of a request hold for"),
        ("quick", "options"),
    ],
)
def test_options_that_are_wrong_are_named(http: httpx.Client, options: Any, words: str) -> None:
    assert words in problem(http.post("/calibrate", json={"logits": [RAMP], "options": options}), 422)


@pytest.mark.parametrize(
    ("query", "words"),
    [
        ("top_k=0", "options.top_k"),
        ("top=5", "no option 'top'"),
        (
            "uper=0.5",
            "no option 'uper'; did you mean 'upper'? The query string takes options, bounds, lower, ",
        ),
        ("upper=half", "upper is not JSON"),
        ('bounds={"upper":0.5}&upper=0.4', "the upper bounds once"),
        ("bounds=3&upper=0.4", "the upper bounds once"),
        ('options={"top_k":1}&top_k=2', "either `options` or 'top_k'"),
    ],
)
def test_queries_that_are_wrong_are_named(http: httpx.Client, query: str, words: str) -> None:
    response = http.post(f"/calibrate?{query}", content=npy([RAMP]), headers=NPY)
    assert words in problem(response, 422)


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        (b"", 400, "The body is empty"),
        (b"{", 400, "not JSON"),
        (b"[]", 422, "must be a JSON object"),
        (b"{}", 422, "logits is null"),
        (b'{"logit": []}', 422, "'logit'"),
        (b'{"logits": []}', 422, "no row"),
        (b'{"logits": [1, 2]}', 422, "logits[0] is 1"),
        (b'{"logits": [[1]], "model": "m"}', 422, "'model'; the query string names the model, as in ?model="),
        (b'{"logits": [[1, 2]]}', 422, "logits[0] has 2 numbers, but the model has 10 classes"),
        (b'{"logits": [[0,0,0,0,0,0,0,0,0,"1"]]}', 422, "logits[0][9] is '1'"),
        (b'{"logits": [[0,0,null,0,0,0,0,0,0,0]]}', 422, "logits[0][2] is None"),
        (b'{"logits": [[0,0,0,NaN,0,0,0,0,0,0]]}', 422, "logits[0][3] is nan"),
        (b'{"logits": [[0,0,0,-Infinity,0,0,0,0,0,0]]}', 422, "logits[0][3] is -inf"),
        (b'{"logits": [[0,0,0,1e999,0,0,0,0,0,0]]}', 422, "logits[0][3] is inf"),
    ],
)
def test_logits_that_are_wrong_are_named(http: httpx.Client, body: bytes, status: int, words: str) -> None:
    assert words in problem(http.post("/calibrate", content=body, headers=JSON), status)


@pytest.mark.parametrize(
    ("array", "status", "words"),
    [
        (np.zeros((2, 9)), 422, "(2, 9)"),
        (np.zeros(10), 422, "(10,)"),
        (np.zeros((0, 10)), 422, "(0, 10)"),
        (np.full((1, 10), np.nan), 422, "logits[0][0] is nan"),
        (np.zeros((1, 10), dtype=complex), 400, "complex128"),
        (np.array([[None] * 10]), 400, "object"),
        (np.array([["a"] * 10]), 400, "<U1"),
    ],
)
def test_arrays_that_are_wrong_are_named(http: httpx.Client, array: Any, status: int, words: str) -> None:
    assert words in problem(http.post("/calibrate", content=npy(array), headers=NPY), status)


def test_probabilities_sent_as_logits_are_refused_unless_they_are_declared(http: httpx.Client) -> None:
    powers = np.exp(np.random.default_rng(0).normal(size=(8, 10)))
    rows = powers / powers.sum(axis=1, keepdims=True)
    for sent in (rows, 100 * rows, rows.round(3)):
        for body in ({"content": npy(sent), "headers": NPY}, {"json": {"logits": sent.tolist()}}):
            said = problem(http.post("/calibrate", **body), 422)
            kind = "percentages" if sent.max() > 1 else "probabilities"
            assert f"The scores look like {kind}: every value is at least 0" in said
            assert said.endswith("a JSON body names its rows `probabilities` or `percent`.")
            assert http.post("/calibrate?scores=logits", **body).is_success
    few = http.post("/calibrate", json={"logits": rows[:7].tolist()})
    assert few.is_success
    for logits in (np.maximum(np.log(rows) + 3, 0), np.eye(10), np.zeros((8, 10))):
        assert http.post("/calibrate", content=npy(logits), headers=NPY).is_success


def test_an_array_that_promises_more_than_it_brings_is_refused(http: httpx.Client) -> None:
    body = npy(np.zeros((2, 10)))
    lying = body.replace(b"(2, 10)", b"(9, 10)")
    assert "but 160 are there" in problem(http.post("/calibrate", content=lying, headers=NPY), 400)
    assert "no readable .npy array" in problem(http.post("/calibrate", content=body[:20], headers=NPY), 400)


def test_images_that_are_wrong_are_refused(http: httpx.Client, digits: Digits) -> None:
    def post(content: bytes, kind: str = "image/png") -> httpx.Response:
        return http.post("/predict", content=content, headers={"content-type": kind})

    jpeg = io.BytesIO()
    digits.image(0).resize((640, 640)).save(jpeg, format="JPEG")
    assert "empty" in problem(post(b""), 400)
    assert "expected JPEG, PNG or WebP" in problem(post(b"to whom it may concern"), 422)
    assert "damaged" in problem(post(jpeg.getvalue()[:2000], "image/jpeg"), 422)
    assert "image/jpeg, image/png, image/webp" in problem(post(digits.png(0), "image/gif"), 415)
    assert "missing" in problem(http.post("/predict", content=digits.png(0)), 415)
    assert post(jpeg.getvalue(), "image/jpeg").status_code == 200


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        ([], "inputs must be a list of at least one"),
        ("x", "inputs must be a list"),
        ([{}], "inputs[0] must be"),
        ([{"image": 3}], "inputs[0] must be"),
        ([{"image": "", "tensor": []}], "inputs[0] must be"),
        ([{"image": "%%%"}], "not base64"),
        ([{"image": "aGk=aGk="}], "not base64"),
        ([{"image": "data:image/png,aGk="}], "not base64"),
        ([{"image": "\N{SNOWMAN}"}], "not base64"),
        ([{"image": "https://a.example/b.png"}], "not base64: addresses are not fetched"),
        ([{"image": "aGk="}], "expected JPEG, PNG or WebP"),
        ([{"tensor": [[1.0]]}], "The tensor has the shape (1, 1); the model takes (1, 8, 8)"),
        ([{"tensor": [[[0.0] * 8] * 7 + [[0.0] * 7]]}], "ragged"),
        ([{"tensor": [[["a"] * 8] * 8]}], "not a number"),
        ([{"tensor": np.full((1, 8, 8), 1e300).tolist()}], "infinite in float32"),
        ([{"tensor": np.zeros((1, 8, 8)).tolist()}, {"image": "aGk="}], "inputs[1]: "),
    ],
)
def test_inputs_that_are_wrong_are_named(http: httpx.Client, inputs: Any, words: str) -> None:
    assert words in problem(http.post("/predict", json={"inputs": inputs}), 422)


def test_a_misspelt_member_is_told_what_the_model_takes(http: httpx.Client) -> None:
    detail = problem(http.post("/predict", json={"inputs": [{"iamge": "aGk="}]}), 422)
    taken = '{"image": "<base64>"} or {"tensor": [...]}'
    assert detail == f"inputs[0] must be {taken}, got {{'iamge': 'aGk='}}; did you mean 'image'?"
    assert taken in problem(http.post("/predict", json={"inputs": []}), 422)


@pytest.mark.parametrize("member", ["logits", "probabilities"])
def test_who_sends_logits_to_the_model_is_told_where_they_go(http: httpx.Client, member: str) -> None:
    refused = http.post("/predict", json={member: [[0.1] * 10]})
    assert refused.status_code == 422
    assert f"has a member '{member}'; POST /calibrate takes {member}; it may have" in refused.json()["detail"]


@pytest.mark.parametrize(
    ("member", "value", "written"),
    [("image", "aGk=", '{"image": "<base64>"}'), ("features", {"age": 3}, '{"features": [...]}')],
)
def test_one_input_without_its_list_is_told_how_it_is_written(
    http: httpx.Client, member: str, value: Any, written: str
) -> None:
    detail = problem(http.post("/predict", json={member: value}), 422)
    assert f"a member '{member}'; write {{\"inputs\": [{written}]}}; it may have" in detail


def test_forms_that_are_wrong_are_refused(http: httpx.Client, digits: Digits) -> None:
    file = ("digit.png", digits.png(0))
    assert "no `file` part" in problem(http.post("/predict", files={"options": (None, "{}")}), 422)
    assert "'image'" in problem(http.post("/predict", files={"image": file}), 422)
    assert "not JSON" in problem(http.post("/predict", files={"file": file}, data={"options": "{"}), 422)
    assert "empty" in problem(http.post("/predict", files={"file": ("a.png", b"")}), 400)
    headers = {"content-type": "multipart/form-data"}
    assert "boundary" in problem(http.post("/predict", content=b"x", headers=headers), 400)
    assert "not in the query" in problem(http.post("/predict?top_k=1", files={"file": file}), 422)


def test_a_form_is_read_to_its_closing_boundary(http: httpx.Client, digits: Digits) -> None:
    image = ("name=file; filename*=UTF-8''%C3%BC.png", digits.png(0))
    options = ('name="options"', b'{"bounds": {"upper": 0.5}}')
    whole, headers = multipart(image, options), {"content-type": CONTENT_TYPE}
    for body in (whole, b"A preamble.\r\n" + whole + b"An epilogue."):
        answer = http.post("/predict", content=body, headers=headers)
        assert answer.status_code == 200, answer.text
        assert answer.json()["predictions"][0]["probability"] == 0.5
    for end, detail in (
        (b"--boundary--\r\n", "The multipart body ends before its closing boundary."),
        (b"0.5}}\r\n--boundary--\r\n", "The multipart body ends before its closing boundary."),
        (b"--\r\n", "The multipart body has no part header at byte 312."),
    ):
        cut = http.post("/predict", content=whole.removesuffix(end), headers=headers)
        assert problem(cut, 400) == detail
    many = http.post("/predict", content=multipart(*[image] * 1002), headers=headers)
    assert problem(many, 400) == "The multipart body has more than 1,001 parts."


def test_a_request_with_more_samples_than_the_queue_takes_is_refused(http: httpx.Client) -> None:
    body = npy(np.zeros((1025, 1, 8, 8), dtype=np.float32))
    assert "holds 1025 samples; the queue takes at most 1024" in problem(
        http.post("/predict", content=body, headers=NPY), 413
    )


def test_paths_and_methods_that_do_not_exist(http: httpx.Client) -> None:
    assert problem(http.get("/nowhere"), 404) == "No route has the path /nowhere; /docs lists all routes."
    detail = problem(http.get("/calibrator"), 404)
    assert detail.startswith("No route has the path /calibrator; did you mean '/calibrators'? /docs lists")
    refused = http.get("/predict")
    assert problem(refused, 405) == "/predict does not support the method GET."
    assert refused.headers["allow"] == "POST"


def test_a_large_answer_is_written_in_pieces_of_a_few_mebibytes() -> None:
    """The join of 256 rows of 1.7 MB each kept the event loop from running for a second."""
    classes, count = 20_000, 12
    logits = np.zeros((count, classes))
    served = ServedCalibrator(0, "uncalibrated", ArrayCalibrator.uncalibrated(classes))
    rows = calibrate(logits, CalibrationRequest(served, None))
    labels = [f"class {index}" for index in range(classes)]
    answer = CalibratedAnswer("many", labels, served, rows, Options(top_k=classes), {})
    pieces = answer.to_json()
    assert max(map(len, pieces)) < 2 * 2**20
    document = json.loads(b"".join(pieces))
    assert [len(one["top"]) for one in document["predictions"]] == [classes] * count
