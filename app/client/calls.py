"""Every route as a function that gives a `Call`: what to send and how to read the response.

Both clients are made of these functions; nothing here sends anything.
"""

import io
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypedDict, TypeVar, Unpack
from urllib.parse import quote

import httpx
import numpy as np
import numpy.typing as npt
from pydantic import BaseModel

from boxcal.app.client.bodies import (
    AnswerOptions,
    FeatureRows,
    ImageSource,
    ValidationData,
    array_body,
    features_body,
    float_array,
    image_part,
    inputs_body,
    label_array,
    options_document,
    plain,
    tensors_body,
    upload_part,
)
from boxcal.app.client.exchange import Call
from boxcal.app.schemas.calibrators import Activated, CalibratorDocument
from boxcal.app.schemas.fits import ActivatePolicy, Fit
from boxcal.app.schemas.monitoring import Feedback
from boxcal.app.schemas.predictions import Answer
from boxcal.app.schemas.service import Health


def predict(*images: ImageSource, **options: Unpack[AnswerOptions]) -> Call[Answer]:
    """Classify images (`POST /predict`) in one request.

    Parameters
    ----------
    images
        Each is an encoded image as bytes, the path of one, an image of PIL, or pixels in RGB, uint8 of shape
        (H, W), (H, W, 3) or (H, W, 4).
    """
    if not images:
        raise ValueError("predict needs at least one image")
    files = [("file", image_part(image, position)) for position, image in enumerate(images)]
    form = {"files": files, "data": {"options": json.dumps(options_document(options))}}
    return _answering("/predict", form, options)


def predict_tensors(
    tensors: npt.ArrayLike | Mapping[str, Any], /, **options: Unpack[AnswerOptions]
) -> Call[Answer]:
    """Classify a batch of preprocessed inputs (`POST /predict`).

    Parameters
    ----------
    tensors
        Floats of shape (N, *input_shape); or, for a model of tokens, N rows of integers for each named input,
        such as `{"input_ids": [[5, 7], [9]]}`.
    """
    return _answering("/predict", tensors_body(tensors, options), options)


def predict_features(rows: FeatureRows, /, **options: Unpack[AnswerOptions]) -> Call[Answer]:
    """Classify rows of features (`POST /predict`).

    Parameters
    ----------
    rows
        An array (N, D); a list of rows, each a list of values or an object of values by name; N values for
        each name; or a DataFrame, whose columns are the features by name. None and NaN are missing values.
    """
    return _answering("/predict", features_body(rows, options), options)


def predict_texts(*texts: str, **options: Unpack[AnswerOptions]) -> Call[Answer]:
    """Classify texts (`POST /predict`) in one request."""
    return _answering("/predict", inputs_body([{"text": text} for text in texts], options), options)


def calibrate(logits: npt.ArrayLike, /, **options: Unpack[AnswerOptions]) -> Call[Answer]:
    """Turn logits of a model that runs elsewhere, shape (N, K), into probabilities (`POST /calibrate`)."""
    return _answering("/calibrate", array_body(logits, options, lambda rows: {"logits": rows}), options)


def calibrate_probabilities(
    probabilities: npt.ArrayLike, /, **options: Unpack[AnswerOptions]
) -> Call[Answer]:
    """Calibrate probabilities of a model that runs elsewhere, shape (N, K) (`POST /calibrate`)."""
    sent = array_body(probabilities, options, lambda rows: {"probabilities": rows})
    if "params" in sent:
        sent["params"] = {**sent["params"], "scores": "probabilities"}
    return _answering("/calibrate", sent, options)


def _answering(path: str, sent: Mapping[str, Any], options: AnswerOptions) -> Call[Answer]:
    timeout = min(float(options.get("timeout_ms") or 0.0) / 1000, LONGEST_SECONDS)
    return Call(
        "POST",
        path,
        _answer,
        sent,
        has_effect=bool(options.get("feedback")),
        extra_seconds=max(0.0, timeout - SERVICE_SECONDS),
    )


def _answer(response: httpx.Response) -> Answer:
    return Answer.model_validate_json(response.content)


Result = TypeVar("Result", bound=BaseModel)

SERVICE_SECONDS = 30.0
"""The service's default timeout, which the client's own timeout covers."""
LONGEST_SECONDS = 86_400.0
"""A timeout that sockets take; they take no infinite one."""
COMPARE_SECONDS = 420.0
"""Longest check and comparison in the service."""
FEEDBACK_SECONDS = 10.0
"""A label may wait for its prediction to be stored."""


