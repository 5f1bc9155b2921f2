"""The Open Inference Protocol over HTTP, spoken by Triton's own clients; answers are those of `/predict`."""

from __future__ import annotations

import base64
import json
import struct
import tracemalloc
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.http as triton
from tritonclient.utils import InferenceServerException

from boxcal.app.client import BoxcalClient
from boxcal.app.http.problems import InvalidInput
from boxcal.app.protocols.v2.tensors import from_json
from boxcal.models.digits_data import load_digits_split
from tests.app.raising import raises_problem
from tests.app.running import Service, running
from tests.pauses import PAUSES

LOGITS = np.random.default_rng(6).normal(size=(5, 10)) * 3


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with running(tmp_path_factory.mktemp("v2")) as service, BoxcalClient(service.url) as client:
        labels = np.random.default_rng(1).integers(0, 10, 200)
        logits = np.random.default_rng(2).normal(size=(200, 10)) * 4
        client.wait_for_fit(client.fit_arrays(logits, labels, method="ts", activate="always").id)
        yield service


@pytest.fixture
def client(service: Service) -> Iterator[Any]:
    client = triton.InferenceServerClient(service.url.removeprefix("http://"), concurrency=8)
    yield client
    client.close()


@pytest.fixture(scope="module")
def images() -> list[bytes]:
    return [load_digits_split().test.png(n) for n in range(3)]


def predicted(service: Service, images: list[bytes], **options: Any) -> list[Any]:
    inputs = [{"image": base64.b64encode(one).decode()} for one in images]
    body = {"inputs": inputs, "options": {"probabilities": True, "logits": True, **options}}
    return list(httpx.post(f"{service.url}/predict", json=body).json()["predictions"])


def calibrated(service: Service, logits: Any, **options: Any) -> Any:
    body = {"logits": logits.tolist(), "options": {"probabilities": True, **options}}
    answer = httpx.post(f"{service.url}/calibrate", json=body).json()
    return np.array([prediction["probabilities"] for prediction in answer["predictions"]])


def logits_input(logits: Any, *, binary: bool = True) -> Any:
    found = triton.InferInput("logits", list(logits.shape), "FP64")
    return found.set_data_from_numpy(logits, binary_data=binary)


def test_the_service_and_its_models_are_described(client: Any) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("digits")
    assert client.is_model_ready("digits.calibrator", "1")
    assert client.get_server_metadata()["name"] == "boxcal"
    model = client.get_model_metadata("digits")
    assert model["versions"] == ["0", "1"]
    assert model["inputs"] == [{"name": "image", "datatype": "BYTES", "shape": [-1]}]
    assert {one["name"] for one in model["outputs"]} == {"probabilities", "logits", "label", "index", "bound"}
    assert client.get_model_metadata("digits.calibrator")["inputs"][0]["shape"] == [-1, 10]
    assert [one["name"] for one in client.get_model_repository_index()] == ["digits", "digits.calibrator"]
    with pytest.raises(
        InferenceServerException, match=r"no model 'digit'; did you mean 'digits'\? The models are digits"
    ):
        client.get_model_metadata("digit")
    assert not client.is_model_ready("digits", "7")


@pytest.mark.parametrize("binary", [True, False])
def test_images_give_the_answers_of_predict(
    client: Any, service: Service, images: list[bytes], binary: bool
) -> None:
    for image in images:  # one by one: the last bit of a forward pass depends on the batch
        given = triton.InferInput("image", [1], "BYTES")
        if binary:
            given.set_data_from_numpy(np.array([image], object))
        else:
            given.set_data_from_numpy(np.array([base64.b64encode(image)], object), binary_data=False)
        names = ("probabilities", "logits", "label", "index", "bound")
        outputs = [triton.InferRequestedOutput(name, binary_data=binary) for name in names]
        answer = client.infer("digits", [given], outputs=outputs, request_id="7", parameters={"upper": 0.5})
        check_equal(answer, predicted(service, [image], bounds={"upper": 0.5}))
        response = answer.get_response()
        assert (response["id"], response["model_version"]) == ("7", "1")


def test_several_images_in_one_request(client: Any, service: Service, images: list[bytes]) -> None:
    given = triton.InferInput("image", [3], "BYTES").set_data_from_numpy(np.array(images, object))
    outputs = [triton.InferRequestedOutput(name) for name in ("probabilities", "logits")]
    answer = client.infer("digits", [given], outputs=outputs)
    expected = predicted(service, images)
    np.testing.assert_allclose(answer.as_numpy("logits"), [one["logits"] for one in expected], atol=1e-4)
    np.testing.assert_array_equal(
        answer.as_numpy("probabilities"), calibrated(service, answer.as_numpy("logits"))
    )


