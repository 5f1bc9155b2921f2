"""The refit path and the registry over HTTP, against a real service; the default fit of the digits."""

from __future__ import annotations

import io
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from boxcal.app.client import BoxcalClient
from boxcal.calibrators import evaluate
from boxcal.models.digits_data import load_digits_split
from boxcal.models.loading.specifications import load_backbone
from tests.app.fitting.files import LABELS, LOGITS, npy
from tests.app.fitting.service import Service
from tests.app.fitting.test_refused_files import BAD
from tests.app.fitting.validation_data import CONTENT_TYPE, npz, overconfident, validation_npz
from tests.app.fitting.validation_data import multipart as multipart_body
from tests.app.tables.sets import softmax


def state_of(service: Service) -> dict[str, Any]:
    calibrate = service.client.post("/calibrate", json={"logits": [list(range(10))]}).json()
    return {
        "calibrators": service.client.get("/calibrators").json(),
        "fits": service.client.get("/fits").json(),
        "active": calibrate["calibrator"],
        "answer": calibrate["predictions"],
    }


def multipart(*parts: tuple[str, bytes]) -> dict[str, Any]:
    return {"content": multipart_body(*parts), "headers": {"content-type": CONTENT_TYPE}}


FILE = ('name="file"; filename="v.npz"', validation_npz(50))
GOOD = {"logits": LOGITS.tolist(), "labels": LABELS.tolist()}
MEMBER = "`method` is a field of the form or a member of the JSON body. The query"
WEIGHED = {**GOOD, "sample_weight": [1.0] * len(LABELS), "class_mix": "resampled"}
PARTS = {"logits": ("l", npy(LOGITS)), "label": ("y", npy(LABELS))}
TWICE = [('name="activate"', b"always"), ('name="activate"', b"never")]
BOTH = {"file": ("v", npz(logits=LOGITS, labels=LABELS)), "labels": ("y", npy(LABELS))}


@pytest.fixture
def untouched(service: Service) -> Iterator[None]:
    before = state_of(service)
    yield
    assert state_of(service) == before


@pytest.mark.usefixtures("untouched")
@pytest.mark.parametrize("name", ["empty", "JSON, cut off", "zip bomb", r"arrays: logits\[3, 1\] is nan"])
def test_a_bad_upload_is_a_problem_and_changes_nothing(service: Service, name: str) -> None:
    status, _, make = BAD[name]
    response = service.fit(make(), wait=0, activate="always")
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/problem+json"
    problem = response.json()
    assert problem["error"] == problem["detail"] != ""


@pytest.mark.usefixtures("untouched")
@pytest.mark.parametrize(
    ("status", "message", "request_"),
    [
        (415, "An upload is multipart/form-data or application/json, got 'no content type'", {}),
        (422, "needs `labels` and either `logits` or `probabilities`", {"json": {"logits": []}}),
        (400, "Missing boundary", {"content": b"x", "headers": {"content-type": "multipart/form-data"}}),
        (400, "not JSON", {"content": b"[1", "headers": {"content-type": "application/json"}}),
        (400, "does not begin with its boundary", multipart(FILE) | {"content": b"no parts here"}),
        (422, "needs one part `file`", multipart(('name="method"', b"ts"))),
        (422, "needs one part `file`", multipart(('name="file"', b"no file name"))),
        (422, "its parts with a file name: `file`, `file`", multipart(FILE, FILE)),
        (400, "the limit is 4,096", multipart(FILE, ('name="method"', b"x" * 5000))),
        (422, "'tss'; did you mean 'ts'? There are auto, uncal", multipart(FILE, ('name="method"', b"tss"))),
        (422, "For the method 'fc', features are needed", multipart(FILE, ('name="method"', b"fc"))),
        (422, "two fields `activate`; it may have each once", multipart(*TWICE, FILE)),
        (422, "`activate` = 'maybe'", multipart(FILE, ('name="activate"', b"maybe"))),
        (422, "no field `activated`; did you mean", multipart(FILE, ('name="activated"', b"always"))),
        (413, "has 4,000,", multipart((FILE[0], b"\0" * 4_000_000))),
        (422, f"no query parameter 'method'; {MEMBER}", {"url": "/fit?method=ts", "json": GOOD}),
        (422, f"'metod'; {MEMBER}", {"url": "/fit?metod=ts", "json": GOOD}),
        (422, "'wiat'; did you mean 'wait'?", {"url": "/fit?wiat=3", "json": GOOD}),
        (422, "'version'; did you mean 'versions'?", {"url": "/compare?methods=ts&version=1", "json": GOOD}),
        (422, "no field `metod`; did you mean 'method'? The fields are ", {"json": {**GOOD, "metod": "ts"}}),
        (422, "`sample_weight`", {"json": {**GOOD, "sample_weight": [1]}}),
        (422, "has a member 'label'; did you mean 'labels'?", {"files": PARTS}),
        (422, "one part `file`", {"files": BOTH}),
        (422, "`budget_seconds` = -1", {"json": {**GOOD, "budget_seconds": -1}}),
        (422, "`class_mix` = 'traffic'", {"json": {**GOOD, "class_mix": "traffic"}}),
        (422, "either `sample_weight` or class_mix=resampled", {"json": WEIGHED}),
        (422, "group=patient names a column of a table", {"json": {**GOOD, "group": "patient"}}),
        (422, "Nothing reads label=y: it names columns of a table", {"json": {**GOOD, "label": "y"}}),
        (422, "Nothing reads ignore=a,b: it names columns", {"json": {**GOOD, "ignore": "a,b"}}),
        (422, "Nothing reads label=y: it names columns", multipart(FILE, ('name="label"', b"y"))),
        *[(422, "wait", {"url": f"/fit?wait={one}", "json": GOOD}) for one in ("-1", "soon", "nan", "4000")],
    ],
)  # fmt: skip
def test_a_bad_form_is_a_problem_and_changes_nothing(
    service: Service, status: int, message: str, request_: dict[str, Any]
) -> None:
    response = service.client.post(**{"url": "/fit", **request_})
    assert (response.status_code, message in response.json()["detail"]) == (status, True), response.text


