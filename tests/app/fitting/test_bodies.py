"""`/fit` with a JSON body and with `.npy` parts; what it does not know is refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from tests.app.fitting.files import LABELS, LOGITS, npy
from tests.app.fitting.service import Service
from tests.app.fitting.validation_data import npz, overconfident

LOGITS_200, LABELS_200 = overconfident(200)


def finished(answer: Any, service: Service) -> Any:
    assert answer.is_success, answer.text
    fit = answer.json()
    assert fit["state"] == "succeeded", fit
    report = service.client.get(f"/calibrators/{fit['calibrator']}/report").json()
    return fit, report


def test_json_and_npy_parts_are_fitted_alike(service: Service) -> None:
    fields = {"method": "ts", "activate": "never"}
    from_json = service.client.post(
        "/fit?wait=200", json={"logits": LOGITS_200.tolist(), "labels": LABELS_200.tolist(), **fields}
    )
    files = {"logits": ("l", npy(LOGITS_200)), "labels": ("y", npy(LABELS_200.astype(str)[:, None]))}
    from_parts = service.client.post("/fit?wait=200", files=files, data=fields)
    nll = [finished(answer, service)[1]["fit"]["nll"] for answer in (from_json, from_parts)]
    assert nll[0] == pytest.approx(nll[1], rel=1e-6)


def test_scaled_probabilities_are_a_warning_of_the_report(service: Service) -> None:
    from scipy.special import softmax

    sent = softmax(LOGITS_200.astype(float), axis=1) * 0.993
    sets = {"probabilities": sent.tolist(), "labels": LABELS_200.tolist()}
    body = sets | {"method": "ts", "activate": "never"}
    fit, _ = finished(service.client.post("/fit?wait=200", json=body), service)
    assert "probabilities_scaled" in [warning["code"] for warning in fit["warnings"]]


GOOD = {"logits": LOGITS.tolist(), "labels": LABELS.tolist()}
MEMBER = "`method` is a field of the form or a member of the JSON body. The query"
NPY = {"logits": ("l", npy(LOGITS)), "label": ("y", npy(LABELS))}
BOTH = {"file": ("v", npz(logits=LOGITS, labels=LABELS)), "labels": ("y", npy(LABELS))}
UNKNOWN: list[tuple[str, dict[str, Any], str]] = [
    ("/fit?method=ts", {"json": GOOD}, f"no query parameter 'method'; {MEMBER}"),
    ("/fit?metod=ts", {"json": GOOD}, f"'metod'; {MEMBER}"),
    ("/fit?wiat=3", {"json": GOOD}, "'wiat'; did you mean 'wait'?"),
    ("/compare?methods=ts&version=1", {"json": GOOD}, "'version'; did you mean 'versions'?"),
    ("/fit", {"json": {**GOOD, "metod": "ts"}}, "no field `metod`; did you mean 'method'?"),
    ("/fit", {"json": {**GOOD, "sample_weight": [1]}}, "`sample_weight`"),
    ("/fit", {"files": NPY}, "has a member 'label'; did you mean 'labels'?"),
    ("/fit", {"files": BOTH}, "one part `file`"),
    ("/fit", {"json": {**GOOD, "budget_seconds": -1}}, "`budget_seconds` = -1"),
]


@pytest.mark.parametrize(("path", "request_", "message"), UNKNOWN)
def test_what_is_unknown_is_refused_by_name(
    service: Service, path: str, request_: dict[str, Any], message: str
) -> None:
    answer = service.client.post(path, **request_)
    assert answer.status_code == 422, answer.text
    assert message in answer.json()["detail"]