class FeedbackItem(TypedDict, total=False):
    """The true label of one prediction.

    Attributes
    ----------
    id
        Of the prediction.
    label
        Name or index of the class.
    propensity
        Probability with which this prediction was chosen to be labelled.
    source
        Who or what labelled it.
    logits, key
        Instead of `id`: the K logits of a prediction that the service did not make, and what identifies it.
    """

    id: str
    label: str | int
    propensity: float | None
    source: str | None
    logits: Sequence[float]
    key: str


TABLES = {".csv": "text/csv", ".parquet": "application/vnd.apache.parquet"}
"""Types of the files of labels that the service reads, by suffix."""


def feedback(items: Mapping[str, str | int] | Sequence[FeedbackItem] | Path) -> Call[Feedback]:
    """Give the true labels of predictions (`POST /feedback`); sending them twice is harmless.

    Parameters
    ----------
    items
        Labels by the `id` of their prediction, a list of items, or the path of a `.csv` or `.parquet` file
        with a column for each member.
    """
    if isinstance(items, Path):
        kind = TABLES.get(items.suffix.lower())
        if kind is None:
            raise ValueError(f"{items} is neither a .csv nor a .parquet file")
        body: dict[str, Any] = {"content": items.read_bytes(), "headers": {"content-type": kind}}
    else:
        if isinstance(items, Mapping):
            items = [{"id": own, "label": label} for own, label in items.items()]
        body = {
            "content": json.dumps({"items": plain(items)}),
            "headers": {"content-type": "application/json"},
        }
    return Call("POST", "/feedback", _one(Feedback), body, extra_seconds=FEEDBACK_SECONDS)


def monitor() -> Call[dict[str, Any]]:
    """Fetch the alarms, the diagnosis and the metrics of the active calibrator (`GET /monitor`)."""
    return Call("GET", "/monitor", _object)


def acknowledge(note: str | None = None) -> Call[dict[str, Any]]:
    """Acknowledge the alarms: the test begins anew, a proposal is declined (`POST /monitor/acknowledge`)."""
    body = {"json": {"note": note}}
    return Call("POST", "/monitor/acknowledge", _object, body, has_effect=True)


def monitor_events() -> Call[None]:
    """Open the stream of the monitor's events (`GET /monitor/events`)."""
    return Call("GET", "/monitor/events", lambda _: None)


def refits(limit: int = 100, before: int | None = None) -> Call[list[dict[str, Any]]]:
    """List the monitor's decisions, newest first; only those older than `before` (`GET /refits`)."""
    parameters = {"params": _page(limit, before_event=before)}
    return Call("GET", "/refits", lambda response: list(_object(response)["decisions"]), parameters)


ScoreKind = Literal["logits", "probabilities", "percent"]
LabelsAs = Literal["index", "name"]
ClassMix = Literal["as_traffic", "resampled"]


def _declared(ignore: Sequence[str], **fields: str | None) -> dict[str, str]:
    """Give the fields of a form that say what a file holds."""
    listed = {"ignore": ",".join(ignore)} if ignore else {}
    return {name: value for name, value in fields.items() if value is not None} | listed


def fit(
    file: ValidationData,
    *,
    method: str = "auto",
    activate: ActivatePolicy = "if_better",
    budget_seconds: float | None = None,
    scores: ScoreKind | None = None,
    label: str | None = None,
    group: str | None = None,
    ignore: Sequence[str] = (),
    labels_as: LabelsAs | None = None,
    class_mix: ClassMix | None = None,
    wait: float = 0.0,
) -> Call[Fit]:
    """Upload a validation set and start a fit (`POST /fit`).

    Parameters
    ----------
    file
        `.npz`, `.parquet`, `.arrow`, `.csv` or `.json` with logits and labels, or a `.zip` of labelled
        images, by path or as bytes; or the path of a folder that holds a folder of images for each class. In
        place of logits, a model of features or texts reads columns of them, `.npz` with `features`, and
        documents such as `{"texts": [...], "labels": [...]}` or `{"features": [...], "labels": [...]}`.
    method
        A calibration method; `auto` mixes some by cross-validation.
    activate
        When the new calibrator becomes the active one.
    budget_seconds
        Processor seconds after which `auto` begins no further method; 120 unless given.
    scores
        What the scores are, if their name does not say it.
    label
        The column of the labels; `label` unless given.
    group
        The column that says which samples belong together; `group`, if there is one, unless given.
    ignore
        Columns to leave out.
    labels_as
        What numbers among the labels are, where classes are named by numbers: names unless given.
    class_mix
        How the samples were drawn: `as_traffic` or `resampled`, see `boxcal.fit`.
    wait
        Seconds for which the service may delay its response until the fit has finished.
    """
    form = {
        "files": [("file", upload_part(file))],
        "data": {"method": method, "activate": activate}
        | ({} if budget_seconds is None else {"budget_seconds": str(budget_seconds)})
        | _declared(
            scores=scores, label=label, group=group, ignore=ignore, labels_as=labels_as, class_mix=class_mix
        ),
        "params": {"wait": str(wait)} if wait else {},
    }
    return Call("POST", "/fit", _one(Fit), form, has_effect=True, extra_seconds=wait)