@pytest.mark.usefixtures("untouched")
def test_a_body_of_unannounced_length_is_cut_off_at_the_limit(service: Service) -> None:
    whole = multipart((FILE[0], b"\0" * 5_000_000))
    pieces = io.BytesIO(whole["content"])  # sent in chunks, without a length
    response = service.client.post(
        "/fit", content=iter(lambda: pieces.read(2**16), b""), headers=whole["headers"]
    )
    assert response.status_code == 413
    assert "more than 4,000,000 bytes" in response.json()["detail"]


@pytest.mark.usefixtures("untouched")
@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/fits/nonesuch", 404),
        ("GET", "/fits/nonesuch/events", 404),
        ("DELETE", "/fits/nonesuch", 404),
        ("GET", "/fits?limit=0", 422),
        ("GET", "/calibrators/99", 404),
        *[("GET", f"/calibrators/{version}", 422) for version in ("-1", "seven", "9" * 20)],
        *[("GET", f"/calibrators/0/{name}", 404) for name in ("report", "report.html", "artifact")],
        *[("GET", f"/calibrators/0/reliability.{kind}", 404) for kind in ("svg", "png", "json")],
        ("POST", "/calibrators/99/activate", 404),
    ],
)
def test_what_is_not_there_is_a_problem(service: Service, method: str, path: str, status: int) -> None:
    response = service.client.request(method, path)
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/problem+json"


def test_from_upload_to_rollback(service: Service) -> None:
    client = service.client
    active_version = client.get("/health/ready").json()["calibrator"]
    accepted = service.fit(validation_npz(400), wait=0, method="ts", activate="always")
    assert accepted.status_code == 202
    fit_id = accepted.json()["id"]
    assert accepted.headers["location"] == f"/fits/{fit_id}"
    assert accepted.json()["state"] == "queued"

    with client.stream("GET", f"/fits/{fit_id}/events") as stream:
        assert stream.headers["content-type"].startswith("text/event-stream")
        events = [json.loads(line[6:]) for line in stream.iter_lines() if line.startswith("data: ")]
    assert [event["progress"] for event in events] == sorted(event["progress"] for event in events)
    assert events[-1] == client.get(f"/fits/{fit_id}").json() == client.get("/fits").json()["fits"][0]
    done = events[-1]
    assert (done["state"], done["activated"], done["samples"]) == ("succeeded", True, 400)
    version = done["calibrator"]

    newest = client.get("/calibrators").json()["calibrators"][0]
    assert newest == client.get(f"/calibrators/{version}").json()
    assert (newest["version"], newest["method"], newest["active"]) == (version, "ts", True)
    assert newest["backbone"]["name"] == "digits"
    assert newest["spec"]["parameters"]["temperature"] > 2

    report = client.get(f"/calibrators/{version}/report").json()
    nll = report["metrics"]["nll"]
    assert nll["after"]["value"] < nll["before"]["value"]
    page = client.get(f"/calibrators/{version}/report.html")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert page.headers["content-security-policy"].startswith("default-src 'none';")
    assert f"<h1>Calibrator {version}</h1>" in page.text
    for name, kind, content in (("svg", "image/svg+xml", b"<svg"), ("png", "image/png", b"\x89PNG")):
        image = client.get(f"/calibrators/{version}/reliability.{name}")
        assert (image.headers["content-type"], content in image.content) == (kind, True)
    data = client.get(f"/calibrators/{version}/reliability.json").json()
    assert data == report["reliability"]
    assert data["after"]["samples"] == 400

    answer = client.post("/calibrate", json={"logits": LOGITS[:1].tolist()}).json()
    assert answer["calibrator"] == {"version": version, "method": "ts"}
    assert client.post("/calibrators/rollback").json()["version"] == active_version
    assert client.get("/health/ready").json()["calibrator"] == active_version
    again = client.post(f"/calibrators/{version}/activate").json()
    assert (again["version"], again["reason"]) == (version, "request")
    assert client.post("/calibrators/rollback").json()["version"] == active_version