def check_equal(answer: Any, expected: list[Any]) -> None:
    for name in ("probabilities", "logits"):
        np.testing.assert_array_equal(answer.as_numpy(name), [one[name] for one in expected])
    assert [text(one) for one in answer.as_numpy("label")] == [one["label"] for one in expected]
    assert answer.as_numpy("index").tolist() == [one["index"] for one in expected]
    bounds = [one["top"][0]["bound"] or "" for one in expected]
    assert [text(one) for one in answer.as_numpy("bound")] == bounds


def text(one: Any) -> str:
    return one.decode() if isinstance(one, bytes) else str(one)


@pytest.mark.parametrize("binary", [True, False])
def test_logits_give_the_answers_of_calibrate(client: Any, service: Service, binary: bool) -> None:
    for version in ("", "0"):
        answer = client.infer(
            "digits.calibrator", [logits_input(LOGITS, binary=binary)], model_version=version
        )
        options = {"calibrator": int(version)} if version else {}
        np.testing.assert_array_equal(
            answer.as_numpy("probabilities"), calibrated(service, LOGITS, **options)
        )
        assert answer.get_response()["model_version"] == (version or "1")


def test_bounds_are_tensors_of_one_row_or_of_each(client: Any, service: Service) -> None:
    one = np.full(10, 0.3)
    each = np.linspace(0.2, 0.6, 5)[:, None] * np.ones(10)
    for bounds in (one, each):
        upper = triton.InferInput("upper", list(bounds.shape), "FP64").set_data_from_numpy(bounds)
        answer = client.infer("digits.calibrator", [logits_input(LOGITS), upper], parameters={"lower": 0.01})
        rows = np.broadcast_to(bounds, (5, 10))
        expected = [
            calibrated(service, LOGITS[[n]], bounds={"upper": rows[n].tolist(), "lower": 0.01})[0]
            for n in range(5)
        ]
        np.testing.assert_array_equal(answer.as_numpy("probabilities"), expected)
        assert (answer.as_numpy("probabilities") <= rows).all()


def test_other_requests_run_between_1024_rows_with_bounds_of_their_own(client: Any) -> None:
    rows = np.linspace(0, 3, 10_240).reshape(1024, 10)
    upper = triton.InferInput("upper", [1024, 10], "FP64").set_data_from_numpy(np.full_like(rows, 0.3))
    answer = client.infer("digits.calibrator", [logits_input(rows), upper]).as_numpy("probabilities")
    assert answer[[0, 500, 1023]].sum(axis=1) == pytest.approx(1.0)
    PAUSES.settle()
    assert PAUSES.longest <= 0.05


@pytest.mark.parametrize("count", [1, 4, 10])
def test_the_classification_of_logits_that_are_negative(client: Any, count: int) -> None:
    logits = np.array([[-3.0, -9.0, -1.5, -20.0, -2.0, -30.0, -40.0, -50.0, -1.25, -60.0]])
    outputs = [triton.InferRequestedOutput("logits", class_count=count)]
    answer = client.infer("digits.calibrator", [logits_input(logits)], outputs=outputs).as_numpy("logits")
    expected = ["-1.25:8:8", "-1.5:2:2", "-2.0:4:4", "-3.0:0:0", "-9.0:1:1", "-20.0:3:3", "-30.0:5:5"]
    expected += ["-40.0:6:6", "-50.0:7:7", "-60.0:9:9"]
    assert [text(entry) for entry in answer[0]] == expected[:count]


MISNAMED = triton.InferInput("logit", [5, 10], "FP64").set_data_from_numpy(LOGITS)
ERRORS: dict[str, tuple[str, dict[str, Any]]] = {
    "no input 'logit'; did you mean 'logits'": ("digits.calibrator", {"inputs": [MISNAMED]}),
    "digits.calibrator has no version '9'": (
        "digits.calibrator",
        {"inputs": [logits_input(LOGITS)], "model_version": "9"},
    ),
    "must be \\(N, 10\\)": ("digits.calibrator", {"inputs": [logits_input(LOGITS[:, :3])]}),
    "expected JPEG, PNG or WebP": (
        "digits",
        {"inputs": [triton.InferInput("image", [1], "BYTES").set_data_from_numpy(np.array([b"x"], object))]},
    ),
}


@pytest.mark.parametrize("message", ERRORS)
def test_errors_say_what_was_wrong(client: Any, message: str) -> None:
    model, request = ERRORS[message]
    with pytest.raises(InferenceServerException, match=message):
        client.infer(model, **request)


