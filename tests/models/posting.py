"""Real models of other libraries, behind a service: what is posted, and the library's own answers."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
import numpy as np
import pandas as pd
import pytest

from tests.app.client.both import ask_async, ask_blocking

TOLERANCE = 1e-5


@dataclass(frozen=True)
class Export:
    """A model, what is posted to it, and the library's answers; also the same inputs as tokens."""

    inputs: list[dict[str, Any]]
    labels: tuple[str, ...]
    probabilities: np.ndarray[Any, Any]
    tokens: Mapping[str, Any] | None = None


def check_answers(url: str, made: Export, *, version: int = 0) -> None:
    """RequestBody inputs give the library's probabilities, and a bound on the first label holds."""
    with httpx.Client(base_url=url, timeout=200) as http:
        predictions = uncalibrated(http, made)
        got = np.array([prediction["probabilities"] for prediction in predictions])
        np.testing.assert_allclose(got, made.probabilities, atol=TOLERANCE)
        assert predictions[0]["label"] == made.labels[int(got[0].argmax())]
        options = {"bounds": {"upper": {made.labels[0]: 0.25}}, "top_k": 3}
        document = http.post("/predict", json={"inputs": made.inputs, "options": options}).json()
        assert document["calibrator"]["version"] == version
        for prediction in document["predictions"]:
            by_label = {entry["label"]: entry["probability"] for entry in prediction["top"]}
            assert by_label[made.labels[0]] <= 0.25


def check_clients(url: str, made: Export) -> None:
    """Both clients get the library's probabilities, for each form in which they send the inputs."""
    for ask in (ask_blocking, ask_async):
        for method, given in _sent_by_clients(made):
            answer = ask(url, method, *given, probabilities=True, calibrator=0, upper={made.labels[0]: 1.0})
            got = np.array([one.probabilities for one in answer.predictions])
            np.testing.assert_allclose(got, made.probabilities, atol=TOLERANCE)


def _sent_by_clients(made: Export) -> Iterator[tuple[str, Sequence[Any]]]:
    if "text" in made.inputs[0]:
        yield "predict_texts", [one["text"] for one in made.inputs]
        if made.tokens is not None:
            yield "predict_tensors", [made.tokens]
        return
    rows = [one["features"] for one in made.inputs]
    yield "predict_features", [rows]
    if isinstance(rows[0], dict):
        yield "predict_features", [{name: [row[name] for row in rows] for name in rows[0]}]
        yield "predict_features", [pd.DataFrame(rows)]
    else:
        yield "predict_features", [np.array(rows, np.float64)]


def check_fit(url: str, made: Export) -> None:
    """Fit to the logits of the model, then to its samples, and check its answers again."""
    with httpx.Client(base_url=url, timeout=200) as http:
        logits = np.array([prediction["logits"] for prediction in uncalibrated(http, made)])
        many = np.tile(logits, (20, 1))
        labels = [made.labels[n % 3] for n in range(len(many))]
        body = {"logits": many.tolist(), "labels": labels, "method": "ts", "activate": "always"}
        assert http.post("/fit?wait=200", json=body).json()["state"] == "succeeded"
        check_fit_of_samples(http, made, labels)
    check_answers(url, made, version=1)


def check_fit_of_samples(http: httpx.Client, made: Export, labels: list[str]) -> None:
    """The rows or texts themselves give the fit that their logits give; other models take none."""
    member = next(iter(made.inputs[0]))
    name = {"text": "texts"}.get(member, member)
    samples = [made.inputs[n % len(made.inputs)][member] for n in range(len(labels))]
    body = {name: samples, "labels": labels, "method": "ts", "activate": "never"}
    answer = http.post("/fit?wait=200", json=body)
    if member == "image":
        assert answer.status_code == 422
        return
    assert answer.json()["state"] == "succeeded", answer.text
    of_logits, of_samples = (http.get(f"/calibrators/{version}/report").json() for version in (1, 2))
    assert of_samples["fit"]["nll"] == pytest.approx(of_logits["fit"]["nll"], abs=1e-6)
    assert of_samples["samples"] == len(labels)


def uncalibrated(http: httpx.Client, made: Export) -> list[dict[str, Any]]:
    options = {"probabilities": True, "logits": True, "calibrator": 0}
    answer = http.post("/predict", json={"inputs": made.inputs, "options": options})
    assert answer.is_success, answer.text
    predictions: list[dict[str, Any]] = answer.json()["predictions"]
    return predictions
