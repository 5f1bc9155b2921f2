"""Both clients against the real service: every route, what it answers and what it refuses."""

import importlib.metadata
import inspect
import io
import json
import os
import re
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast
from urllib.parse import unquote

import httpx
import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image

from boxcal.app.client import (
    BoxcalClient,
    ConflictError,
    FitNotSucceededError,
    InvalidRequestError,
    NotFoundError,
    bodies,
    calls,
)
from boxcal.calibrators import Calibrator
from boxcal.models.digits_data import Digits
from tests.app.client.both import Ask
from tests.app.fitting.validation_data import overconfident, validation_npz

MASKED = np.ma.array([[1.0, 2.0], [3.0, 4.0]], mask=[[False, False], [False, True]])
PLAIN = {"probabilities": True, "calibrator": 0}


def test_images_by_path_and_by_bytes_come_back_in_order(
    ask: Ask, url: str, digits: Digits, tmp_path: Path
) -> None:
    paths = [tmp_path / f"{i}.png" for i in range(5)]
    for i, path in enumerate(paths):
        path.write_bytes(digits.png(i))
    together = ask(url, "predict", *paths[:3], digits.png(3), str(paths[4]), logits=True)
    alone = [ask(url, "predict", digits.png(i), logits=True).predictions[0] for i in range(5)]
    for joint, single in zip(together.predictions, alone, strict=True):
        np.testing.assert_allclose(joint.logits, single.logits, atol=1e-4)


def test_images_of_pil_and_pixels_are_those_of_their_files(
    ask: Ask, url: str, digits: Digits, tmp_path: Path
) -> None:
    sent = digits.png(2)
    image = Image.open(io.BytesIO(sent))
    grey = np.asarray(image)
    turned = Image.Exif()
    turned[0x0112] = 6
    image.rotate(90).save(tmp_path / "turned.jpg", quality=100, exif=turned)
    opaque = np.full_like(grey, 255)
    images = [image, grey, grey[:, :, None], image.convert("P"), image.convert("CMYK")]
    images += [np.stack([grey] * 3, axis=2), np.stack([grey] * 3 + [opaque], axis=2)]
    answers = ask(url, "predict", sent, *images, logits=True).predictions
    for answer in answers[1:]:
        np.testing.assert_allclose(answer.logits, answers[0].logits, atol=1e-4)
    opened = Image.open(tmp_path / "turned.jpg")
    by_path, by_image = ask(url, "predict", tmp_path / "turned.jpg", opened, logits=True).predictions
    np.testing.assert_allclose(by_image.logits, by_path.logits, atol=1e-4)
    for wrong in (grey / 255, np.stack([grey] * 3), grey[None, :, :, None]):
        with pytest.raises(ValueError, match=r"uint8 \(H, W\), .* got .*; predict_tensors takes"):
            calls.predict(wrong)