def compare(
    file: ValidationData,
    *,
    versions: Sequence[int] = (),
    methods: Sequence[str] = (),
    scores: ScoreKind | None = None,
    label: str | None = None,
    group: str | None = None,
    ignore: Sequence[str] = (),
    labels_as: LabelsAs | None = None,
    class_mix: ClassMix | None = None,
) -> Call[dict[str, Any]]:
    """Compare versions, and methods by cross-fitting, on one validation set (`POST /compare`).

    Parameters
    ----------
    file, scores, label, group, ignore, labels_as, class_mix
        As for `fit`.
    versions
        Versions of calibrators; the others are compared with the first one.
    methods
        Calibration methods.
    """
    form = {
        "files": [("file", upload_part(file))],
        "data": _declared(
            scores=scores, label=label, group=group, ignore=ignore, labels_as=labels_as, class_mix=class_mix
        ),
        "params": {"versions": list(versions), "methods": list(methods)},
    }
    return Call("POST", "/compare", _object, form, has_effect=True, extra_seconds=COMPARE_SECONDS)


def fit_arrays(
    logits: npt.ArrayLike,
    labels: npt.ArrayLike,
    *,
    method: str = "auto",
    activate: ActivatePolicy = "if_better",
    budget_seconds: float | None = None,
    wait: float = 0.0,
) -> Call[Fit]:
    """Start a fit on logits, shape (N, K), and labels, shape (N,), held in memory (`POST /fit`)."""
    archive = io.BytesIO()
    np.savez(archive, logits=float_array(logits), labels=label_array(labels))
    return fit(archive.getvalue(), method=method, activate=activate, budget_seconds=budget_seconds, wait=wait)


def fits(limit: int = 100, before: str | None = None) -> Call[list[Fit]]:
    """List fits, newest first; only fits older than the fit `before` (`GET /fits`)."""
    return Call("GET", "/fits", _list_of(Fit, "fits"), {"params": _page(limit, before_fit=before)})


def fit_state(fit_id: str) -> Call[Fit]:
    """Ask for the state of a fit (`GET /fits/{id}`)."""
    return Call("GET", _fit(fit_id), _one(Fit))


def cancel_fit(fit_id: str) -> Call[Fit]:
    """Cancel a fit that waits or runs (`DELETE /fits/{id}`)."""
    return Call("DELETE", _fit(fit_id), _one(Fit))


def fit_events(fit_id: str) -> Call[None]:
    """Open the stream of a fit's states (`GET /fits/{id}/events`)."""
    return Call("GET", f"{_fit(fit_id)}/events", lambda _: None)


def _fit(fit_id: str) -> str:
    return f"/fits/{quote(fit_id, safe='')}"


def calibrators(limit: int = 100, before: int | None = None) -> Call[list[CalibratorDocument]]:
    """List calibrators, newest first; only versions lower than `before` (`GET /calibrators`)."""
    parse = _list_of(CalibratorDocument, "calibrators")
    return Call("GET", "/calibrators", parse, {"params": _page(limit, before_version=before)})


def calibrator(version: int) -> Call[CalibratorDocument]:
    """Describe one calibrator (`GET /calibrators/{n}`)."""
    return Call("GET", f"/calibrators/{version}", _one(CalibratorDocument))


def report(version: int) -> Call[dict[str, Any]]:
    """Fetch the report on data the fit never saw (`GET /calibrators/{n}/report`)."""
    return Call("GET", f"/calibrators/{version}/report", _object)


def reliability_diagram(version: int) -> Call[bytes]:
    """Fetch the reliability diagram, an SVG (`GET /calibrators/{n}/reliability.svg`)."""
    return Call("GET", f"/calibrators/{version}/reliability.svg", _content)


def reliability_image(version: int) -> Call[bytes]:
    """Fetch the reliability diagram, a PNG (`GET /calibrators/{n}/reliability.png`)."""
    return Call("GET", f"/calibrators/{version}/reliability.png", _content)


