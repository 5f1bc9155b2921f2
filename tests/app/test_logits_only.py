"""`BOXCAL_MODEL=logits:K`: a service without a model, and `/calibrate` with logits and with probabilities."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from boxcal.app.client import Answer, BoxcalClient
from boxcal.app.client.errors import ClientError
from boxcal.models import BackboneError
from boxcal.models.loading.specifications import load_backbone
from tests.app.fitting.files import npy
from tests.app.running import Service, running
from tests.app.tables.sets import softmax

LABELS = ("cat", "dog", "emu")
RNG = np.random.default_rng(5)
LOGITS = RNG.normal(size=(400, 3)) * 3
CLASSES = np.array([RNG.choice(3, p=row) for row in np.exp(LOGITS / 3) / np.exp(LOGITS / 3).sum(1)[:, None]])


@pytest.fixture(scope="module")
def logits_only(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("logits")
    (folder / "labels.txt").write_text("\n".join(LABELS))
    with running(folder, model="logits", labels=folder / "labels.txt") as service:
        yield service


def probabilities_of(answer: Answer) -> np.ndarray[Any, Any]:
    return np.array([prediction.probabilities for prediction in answer.predictions], np.float64)


def test_logits_are_fitted_and_calibrated_within_bounds(logits_only: Service) -> None:
    with BoxcalClient(logits_only.url) as client:
        plain = client.calibrate(LOGITS[:5], probabilities=True, calibrator=0)
        assert plain.model == "logits:3"
        expected = softmax(LOGITS[:5])
        np.testing.assert_allclose(probabilities_of(plain), expected, atol=1e-12)
        fit = client.wait_for_fit(client.fit_arrays(LOGITS, CLASSES, method="ts", activate="always").id)
        bounded = client.calibrate(LOGITS[:5], probabilities=True, upper={"emu": 0.2})
        assert bounded.calibrator.version == fit.version
        assert bounded.predictions[0].label in LABELS
        for prediction in bounded.predictions:
            assert prediction.probabilities is not None
            assert prediction.probabilities[2] <= 0.2


def test_probabilities_are_calibrated_as_their_logarithms(logits_only: Service) -> None:
    probabilities = softmax(LOGITS[:5])
    probabilities[0] = (0, 1, 0)
    with BoxcalClient(logits_only.url) as client:
        log = np.log(np.maximum(probabilities, np.finfo(np.float64).tiny))
        expected = client.calibrate(log, probabilities=True)
        for sent in (probabilities, probabilities * 0.995):
            answer = client.calibrate_probabilities(sent, probabilities=True)
            np.testing.assert_allclose(probabilities_of(answer), probabilities_of(expected), atol=1e-9)
        many = client.calibrate_probabilities(probabilities, upper=dict.fromkeys(LABELS, 0.9))
        assert max(p.probability for p in many.predictions) <= 0.9
    with httpx.Client(base_url=logits_only.url) as http:
        body = {"probabilities": probabilities.tolist(), "options": {"probabilities": True}}
        from_json = http.post("/calibrate", json=body).json()
        assert [p["probabilities"] for p in from_json["predictions"]] == [
            list(p.probabilities or ()) for p in client_answer(logits_only, probabilities)
        ]


def client_answer(service: Service, probabilities: Any) -> Any:
    with BoxcalClient(service.url) as client:
        return client.calibrate_probabilities(probabilities, probabilities=True).predictions


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"probabilities": [[0.5, 0.6, -0.1]]}, "probabilities[0, 2] is -0.1; a probability lies"),
    ({"probabilities": [[0.5, 0.5, 0.2]]}, "probabilities[0] sums to 1.2; the probabilities of a sample"),
    ({"probabilities": [[0.5, 0.5, float("nan")]]}, "probabilities[0][2] is nan; probabilities must"),
    ({"probabilities": [[0.5, 0.5]]}, "probabilities[0] has 2 numbers, but the model has 3"),
    ({"probabilities": [[1, 0, 0]], "logits": [[1, 0, 0]]}, "'logits' and 'probabilities'; give one"),
    ({"probabilities": [[1, 0, 0]], "percent": [[1, 0, 0]]}, "'probabilities' and 'percent'; give one"),
    ({"options": {}}, "logits is null; it must be a list"),
    ({"logits": [[1, 2, 3]], "upper": 0.5}, "upper belongs in `options.bounds`"),
    ({"logits": [[1, 2, 3]], "top_k": 5}, "top_k belongs in `options`"),
    ({"logits": [[1, 2, 3]], "options": {"lower": 0}}, "options.lower belongs in"),
]


@pytest.mark.parametrize(("body", "message"), WRONG)
def test_wrong_bodies_are_refused_by_what_is_wrong(
    logits_only: Service, body: dict[str, Any], message: str
) -> None:
    headers = {"content-type": "application/json"}
    answer = httpx.post(f"{logits_only.url}/calibrate", content=json.dumps(body), headers=headers)
    assert answer.status_code == 422
    assert message in answer.json()["detail"]


def test_an_array_says_what_it_holds(logits_only: Service) -> None:
    headers = {"content-type": "application/x-npy"}
    url = f"{logits_only.url}/calibrate"
    refused = httpx.post(url, params={"scores": "odds"}, content=npy(LOGITS), headers=headers)
    assert refused.status_code == 422
    assert "scores is 'odds'; it must be logits or probabilities or percent." in refused.json()["detail"]
    single = softmax(LOGITS[:2]).astype(np.float32)
    single[0] = (1, 0, 0)
    params = {"scores": "probabilities", "logits": "true", "top_k": "1"}
    answer = httpx.post(url, params=params, content=npy(single), headers=headers).json()
    assert answer["predictions"][0]["logits"][1] == np.log(float(np.finfo(np.float32).tiny))


def test_what_needs_a_model_is_refused(logits_only: Service) -> None:
    with httpx.Client(base_url=logits_only.url) as http:
        image = base64.b64encode(b"\x89PNG").decode()
        for answer in (
            http.post("/predict", content=b"\x89PNG", headers={"content-type": "image/png"}),
            http.post("/predict", json={"inputs": [{"image": image}]}),
        ):
            assert (answer.status_code, answer.json()["type"]) == (404, "urn:boxcal:problem:no-model")
            assert "post its logits or probabilities to /calibrate" in answer.json()["detail"]
        model = http.get("/model").json()
        assert (model["inputs"], model["formats"], model["labels"]) == ("none", [], list(LABELS))
        assert http.get("/health/ready").json()["model"] == "logits:3"
    with (
        BoxcalClient(logits_only.url) as client,
        pytest.raises(ClientError, match="holds images, which logits:3 does not read"),
    ):
        client.fit(images_archive())


def images_archive() -> bytes:
    import zipfile

    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for number in range(30):
            archive.writestr(f"cat/{number}.png", b"\x89PNG\r\n\x1a\n")
    return out.getvalue()


def test_the_identity_is_the_number_of_classes(tmp_path: Path) -> None:
    labels = tmp_path / "labels.txt"
    labels.write_text("a\nb\nc\n")
    named, numbered = load_backbone("logits", labels=labels), load_backbone("logits:3")
    assert (named.name, named.labels) == ("logits:3", ("a", "b", "c"))
    assert numbered.labels == ("0", "1", "2")
    assert named.fingerprint == numbered.fingerprint != load_backbone("logits:4").fingerprint


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("logits", "needs the labels of the classes"),
        ("logits:1", "from 2 to 1,000,000"),
        ("logits:0x10", "'0x10' classes"),
        ("logits:²", "classes"),
        ("logits:-3", "classes"),
    ],
)
def test_a_wrong_number_of_classes_is_refused(spec: str, message: str) -> None:
    with pytest.raises(BackboneError, match=message):
        load_backbone(spec)


def test_weights_and_labels_must_fit(tmp_path: Path) -> None:
    labels = tmp_path / "labels.txt"
    labels.write_text("a\nb\nc\n")
    with pytest.raises(BackboneError, match="has 3 labels, but the model has 4"):
        load_backbone("logits:4", labels=labels)
    with pytest.raises(BackboneError, match="is no model"):
        load_backbone("logits:4", weights="x.pth")