def test_a_wait_that_is_too_short_answers_with_the_state_so_far(service: Service) -> None:
    response = service.fit(validation_npz(5000), wait=0.01, method="ts+pb", activate="never")
    assert response.status_code == 202
    assert response.json()["state"] in ("queued", "running")
    assert service.client.delete(response.headers["location"]).json()["state"] == "cancelled"
    late = service.client.delete(response.headers["location"])
    assert (late.status_code, late.json()["state"]) == (200, "cancelled")


def test_the_gate_keeps_what_is_not_better_out(service: Service) -> None:
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(200, 10))
    labels = (rng.gumbel(size=(200, 10)) + logits).argmax(axis=1)
    calibrated = npz(logits=logits, labels=labels)
    active_version = service.client.get("/health/ready").json()["calibrator"]
    done = service.fit(calibrated, method="ts").json()
    assert (done["state"], done["activated"]) == ("succeeded", False)
    assert "not significantly lower" in done["decision"]
    assert done["warnings"] == []
    assert service.client.get("/health/ready").json()["calibrator"] == active_version


def test_a_serious_warning_prevents_activation_unless_it_is_always(service: Service) -> None:
    logits, labels = overconfident(400)
    wrong_join = npz(logits=logits, labels=(labels + 1) % 10)
    active_version = service.client.get("/health/ready").json()["calibrator"]
    done = service.fit(wrong_join, method="vector").json()
    (warning,) = done["warnings"]
    assert (warning["code"], warning["severity"]) == ("error_rate", "serious")
    assert not done["activated"]
    assert f"Not activated: {warning['message']}" in done["decision"]
    assert service.client.get(f"/fits/{done['id']}").json()["warnings"] == [warning]
    report = service.client.get(f"/calibrators/{done['calibrator']}/report").json()
    assert report["warnings"] == [warning]
    assert service.client.get("/health/ready").json()["calibrator"] == active_version
    obeyed = service.fit(wrong_join, method="ts", activate="always").json()
    assert obeyed["activated"]
    assert "as asked, despite a serious warning: error rate" in obeyed["decision"]
    rolled_back = service.client.post("/calibrators/rollback").json()
    assert rolled_back["version"] == active_version


def test_data_of_the_active_calibrator_are_recognised(service: Service) -> None:
    first = service.fit(FILE[1], method="ts", activate="always").json()
    assert first["warnings"] == []
    again = service.fit(FILE[1], method="ts").json()
    assert [warning["code"] for warning in again["warnings"]] == ["known_rows"]
    service.client.post("/calibrators/rollback").raise_for_status()


def test_fits_beyond_the_queue_are_refused_before_their_bytes_are_read(service: Service) -> None:
    first = service.fit(validation_npz(5000), wait=0, method="ts+pb", activate="never")
    accepted = [first, *(service.fit(FILE[1], wait=0, method="ts", activate="never") for _ in range(8))]
    assert {response.status_code for response in accepted} == {202}
    refused = service.fit(b"never looked at", wait=0, method="ts")
    assert refused.status_code == 503
    assert int(refused.headers["retry-after"]) >= 1
    assert "9 fits are running or waiting" in refused.json()["detail"]
    for response in accepted:
        assert service.client.delete(response.headers["location"]).status_code == 200


def test_told_to_stop_the_service_tells_those_who_follow_a_fit_and_ends(tmp_path: Path) -> None:
    with Service(tmp_path / "data") as own:
        accepted = own.fit(validation_npz(5000), wait=0, method="ts+pb").headers["location"]
        waiting = own.fit(FILE[1], wait=0, method="ts").headers["location"]
        with own.client.stream("GET", f"{accepted}/events") as stream:
            lines = stream.iter_lines()
            assert next(lines).startswith("data: ")
            stopping = threading.Thread(target=own.process.terminate)
            stopping.start()
            events = [json.loads(line[6:]) for line in lines if line.startswith("data: ")]
        began = time.monotonic()
        assert own.wait() == 0
        assert time.monotonic() - began < 10
        assert events[-1]["state"] == "interrupted"
        assert "upload the validation set again" in events[-1]["error"]
        own.start()
        assert own.client.get(accepted).json() == events[-1]
        left = own.client.get(waiting).json()
        assert (left["state"], left["error"]) == ("interrupted", events[-1]["error"])