@pytest.mark.parametrize("upper", [0.3, list(np.linspace(0.3, 0.4, 10))])
def test_logits_go_as_an_array_or_with_large_options_as_json(
    ask: Ask, url: str, upper: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits, _ = overconfident(7)
    expected = ask(url, "calibrate", logits, upper=upper, **PLAIN)
    monkeypatch.setattr(bodies, "LONGEST_QUERY", 0)
    as_json = ask(url, "calibrate", logits, upper=upper, **PLAIN)
    assert as_json.predictions == expected.predictions
    assert np.array([p.probabilities for p in expected.predictions]).max() <= np.max(upper)


def test_a_series_bounds_the_classes_of_its_index(ask: Ask, url: str) -> None:
    """Not those of its positions."""
    logits, _ = overconfident(50)
    for upper in (pd.Series({"7": 0.5, "2": 0.25}), {"2": 0.25, "7": 0.5}):
        answer = ask(url, "calibrate", logits, upper=upper, **PLAIN)
        largest = np.max([p.probabilities for p in answer.predictions], 0)
        assert (largest[2], largest[7]) == (0.25, 0.5)
    assert bodies.options_document({"upper": pd.Series([0.5, 0.75])}) == {"bounds": {"upper": [0.5, 0.75]}}


def test_names_of_columns_are_not_lost() -> None:
    frame = pd.DataFrame(overconfident(50)[0], columns=list("9876543210"))
    for call in (
        calls.calibrate,
        calls.calibrate_probabilities,
        lambda rows: calls.fit_arrays(rows, [0] * 50),
    ):
        with pytest.raises(TypeError, match=r"order of `labels` in client.model\(\), and pass .to_numpy\(\)"):
            call(frame)
    np.testing.assert_array_equal(bodies.float_array(pd.DataFrame([[1.0, 2.0]])), [[1.0, 2.0]])
    for columns in ([1, 0], [1, 2], [False, True]):
        with pytest.raises(TypeError, match=r"not matched with the classes here.*pass .to_numpy\(\)"):
            bodies.float_array(pd.DataFrame([[1.0, 2.0]], columns=columns))


def test_labels_are_sent_as_texts_or_numbers() -> None:
    for labels, kind in (
        (pd.Categorical(["dog", "cat"]), "U"),
        (pd.Series(["dog", "cat"], dtype="string"), "U"),
        (pd.Series([1, 0], dtype="Int64"), "i"),
        (np.array([np.int64(1), 0], object), "i"),
    ):
        sent = bodies.label_array(labels)
        assert (sent.dtype.kind, sent.tolist()) == (kind, list(labels))
    content = calls.feedback({"a": cast("int", np.int64(3)), "b": np.str_("cat")}).arguments["content"]
    assert json.loads(content) == {"items": [{"id": "a", "label": 3}, {"id": "b", "label": "cat"}]}
    for missing in (None, pd.NA, float("nan")):
        with pytest.raises(
            TypeError, match=r"labels\[1\] is .*; a label is the name or the index of a class"
        ):
            calls.fit_arrays([[0.0, 1.0]] * 2, np.array(["dog", missing], object))


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: calls.calibrate(MASKED), "the array"),
        (lambda: calls.calibrate_probabilities(MASKED), "the array"),
        (lambda: calls.predict_features(MASKED), "the array"),
        (lambda: calls.fit_arrays(MASKED, [0, 1]), "the array"),
        (lambda: calls.fit_arrays([[0.0, 1.0]] * 2, np.ma.array([0, 1], mask=[False, True])), "labels"),
        (lambda: calls.calibrate([[0.0, 1.0]], upper=cast("Any", MASKED[1])), "upper"),
    ],
)
def test_masked_values_are_refused(call: Callable[[], object], name: str) -> None:
    with pytest.raises(ValueError, match=f"^{name} has masked values: leave them out or fill them$"):
        call()


def test_an_array_that_masks_nothing_is_sent() -> None:
    assert bodies.float_array(np.ma.array([[1.0, 2.0]])).tolist() == [[1.0, 2.0]]


def test_options_may_be_numbers_of_numpy() -> None:
    options: Any = {"top_k": np.int64(2), "explain": np.bool_(True), "timeout_ms": np.float32(500.0)}
    for call in (calls.calibrate([[0.0, 1.0]], **options), calls.predict(b"x", **options)):
        sent = call.arguments.get("params") or call.arguments["data"]
        assert json.loads(sent["options"]) == {"top_k": 2, "explain": True, "timeout_ms": 500.0}


@pytest.mark.parametrize(
    ("milliseconds", "extra"),
    [(None, 0.0), (500, 0.0), (30_000, 0.0), (60_000, 30.0), (np.float64(90_000), 60.0), (np.inf, 86_370.0)],
)
def test_the_client_waits_as_long_as_the_service_may_take(milliseconds: Any, extra: float) -> None:
    for call in (
        calls.calibrate([[0.0, 1.0]], timeout_ms=milliseconds),
        calls.calibrate_probabilities([[0.0, 1.0]], timeout_ms=milliseconds),
        calls.predict(b"x", timeout_ms=milliseconds),
        calls.predict_features(np.zeros((1, 1)), timeout_ms=milliseconds),
        calls.predict_tensors([[0.0]], timeout_ms=milliseconds),
    ):
        assert BoxcalClient()._arguments(call)["timeout"].read == 35.0 + extra


