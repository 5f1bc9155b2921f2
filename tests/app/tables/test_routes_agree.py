"""The same rows give the same probabilities at every route, in the library and in files, zeros included."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pandas as pd
import pytest
import torch

from boxcal import BoxCalibrator, Calibrator, fit
from tests.app.fitting.files import npy
from tests.app.fitting.validation_data import npz
from tests.app.running import running
from tests.app.tables.sets import given, softmax

NAMES = ("ape", "bee", "cat")
SET = given(NAMES, 300, seed=3)
PROBABILITIES = softmax(SET.scores)
PROBABILITIES[:40, 0] = 0.0  # as a forest answers
PROBABILITIES /= PROBABILITIES.sum(axis=1, keepdims=True)
ROWS = PROBABILITIES[:60]


post = partial(httpx.post, timeout=100)


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A service without a model that has fitted `vector` to probabilities with zeros."""
    folder = tmp_path_factory.mktemp("routes")
    (folder / "labels.txt").write_text("\n".join(NAMES))
    with running(folder / "data", model="logits:3", labels=folder / "labels.txt") as service:
        fitted = post(
            f"{service.url}/fit?wait=60",
            files={"file": npz(probabilities=PROBABILITIES, labels=SET.labels)},
            data={"method": "vector", "activate": "always"},
        ).json()
        assert fitted["state"] == "succeeded", fitted
        yield service.url


@pytest.fixture(scope="module")
def calibrator(url: str) -> Calibrator:
    active = httpx.get(f"{url}/calibrators").json()["calibrators"]
    version = max(one["version"] for one in active)
    return Calibrator.from_bytes(httpx.get(f"{url}/calibrators/{version}/artifact").content)


def by_json(url: str, rows: Any, member: str = "probabilities") -> Any:
    body = {member: rows.tolist(), "options": {"probabilities": True}}
    answer = post(f"{url}/calibrate", json=body)
    return np.array([one["probabilities"] for one in answer.json()["predictions"]])


def by_npy(url: str, rows: Any) -> Any:
    headers = {"content-type": "application/x-npy", "accept": "application/x-npy"}
    answer = post(f"{url}/calibrate?scores=probabilities", content=npy(rows), headers=headers)
    return np.load(io.BytesIO(answer.content))


def by_v2(url: str, rows: Any) -> Any:
    one = {"name": "probabilities", "shape": [60, 3], "datatype": "FP64", "data": rows.ravel().tolist()}
    answer = post(f"{url}/v2/models/logits:3.calibrator/infer", json={"inputs": [one]}).json()
    found = next(output for output in answer["outputs"] if output["name"] == "probabilities")
    return np.array(found["data"]).reshape(found["shape"])


ROUTES: dict[str, Callable[[str, Any], Any]] = {
    "json": by_json,
    "percent": lambda url, rows: by_json(url, 100 * rows, "percent"),
    "npy": by_npy,
    "v2": by_v2,
}


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("route", ROUTES)
def test_every_route_answers_the_same(route: str, dtype: Any, url: str, calibrator: Calibrator) -> None:
    rows = ROWS.astype(dtype)
    expected = calibrator(torch.from_numpy(np.log(np.maximum(ROWS, 2.0**-126)))).numpy()
    tolerance = 1e-12 if dtype is np.float64 else 1e-6
    np.testing.assert_allclose(ROUTES[route](url, rows), expected, rtol=0, atol=tolerance)


def test_a_calibrator_keeps_the_names_of_its_classes(calibrator: Calibrator) -> None:
    assert calibrator.classes == NAMES
    indices = replace(calibrator, classes=["0", "1", "2"])
    assert Calibrator.from_bytes(indices.to_bytes()).classes is None