def reliability_data(version: int) -> Call[dict[str, Any]]:
    """Fetch the numbers of the diagram (`GET /calibrators/{n}/reliability.json`)."""
    return Call("GET", f"/calibrators/{version}/reliability.json", _object)


def report_page(version: int) -> Call[bytes]:
    """Fetch the report as one HTML page (`GET /calibrators/{n}/report.html`)."""
    return Call("GET", f"/calibrators/{version}/report.html", _content)


def activations(limit: int = 50) -> Call[dict[str, Any]]:
    """List the newest activations and the version that a rollback activates (`GET /activations`)."""
    return Call("GET", "/activations", _object, {"params": {"limit": limit}})


def model() -> Call[dict[str, Any]]:
    """Describe the model: labels, limits and accepted formats (`GET /model`)."""
    return Call("GET", "/model", _object)


def calibration_methods() -> Call[dict[str, Any]]:
    """List the calibration methods and what each needs (`GET /methods`)."""
    return Call("GET", "/methods", _object)


def version() -> Call[dict[str, Any]]:
    """Fetch the release of the service (`GET /version`)."""
    return Call("GET", "/version", _object)


def whoami() -> Call[dict[str, Any]]:
    """Fetch the name and the scopes of the API key that is used (`GET /whoami`)."""
    return Call("GET", "/whoami", _object)


def audit(limit: int = 100, before_entry: int | None = None) -> Call[list[dict[str, Any]]]:
    """Fetch entries of the audit log, newest first (`GET /audit`); only those older than `before_entry`."""
    params = {"limit": limit} | ({} if before_entry is None else {"before_entry": before_entry})
    return Call("GET", "/audit", lambda response: list(_object(response)["entries"]), {"params": params})


def stats() -> Call[dict[str, Any]]:
    """Fetch rates and latencies of the last 15 minutes (`GET /stats`)."""
    return Call("GET", "/stats", _object)


def artifact(version: int) -> Call[bytes]:
    """Fetch the calibrator itself, for `Calibrator.from_bytes` (`GET /calibrators/{n}/artifact`)."""
    return Call("GET", f"/calibrators/{version}/artifact", lambda response: _no_page(response).content)


def activate(version: int, *, expected: int | None = None) -> Call[Activated]:
    """Activate a calibrator (`POST /calibrators/{n}/activate`).

    If `expected` is given and another version is active, the service changes nothing: `ConflictError`.
    """
    path = f"/calibrators/{version}/activate"
    return Call("POST", path, _one(Activated), _expecting(expected), has_effect=True)


def rollback(*, expected: int | None = None) -> Call[Activated]:
    """Activate the calibrator before the active one (`POST /calibrators/rollback`).

    `expected` as for `activate`.
    """
    return Call("POST", "/calibrators/rollback", _one(Activated), _expecting(expected), has_effect=True)


def live() -> Call[Health]:
    """Ask whether the process answers (`GET /health/live`)."""
    return Call("GET", "/health/live", _health)


def ready() -> Call[Health]:
    """Ask whether the service can predict (`GET /health/ready`); "not yet" is a result, not an error."""
    return Call("GET", "/health/ready", _health, accepts=frozenset({200, 503}))


def metrics() -> Call[str]:
    """Fetch the Prometheus metrics as text (`GET /metrics`)."""
    return Call("GET", "/metrics", lambda response: _no_page(response).text)


def _no_page(response: httpx.Response) -> httpx.Response:
    """Refuse the page with which a proxy asks for a login, at status 200."""
    if response.headers.get("content-type", "").startswith("text/html"):
        raise ValueError("an HTML page")
    return response


def _one(kind: type[Result]) -> Callable[[httpx.Response], Result]:
    return lambda response: kind.model_validate_json(response.content)


def _expecting(version: int | None) -> dict[str, Any]:
    return {} if version is None else {"params": {"expected": version}}


def _page(limit: int, **cursor: str | int | None) -> dict[str, str | int]:
    return {"limit": limit} | {name: value for name, value in cursor.items() if value is not None}


def _list_of(kind: type[Result], member: str) -> Callable[[httpx.Response], list[Result]]:
    return lambda response: [kind.model_validate(entry) for entry in _object(response)[member]]


def _object(response: httpx.Response) -> dict[str, Any]:
    document = response.json()
    if not isinstance(document, dict):
        raise ValueError("expected a JSON object")
    return document


def _content(response: httpx.Response) -> bytes:
    return response.content


def _health(response: httpx.Response) -> Health:
    document = _object(response) if response.content else {}
    return Health.model_validate({**document, "ready": response.is_success})