def test_ids_are_quoted_in_paths() -> None:
    asked = [build("a/../b?c#d").path for build in (calls.fit_state, calls.cancel_fit, calls.fit_events)]
    assert asked == ["/fits/a%2F..%2Fb%3Fc%23d"] * 2 + ["/fits/a%2F..%2Fb%3Fc%23d/events"]


def test_a_fit_from_upload_to_rollback(ask: Ask, url: str) -> None:
    before = next(c.version for c in ask(url, "calibrators") if c.active)
    logits, labels = overconfident()
    queued = ask(url, "fit_arrays", logits, labels, method="ts", activate="always")
    states: list[float] = []
    done = ask(url, "wait_for_fit", queued.id, lambda fit: states.append(fit.progress))
    assert states == sorted(states)
    assert (done.state, done.activated, done.progress) == ("succeeded", True, 1.0)

    record = ask(url, "calibrator", done.version)
    assert (record.method, record.active, record.samples) == ("ts", True, len(labels))
    calibrator = Calibrator.from_bytes(ask(url, "artifact", done.version))
    served = ask(url, "calibrate", logits[:9], probabilities=True)
    assert served.calibrator.version == done.version
    np.testing.assert_array_equal(
        [p.probabilities for p in served.predictions], calibrator(torch.from_numpy(logits[:9])).numpy()
    )
    assert ask(url, "report", done.version)["method"] == "ts"
    assert b"<svg" in ask(url, "reliability_diagram", done.version)
    assert ask(url, "reliability_image", done.version).startswith(b"\x89PNG")
    assert ask(url, "reliability_data", done.version).keys() == {"before", "after", "classes"}

    for call, arguments in (("rollback", ()), ("activate", (before,))):
        with pytest.raises(ConflictError, match=f"Version {done.version} is active, not version {before} as"):
            ask(url, call, *arguments, expected=before)
    assert ask(url, "rollback", expected=done.version).version == before
    assert ask(url, "activate", done.version, expected=before).version == done.version
    assert ask(url, "activate", before).version == before
    assert ask(url, "fits", limit=1)[0].id == queued.id


def test_a_fit_to_a_folder_of_images(ask: Ask, url: str, digits: Digits, tmp_path: Path) -> None:
    for i in range(60):
        folder = tmp_path / str(digits.labels[i])
        folder.mkdir(exist_ok=True)
        (folder / f"{i}.png").write_bytes(digits.png(i))
    done = ask(url, "fit", tmp_path, method="ts", activate="never", wait=100)
    assert (done.state, done.samples) == ("succeeded", 60)


def test_a_folder_is_packed_whatever_its_files_are_called_and_however_old_they_are(tmp_path: Path) -> None:
    names = {b"caf\xc3\xa9.png": 0, b"\xff.png": 5e9}  # of 1970, and of 2128
    for name, time in names.items():
        path = tmp_path / "0" / os.fsdecode(name)
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"image")
        os.utime(path, (time, time))
    with zipfile.ZipFile(io.BytesIO(bodies.pack_images(tmp_path))) as packed:
        found = {entry.filename: entry.date_time[0] for entry in packed.infolist()}
    assert found == {"0/caf\xe9.png": 1980, "0/\\xff.png": 2107}


def test_a_fit_can_be_cancelled_until_it_is_over(ask: Ask, url: str) -> None:
    queued = ask(url, "fit", validation_npz(4000), method="auto", activate="never")
    ask(url, "cancel_fit", queued.id)
    with pytest.raises(FitNotSucceededError, match="cancelled"):
        ask(url, "wait_for_fit", queued.id)
    done = ask(url, "fit", validation_npz(), method="ts", activate="never", wait=60)
    assert (done.state, done.activated) == ("succeeded", False)
    assert ask(url, "fit_state", done.id) == done
    with pytest.raises(ConflictError, match=done.id):
        ask(url, "cancel_fit", done.id)