def tensor(**changes: Any) -> bytes:
    """A request with one tensor of two numbers, or what it is changed to."""
    return json.dumps({"inputs": [{"name": "l", "shape": [2], "datatype": "FP64", **changes}]}).encode()


HOSTILE: dict[str, tuple[bytes, str]] = {
    "no JSON": (b"{", "is not JSON"),
    "header longer than the body": (b"{}", "the body has 2 bytes"),
    "header of words": (b"{}", "the body has 2 bytes"),
    "bytes behind": (b'{"inputs": []}xyz', "3 bytes follow"),
    "no inputs": (b"{}", "a list `inputs`"),
    "shape": (tensor(shape=[-1]), "list of sizes"),
    "huge shape of no elements": (tensor(shape=[0, 10**20 - 1], data=[]), "list of sizes from 1"),
    "huge shape": (tensor(name="logits", shape=[10**8 - 1] * 2, data=1), "must have"),
    "datatype": (tensor(datatype="FP8", data=[1, 1]), "'FP8'"),
    "no data": (tensor(), "neither `data` nor"),
    "ragged": (tensor(name="logits", shape=[2, 2], data=[[1, 2], [3]]), "ragged"),
    "nested otherwise than its shape": (
        tensor(name="logits", shape=[2, 10], data=[[0.0] * 2] * 10),
        "The data of the input 'logits' have the shape [10, 2]; its `shape` is [2, 10].",
    ),
    "nested deeper than its shape": (tensor(data=[[1], [2]]), "have the shape [2, 1]; its `shape` is [2]"),
    "data twice": (
        tensor(data=[1, 2], parameters={"binary_data_size": 16}),
        "The input 'l' has `data` and `binary_data_size`; give one of them.",
    ),
    "a parameter of the request at an input": (
        tensor(data=[1, 2], parameters={"upper": 0.4}),
        "The input 'l' has the parameter upper; it is one of the request.",
    ),
    "numbers that are no BOOL": (
        tensor(datatype="BOOL", data=[2, 0]),
        "The input 'l' has the type BOOL; its data must be true, false, 1 or 0.",
    ),
    "bytes that are no BOOL": (
        (head := tensor(datatype="BOOL", parameters={"binary_data_size": 2})) + b"\2\0",
        "The input 'l' has the type BOOL; its data must be true, false, 1 or 0.",
    ),
    "both kinds of scores": (
        json.dumps(
            {
                "inputs": [
                    {"name": name, "shape": [1, 10], "datatype": "FP64", "data": [0.1] * 10}
                    for name in ("logits", "probabilities")
                ]
            }
        ).encode(),
        "The request has the inputs logits and probabilities; give one of them.",
    ),
    "parameters of a request": (b'{"inputs": [], "parameters": [1]}', "`parameters` must be an object"),
    "parameters of an input": (tensor(parameters=[1]), "`parameters` must be an object"),
    "parameters of an output": (
        b'{"inputs": [], "outputs": [{"name": "label", "parameters": 1}]}',
        "`parameters` must be an object",
    ),
    "class count": (
        b'{"inputs": [], "outputs": [{"name": "label", "parameters": {"classification": "2"}}]}',
        "classification is '2'",
    ),
    "strings where numbers belong": (
        tensor(name="logits", data=["a", "bb"]),
        "must have 2 numbers, got 2 values, one of the type str",
    ),
    "a tensor of strings": (
        tensor(name="logits", datatype="BYTES", shape=[1, 10], data=["a"] * 10),
        "The input 'logits' has the type BYTES; it must have numbers.",
    ),
    "two outputs of one name": (
        b'{"inputs": [], "outputs": [{"name": "label"}, {"name": "label"}]}',
        "two outputs 'label'",
    ),
    "integer out of range": (
        tensor(datatype="INT8", data=[300, 1]),
        "values from 1 to 300; the type INT8 holds -128 to 127",
    ),
    # Another parser reads large bodies of short strings, and keeps such integers as they are.
    "integer without end": (
        tensor(name="logits", shape=[1, 10], data=[10**400] * 10, more=[""] * 100_000),
        "'logits' holds an integer of more than 64 bits",
    ),
}
LENGTHS = {
    "header longer than the body": "99",
    "header of words": "x",
    "bytes behind": "14",
    "bytes that are no BOOL": str(len(head)),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_requests_that_are_no_requests_are_refused(service: Service, name: str) -> None:
    body, message = HOSTILE[name]
    headers = {"inference-header-content-length": LENGTHS[name]} if name in LENGTHS else {}
    answer = httpx.post(f"{service.url}/v2/models/digits.calibrator/infer", content=body, headers=headers)
    assert answer.status_code in {400, 422}, answer.text
    assert message in answer.json()["error"]


def test_nested_data_of_the_shape_are_read_as_flat_ones(service: Service) -> None:
    flat = [float(n % 7) for n in range(20)]
    nested = [flat[:10], flat[10:]]
    answers = [
        httpx.post(
            f"{service.url}/v2/models/digits.calibrator/infer",
            content=tensor(name="logits", shape=[2, 10], data=data),
        ).json()["outputs"]
        for data in (flat, nested)
    ]
    assert answers[0] == answers[1]
    assert from_json("x", "FP64", (2, 2, 2), [[1, 2, 3, 4], [5, 6, 7, 8]]).tolist()[1][0] == [5.0, 6.0]


@pytest.mark.parametrize(
    ("query", "status", "message"),
    [
        ("upper=0.4", 422, "The query string has 'upper'; upper belongs in the `parameters` of the request."),
        ("uper=0.4", 422, "The query string has 'uper'; upper belongs in the `parameters` of the request."),
        ("&".join(f"zz{n}=" for n in range(65)), 422, "at most 64 parameters"),
        ("trace=1", 200, "probabilities"),
    ],
)
def test_parameters_in_the_query_string_are_refused(
    service: Service, query: str, status: int, message: str
) -> None:
    body = tensor(name="logits", shape=[1, 10], data=[0.0] * 10)
    answer = httpx.post(f"{service.url}/v2/models/digits.calibrator/infer?{query}", content=body)
    assert (answer.status_code, message in answer.text) == (status, True), answer.text


@pytest.mark.parametrize(
    ("version", "calibrator", "status", "message"),
    [
        (1, 0, 422, "The version is 1 and calibrator is 0; give one of them."),
        (1, "active", 422, "The version is 1 and calibrator is 'active'; give one of them."),
        (1, 1, 200, '"model_version":"1"'),
        (5, 5, 404, "digits.calibrator has no version '5'."),
    ],
)
def test_the_version_and_the_parameter_name_one_calibrator(
    service: Service, version: int, calibrator: Any, status: int, message: str
) -> None:
    entry = {"name": "logits", "datatype": "FP64", "shape": [1, 10], "data": [0.0] * 10}
    answer = httpx.post(
        f"{service.url}/v2/models/digits.calibrator/versions/{version}/infer",
        json={"inputs": [entry], "parameters": {"calibrator": calibrator}},
    )
    assert (answer.status_code, message in answer.text) == (status, True), answer.text


@pytest.mark.parametrize(("member", "status"), [("id", 200), ("timeout", 422)])
def test_integers_without_end_are_no_id_and_no_timeout(service: Service, member: str, status: int) -> None:
    entry = {"name": "logits", "datatype": "FP64", "shape": [1, 10], "data": [0.0] * 10}
    given = {"id": 10**400} if member == "id" else {"parameters": {"timeout": 10**400}}
    document = {"inputs": [{**entry, "more": ["a"] * 100_000}], **given}
    answer = httpx.post(f"{service.url}/v2/models/digits.calibrator/infer", json=document)
    assert (answer.status_code, "id" in answer.json()) == (status, False), answer.text


def test_strings_of_unequal_length_take_no_more_memory_than_they_have_bytes() -> None:
    """NumPy pads strings to the longest: 4 bytes for each character of each, 800 MB here."""
    strings = ["x" * 100_000] + ["y"] * 2000
    tracemalloc.start()
    try:
        with raises_problem(InvalidInput, match="one of the type str"):
            from_json("logits", "FP64", (2001,), strings)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1_000_000


def test_an_image_that_is_no_base64_is_refused_by_its_place(service: Service) -> None:
    for text_ in ("x", "\N{LATIN SMALL LETTER E WITH ACUTE}"):
        given = {"name": "image", "shape": [1], "datatype": "BYTES", "data": [text_]}
        answer = httpx.post(f"{service.url}/v2/models/digits/infer", json={"inputs": [given]})
        assert answer.status_code == 422, answer.text
        assert "image[0]: The image is not base64" in answer.json()["error"]


def test_binary_elements_must_fill_their_data(service: Service) -> None:
    for elements in (struct.pack("<I", 99) + b"x", b"ab", struct.pack("<I", 1) + b"xy"):
        document = (
            '{"inputs": [{"name": "image", "shape": [1], "datatype": "BYTES", '
            f'"parameters": {{"binary_data_size": {len(elements)}}}}}]}}'
        ).encode()
        answer = httpx.post(
            f"{service.url}/v2/models/digits/infer",
            content=document + elements,
            headers={"inference-header-content-length": str(len(document))},
        )
        assert answer.status_code == 400
        assert "must have 1 elements" in answer.json()["error"]