def test_told_to_stop_the_service_ends_though_a_fit_is_followed_that_it_leaves_to_others(
    tmp_path: Path,
) -> None:
    with Service(tmp_path / "data", shared_dir=str(tmp_path / "shared")) as own:
        accepted = own.fit(validation_npz(5000), wait=0, method="ts+pb").headers["location"]
        with own.client.stream("GET", f"{accepted}/events") as stream:
            lines = stream.iter_lines()
            assert next(lines).startswith("data: ")
            began = time.monotonic()
            own.process.terminate()
            states = [json.loads(line[6:])["state"] for line in lines if line.startswith("data: ")]
            assert set(states) <= {"running", "queued"}  # which of them is last, is chance
        assert own.wait() == 0
        assert time.monotonic() - began < 10


def test_json_and_npy_parts_are_fitted_alike_and_scaled_with_a_warning(service: Service) -> None:
    fields = {"method": "ts", "activate": "never"}
    logits, labels = overconfident(200)
    shares = 0.993 * softmax(logits.astype(float))
    in_json = {"probabilities": shares.tolist(), "labels": labels.tolist(), **fields}
    parts = {"logits": ("l", npy(logits)), "labels": ("y", npy(labels.astype(str)[:, None]))}
    nll = []
    for sent, warnings in (
        ({"json": in_json}, ["probabilities_scaled"]),
        ({"files": parts, "data": fields}, []),
    ):
        fit = service.client.post("/fit?wait=200", **sent).json()
        assert fit["state"] == "succeeded", fit
        assert [warning["code"] for warning in fit["warnings"]] == warnings
        nll.append(service.client.get(f"/calibrators/{fit['calibrator']}/report").json()["fit"]["nll"])
    assert nll[0] == pytest.approx(nll[1], rel=1e-6)


def test_a_form_may_have_every_field_and_every_array(service: Service) -> None:
    logits, labels = overconfident(60)
    rows = [f"{','.join(map(str, row))},{label},{label},x" for row, label in zip(logits, labels, strict=True)]
    table = "\n".join([f"{','.join('0123456789')},y,patient,note", *rows]).encode()
    with BoxcalClient(service.url) as client:
        of_table = client.fit(
            table, method="ts", activate="never", budget_seconds=9, scores="logits", label="y",
            group="patient", ignore=["note"], labels_as="index", class_mix="as_traffic",
        )  # fmt: skip
    service.client.delete(f"/fits/{of_table.id}")
    fields = {"method": "ts", "activate": "never", "budget_seconds": "9", "scores": "logits"}
    declared = {"labels_as": "index", "class_mix": "as_traffic"}
    arrays = {"logits": logits, "labels": labels, "features": logits[:, :3], "groups": labels}
    files = {name: (name, npy(array)) for name, array in (arrays | {"sample_weight": np.ones(60)}).items()}
    of_arrays = service.client.post("/fit", data=fields | declared, files=files).json()
    service.client.delete(f"/fits/{of_arrays.get('id')}")
    assert (of_table.samples, of_arrays.get("samples")) == (60, 60), of_arrays
    refused = service.client.post("/fit", **multipart(*[FILE] * 17)).json()
    assert refused["detail"] == "The multipart body has more than 16 parts."


def test_the_default_fit_improves_nll_and_both_calibration_errors(service: Service) -> None:
    backbone, split = load_backbone("digits", device="cpu"), load_digits_split()
    upload = npz(logits=backbone(split.validation.levels), labels=split.validation.labels)
    done = service.client.post("/fit?wait=240", files={"file": ("digits.npz", upload)}).json()
    assert (done["state"], done["activated"]) == ("succeeded", True), done
    logits, metrics = np.asarray(backbone(split.test.levels)).tolist(), []
    for version in (0, done["calibrator"]):
        options = {"probabilities": True, "calibrator": version}
        answer = service.client.post("/calibrate", json={"logits": logits, "options": options}).json()
        probabilities = np.array([row["probabilities"] for row in answer["predictions"]])
        metrics.append(evaluate(probabilities, split.test.labels))
    before, after = metrics
    assert after.nll < before.nll
    assert after.ece_width < before.ece_width
    assert after.ece_mass < before.ece_mass
    assert service.client.post("/calibrators/rollback").json()["version"] != done["calibrator"]