def test_health_release_and_metrics(ask: Ask, url: str) -> None:
    assert ask(url, "version")["version"] == importlib.metadata.version("boxcal")
    assert ask(url, "live").ready
    health = ask(url, "wait_until_ready", 5.0)
    assert (health.ready, health.model) == (True, "digits")
    assert "boxcal_request_seconds_bucket" in ask(url, "metrics")


ZEROS = [[0.0] * 10]
REFUSED: dict[str, tuple[str, tuple[Any, ...], dict[str, Any], type[Exception]]] = {
    "expected JPEG, PNG or WebP": ("predict", (b"no image",), {}, InvalidRequestError),
    "add up to 0.5": ("calibrate", (ZEROS,), {"upper": 0.05}, InvalidRequestError),
    "'magic'": ("fit", (validation_npz(),), {"method": "magic"}, InvalidRequestError),
    "nowhere": ("follow", ("nowhere",), {}, NotFoundError),
    "calibrator 77": ("artifact", (77,), {}, NotFoundError),
}


@pytest.mark.parametrize("says", REFUSED)
def test_refusals_come_with_their_reason(ask: Ask, url: str, says: str) -> None:
    name, arguments, options, kind = REFUSED[says]
    with pytest.raises(kind, match=says):
        ask(url, name, *arguments, **options)


PLACEHOLDERS: dict[str, Any] = {
    **{"fit_id": "{}", "version": "{}", "file": b"", "logits": [[0.0]], "labels": [0], "tensors": [[0.0]]},
    **{"images": b"x", "probabilities": [[1.0]], "items": {"0": 1}, "champion": 0, "challenger": 1},
    **{"rows": [[0.0]], "texts": "x"},
}


def test_every_route_has_its_method(url: str) -> None:
    """What the OpenAPI document lists, the client has, and nothing else."""
    document = httpx.get(f"{url}/openapi.json").json()
    routes = {
        (method.upper(), re.sub(r"\{[^/]*", "{}", path))
        for path, methods in document["paths"].items()
        for method in methods
    }
    found = set()
    for name, build in inspect.getmembers(calls, inspect.isfunction):
        is_own = build.__module__ == calls.__name__ and not name.startswith("_")
        if is_own and "Call" in str(build.__annotations__["return"]):
            assert hasattr(BoxcalClient, name) or name in {"fit_events", "monitor_events"}  # `follow` reads
            call = build(
                *(
                    PLACEHOLDERS[one.name]
                    for one in inspect.signature(build).parameters.values()
                    if one.default is one.empty and one.kind is not one.VAR_KEYWORD
                )
            )
            found.add((call.method, unquote(call.path)))
    assert found == routes


def test_a_data_frame_is_sent_by_the_names_of_its_columns() -> None:
    frame = pd.DataFrame(
        {
            "age": pd.array([31, None], dtype="Int64"),
            "height": [1.5, float("nan")],
            "city": pd.Categorical(["Oslo", "Rome"]),
            "member": [True, False],
            7: np.array([2, 3], np.int32),
        },
        index=[8, 5],
    )
    sent = json.loads(calls.predict_features(frame).arguments["content"])["inputs"]
    assert sent == [
        {"features": {"age": 31, "height": 1.5, "city": "Oslo", "member": 1, "7": 2}},
        {"features": {"age": None, "height": None, "city": "Rome", "member": 0, "7": 3}},
    ]
    document = calls.fit({"features": frame[["city"]], "labels": pd.Series([1, 0])}).arguments["files"][0][1]
    assert json.loads(document[1]) == {"features": [{"city": "Oslo"}, {"city": "Rome"}], "labels": [1, 0]}
    refused: dict[str, Any] = {
        "different names, got age, age": frame[["age", "age"]],
        "as many values as the others, got age 2, city 1": {"age": [1, 2], "city": ["Rome"]},
    }
    for says, wrong in refused.items():
        with pytest.raises(ValueError, match=says):
            calls.predict_features(wrong)
    with pytest.raises(ValueError, match="at least one input"):
        calls.predict_texts()