def test_one_score_of_two_classes_at_every_route(tmp_path: Path) -> None:
    one = given(("no", "yes"), 200)
    odds = one.scores[:, 1] - one.scores[:, 0]
    second = 1 / (1 + np.exp(-odds))
    (tmp_path / "labels.txt").write_text("no\nyes")
    with running(tmp_path / "data", model="logits:2", labels=tmp_path / "labels.txt") as service:
        url = service.url

        for member, scores in (
            ("logits", odds),
            ("logits", odds[:, None]),
            ("probabilities", second),
            ("percent", 100 * second[:, None]),
        ):
            np.testing.assert_allclose(by_json(url, scores, member)[:, 1], second, atol=1e-9)
        headers = {"content-type": "application/x-npy", "accept": "application/x-npy"}
        for shape in ((-1,), (-1, 1)):
            answer = post(f"{url}/calibrate", content=npy(odds.reshape(shape)), headers=headers)
            np.testing.assert_allclose(np.load(io.BytesIO(answer.content))[:, 1], second, atol=1e-12)
        named = post(f"{url}/calibrate", json={"logits": [9.0]}).json()["predictions"][0]
        assert (named["label"], named["index"]) == ("yes", 1)
        wrong = post(f"{url}/calibrate", json={"logits": [9.0, [1.0, 2.0]]})
        assert wrong.status_code == 422
        assert "logits[1] has 2 numbers" in wrong.json()["detail"]
    sklearn_like = BoxCalibrator("ts").fit(odds, one.named_labels())
    both = fit("ts", one.scores, one.labels).calibrator
    np.testing.assert_allclose(
        sklearn_like.predict_proba(odds), both(torch.from_numpy(one.scores)).numpy(), atol=1e-9
    )


NUMBERS = ("0", "1", "10", "2")  # as a listing of folders sorts them


def test_an_integer_label_of_feedback_is_the_name_where_names_are_integers(tmp_path: Path) -> None:
    (tmp_path / "labels.txt").write_text("\n".join(NUMBERS))
    logits = np.eye(4).tolist()
    labels = [0, 1, 10, 2]
    with running(tmp_path / "data", model="logits:4", labels=tmp_path / "labels.txt") as service:
        url = service.url
        asked = post(f"{url}/calibrate", json={"logits": logits, "options": {"feedback": True}}).json()
        ids = [one["id"] for one in asked["predictions"]]

        def told(body: Any, kind: str = "application/json") -> Any:
            return post(f"{url}/feedback", content=body, headers={"content-type": kind}).json()

        lines = "\n".join(f"{one},{label}" for one, label in zip(ids, labels, strict=True))
        assert told(f"id,label\n{lines}", "text/csv")["accepted"] == 4
        for kind in (int, float, str):
            table = pd.DataFrame({"id": ids, "label": pd.Series(labels).astype(kind)})
            same = told(table.to_parquet(), "application/vnd.apache.parquet")
            assert (same["duplicates"], same["conflicts"]) == (4, 0), (kind, same)
            items = [{"id": one, "label": kind(label)} for one, label in zip(ids, labels, strict=True)]
            same = told(json.dumps({"items": items}))
            assert (same["duplicates"], same["conflicts"]) == (4, 0), (kind, same)
        wrong = told(json.dumps({"items": [{"id": ids[0], "label": 3}]}))
        assert wrong["malformed"] == 1
        assert "label is 3; it is the name of a class" in wrong["problems"][0]["detail"]


def test_a_dataframe_of_logits_names_the_classes() -> None:
    one = given(NAMES, 300, seed=4)
    table = pd.DataFrame(one.scores, columns=list(NAMES))
    expected = fit("vector", one.scores, one.labels).calibrator
    found = fit("vector", table, one.named_labels()).calibrator
    assert found.classes == NAMES
    assert found.spec == expected.spec
    with pytest.raises(ValueError, match=r"labels\[2\] is 'eel', which names no column"):
        fit("ts", table, ["ape", "bee", "eel"] * 100)
    fixed = one.scores.copy()
    fixed.flags.writeable = False
    np.testing.assert_allclose(
        BoxCalibrator("ts").fit(fixed, one.labels).predict_proba(fixed),
        fit("ts", one.scores, one.labels).calibrator(torch.from_numpy(one.scores)).numpy(),
    )
