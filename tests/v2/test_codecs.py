"""Requests as the codecs of other servers write them: foreign parameters, missing values, columns, BF16."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.grpc as triton
from tritonclient.grpc import model_config_pb2
from tritonclient.http import InferenceServerClient as HttpClient

from tests.app.fitting.service import free_port
from tests.app.running import Service, running
from tests.models.posting import TOLERANCE
from tests.models.test_onnx_exports import of_columns, of_xgboost

CALIBRATOR = "logits:3.calibrator"


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with running(tmp_path_factory.mktemp("codecs"), model="logits:3", grpc_port=free_port()) as service:
        yield service


def inferred(service: Service, model: str, body: Any) -> dict[str, Any]:
    answer = httpx.post(f"{service.url}/v2/models/{model}/infer", json=body)
    assert answer.status_code == 200, answer.text
    document: dict[str, Any] = answer.json()
    return document


def probabilities(answer: dict[str, Any]) -> Any:
    (output,) = (one for one in answer["outputs"] if one["name"] == "probabilities")
    return np.array(output["data"]).reshape(output["shape"])


def logits(**members: Any) -> dict[str, Any]:
    return {"name": "logits", "shape": [1, 3], "datatype": "FP32", "data": [0, 1, 3], **members}


@pytest.mark.parametrize(
    "parameters",
    [None, {"content_type": "np"}, {"content_type": "pd", "headers": {"x-user": "a"}, "explain": True}],
)
def test_parameters_of_other_servers_are_ignored(service: Service, parameters: Any) -> None:
    given = logits(parameters={"content_type": "np", "seed": [1]})
    answer = inferred(service, CALIBRATOR, {"inputs": [given], "parameters": parameters})
    np.testing.assert_allclose(probabilities(answer), [[0.04201007, 0.1141952, 0.84379473]], rtol=1e-6)


@pytest.mark.parametrize("sent", [7, -1.5, "7", "\N{SNOWMAN}"])
def test_an_id_is_answered_as_it_was_sent(service: Service, sent: Any) -> None:
    found = inferred(service, CALIBRATOR, {"id": sent, "inputs": [logits()]})["id"]
    assert (found, type(found)) == (sent, type(sent))


def test_bf16(service: Service) -> None:
    data = struct.pack("<3H", 0x0000, 0x3F80, 0x4040)  # 0, 1 and 3
    given = triton.InferInput("logits", [1, 3], "BF16")
    given._raw_content = data  # its own conversion needs a package for the type
    with triton.InferenceServerClient(f"127.0.0.1:{service.state.settings.grpc_port}") as client:
        answer = client.infer(CALIBRATOR, [given]).as_numpy("probabilities")
    expected = probabilities(inferred(service, CALIBRATOR, {"inputs": [logits(datatype="BF16")]}))
    np.testing.assert_array_equal(answer, expected)


def test_null_is_a_missing_value_where_the_model_reads_some(tmp_path: Path, service: Service) -> None:
    export = of_xgboost(tmp_path / "trees.onnx")
    rows = [row["features"] for row in export.inputs]
    assert any(None in row for row in rows)
    given = {"name": "rows", "shape": [7, 4], "datatype": "FP32", "data": rows}
    with running(tmp_path / "data", model=f"onnx:{tmp_path / 'trees.onnx'}", device="cpu") as trees:
        answer = inferred(trees, "onnx:trees.onnx", {"inputs": [given]})
    np.testing.assert_allclose(probabilities(answer), export.probabilities, atol=TOLERANCE)
    messages = {"FP32": "nan", "INT64": "one of the type NoneType", "BOOL": "NoneType"}
    for datatype, message in messages.items():
        body = {"inputs": [logits(data=[0, None, 3], datatype=datatype)]}
        refused = httpx.post(f"{service.url}/v2/models/{CALIBRATOR}/infer", json=body)
        assert refused.status_code == 422
        assert message in refused.json()["error"]


@pytest.mark.parametrize("shape", [[7], [7, 1]])
def test_columns_with_and_without_a_second_dimension(tmp_path: Path, shape: list[int]) -> None:
    export = of_columns(tmp_path / "table.onnx")
    types = {"height": "FP32", "age": "INT64", "city": "BYTES"}
    inputs = [
        {
            "name": name,
            "shape": shape,
            "datatype": datatype,
            "data": [row["features"][name] for row in export.inputs],
            "parameters": {"content_type": "str" if datatype == "BYTES" else "np"},
        }
        for name, datatype in types.items()
    ]
    with running(tmp_path / "data", model=f"onnx:{tmp_path / 'table.onnx'}", device="cpu") as service:
        answer = inferred(
            service, "onnx:table.onnx", {"inputs": inputs, "parameters": {"content_type": "pd"}}
        )
    np.testing.assert_allclose(probabilities(answer), export.probabilities, atol=TOLERANCE)


def test_the_configuration_and_the_statistics_of_a_model(service: Service) -> None:
    inferred(service, CALIBRATOR, {"inputs": [logits()]})
    with triton.InferenceServerClient(f"127.0.0.1:{service.state.settings.grpc_port}") as client:
        config = client.get_model_config(CALIBRATOR).config
        assert (config.name, config.backend, config.max_batch_size) == (CALIBRATOR, "boxcal", 0)
        (given,) = config.input
        assert (given.name, list(given.dims)) == ("logits", [-1, 3])
        assert given.data_type == model_config_pb2.TYPE_FP64
        outputs = {one.name: (one.data_type, list(one.dims)) for one in config.output}
        assert outputs["label"] == (model_config_pb2.TYPE_STRING, [-1])
        assert outputs["probabilities"] == (model_config_pb2.TYPE_FP64, [-1, 3])
        with pytest.raises(Exception, match=r"NOT_FOUND.*has no version '9'"):
            client.get_model_config(CALIBRATOR, "9")
        with pytest.raises(Exception, match=r"NOT_FOUND.*has no version '9'"):
            client.get_inference_statistics(CALIBRATOR, "9")
        (counted,) = client.get_inference_statistics(CALIBRATOR).model_stats
        http = HttpClient(service.url.removeprefix("http://"))
        (same,) = http.get_inference_statistics()["model_stats"]
        assert (same["name"], same["version"]) == (CALIBRATOR, "0")
        assert same["inference_count"] == counted.inference_count
        assert counted.inference_stats.success.count == same["execution_count"] >= 1
        assert counted.inference_stats.success.ns > 0
        described = http.get_model_config(CALIBRATOR, "0")
        assert described["input"] == [{"name": "logits", "data_type": "TYPE_FP64", "dims": [-1, 3]}]
        http.close()
