"""Every route of the service as a function to a `Call`: what to send and how to read the answer.

Both clients are made of these functions; nothing here sends anything.
"""

import io
import json
import mimetypes
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypedDict, Unpack, cast

import httpx
import numpy as np
import numpy.typing as npt
from pydantic import TypeAdapter

from boxcal.app.client.exchange import Call
from boxcal.app.client.results import ActivatePolicy, Activation, Answer, CalibratorRecord, Fit, Health

__all__ = ["AnswerOptions", "BoundValue", "ImageSource", "options_document", "pack_images"]

BoundValue = float | Mapping[str, float] | Sequence[float]
"""One number for every class, numbers by label, or one number per class."""

ImageSource = bytes | str | Path
"""An encoded image, or the path of one."""

Floats = npt.NDArray[np.floating[Any]]

LONGEST_QUERY = 2000


class AnswerOptions(TypedDict, total=False):
    """Options of an answer, each by keyword.

    Attributes
    ----------
    lower, upper
        Hard bounds on the probabilities.
    top_k
        How many classes `top` lists.
    probabilities, logits
        Whether each prediction carries all K of them.
    calibrator
        A version of the registry (0 is `uncalibrated`) in place of the active one.
    timeout_ms
        After how many milliseconds the service gives up (ServiceFaultError, 504) and drops the work.
    """

    lower: BoundValue
    upper: BoundValue
    top_k: int
    probabilities: bool
    logits: bool
    calibrator: int | Literal["active"]
    timeout_ms: float


def predict(*images: ImageSource, **options: Unpack[AnswerOptions]) -> Call[Answer]:
    """Classify encoded images (`POST /predict`), given as bytes or as paths, in one request."""
    if not images:
        raise ValueError("predict needs at least one image")
    files: list[tuple[str, tuple[str, bytes, str]]] = []
    for position, image in enumerate(images):
        name, content = (f"image-{position}", image) if isinstance(image, bytes) else _read(image)
        files.append(("file", (name, content, mimetypes.guess_type(name)[0] or "application/octet-stream")))
    return _answer("/predict", {"files": files, "data": {"options": json.dumps(options_document(options))}})


def predict_tensors(tensors: npt.ArrayLike, /, **options: Unpack[AnswerOptions]) -> Call[Answer]:
    """Classify a batch of preprocessed inputs (`POST /predict`), shape (N, *input_shape), floats."""
    values = _floats(tensors)
    return _answer(
        "/predict", _array(values, options, lambda v: {"inputs": [{"tensor": each} for each in v]})
    )


def calibrate(logits: npt.ArrayLike, /, **options: Unpack[AnswerOptions]) -> Call[Answer]:
    """Turn logits of a model that runs elsewhere, shape (N, K), into probabilities (`POST /calibrate`)."""
    values = _floats(logits)
    return _answer("/calibrate", _array(values, options, lambda v: {"logits": v}))


def fit(
    file: ImageSource, *, method: str = "auto", activate: ActivatePolicy = "if_better", wait: float = 0.0
) -> Call[Fit]:
    """Upload a validation set and start a fit (`POST /fit`).

    Parameters
    ----------
    file
        `.npz` or `.parquet` with logits and labels, or a `.zip` of labelled images, by path or as bytes; or
        the path of a folder that holds a folder of images for each class.
    method
        A calibration method; `auto` chooses by cross-validation.
    activate
        When the new calibrator goes into force.
    wait
        How many seconds the service may hold its answer back for the fit to finish.
    """
    if isinstance(file, bytes):
        name, content = "validation", file
    elif Path(file).is_dir():
        name, content = f"{Path(file).name}.zip", pack_images(Path(file))
    else:
        name, content = _read(file)
    return Call(
        method="POST",
        path="/fit",
        arguments={
            "files": [("file", (name, content, "application/octet-stream"))],
            "data": {"method": method, "activate": activate},
            "params": {"wait": str(wait)} if wait else {},
        },
        parse=_fit,
        repeatable=False,
        extra_seconds=wait,
    )


def pack_images(folder: Path) -> bytes:
    """Pack a folder that holds a folder of images for each class, as `/fit` takes it."""
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_STORED) as packed:  # images are compressed already
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                packed.write(path, path.relative_to(folder))
    return archive.getvalue()


def fit_arrays(
    logits: npt.ArrayLike,
    labels: npt.ArrayLike,
    *,
    method: str = "auto",
    activate: ActivatePolicy = "if_better",
    wait: float = 0.0,
) -> Call[Fit]:
    """Start a fit on logits, shape (N, K), and labels, shape (N,), held in memory (`POST /fit`)."""
    archive = io.BytesIO()
    np.savez(archive, logits=_floats(logits), labels=np.asarray(labels))
    return fit(archive.getvalue(), method=method, activate=activate, wait=wait)


def fits(limit: int = 100) -> Call[list[Fit]]:
    """List the newest fits, newest first (`GET /fits`)."""
    return Call(
        method="GET",
        path="/fits",
        arguments={"params": {"limit": limit}},
        parse=lambda r: _FITS.validate_python(_items(r, "fits")),
    )


def fit_state(fit_id: str) -> Call[Fit]:
    """Ask how a fit stands (`GET /fits/{id}`)."""
    return Call(method="GET", path=f"/fits/{fit_id}", parse=_fit)


def cancel_fit(fit_id: str) -> Call[Fit]:
    """Cancel a fit that waits or runs (`DELETE /fits/{id}`)."""
    return Call(method="DELETE", path=f"/fits/{fit_id}", parse=_fit)


def fit_events(fit_id: str) -> Call[None]:
    """Open the stream of a fit's states (`GET /fits/{id}/events`)."""
    return Call(
        method="GET",
        path=f"/fits/{fit_id}/events",
        arguments={"headers": {"accept": "text/event-stream"}},
        parse=lambda _: None,
    )


def calibrators() -> Call[list[CalibratorRecord]]:
    """List the calibrators, newest first, the active one marked (`GET /calibrators`)."""
    return Call(
        method="GET",
        path="/calibrators",
        parse=lambda r: _CALIBRATORS.validate_python(_items(r, "calibrators")),
    )


def calibrator(version: int) -> Call[CalibratorRecord]:
    """Describe one calibrator (`GET /calibrators/{n}`)."""
    return Call(
        method="GET",
        path=f"/calibrators/{version}",
        parse=lambda r: CalibratorRecord.model_validate_json(r.content),
    )


def report(version: int) -> Call[dict[str, Any]]:
    """Fetch the report on data the fit never saw (`GET /calibrators/{n}/report`)."""
    return Call(method="GET", path=f"/calibrators/{version}/report", parse=_object)


def reliability_diagram(version: int) -> Call[bytes]:
    """Fetch the reliability diagram, an SVG (`GET /calibrators/{n}/reliability.svg`)."""
    return Call(method="GET", path=f"/calibrators/{version}/reliability.svg", parse=lambda r: r.content)


def reliability_image(version: int) -> Call[bytes]:
    """Fetch the reliability diagram, a PNG (`GET /calibrators/{n}/reliability.png`)."""
    return Call(method="GET", path=f"/calibrators/{version}/reliability.png", parse=lambda r: r.content)


def reliability_data(version: int) -> Call[dict[str, Any]]:
    """Fetch the numbers that the diagram draws (`GET /calibrators/{n}/reliability.json`)."""
    return Call(method="GET", path=f"/calibrators/{version}/reliability.json", parse=_object)


def artifact(version: int) -> Call[bytes]:
    """Fetch the calibrator itself, for `Calibrator.from_bytes` (`GET /calibrators/{n}/artifact`)."""
    return Call(method="GET", path=f"/calibrators/{version}/artifact", parse=lambda r: r.content)


def activate(version: int) -> Call[Activation]:
    """Activate a calibrator (`POST /calibrators/{n}/activate`)."""
    return Call(method="POST", path=f"/calibrators/{version}/activate", parse=_activation, repeatable=False)


def rollback() -> Call[Activation]:
    """Activate the calibrator before the active one (`POST /calibrators/rollback`)."""
    return Call(method="POST", path="/calibrators/rollback", parse=_activation, repeatable=False)


def live() -> Call[Health]:
    """Ask whether the process answers (`GET /health/live`)."""
    return Call(method="GET", path="/health/live", parse=_health)


def ready() -> Call[Health]:
    """Ask whether the service can predict (`GET /health/ready`); "not yet" is an answer, not an error."""
    return Call(method="GET", path="/health/ready", parse=_health, accepts=frozenset({200, 503}))


def metrics() -> Call[str]:
    """Fetch the Prometheus metrics as text (`GET /metrics`)."""
    return Call(method="GET", path="/metrics", parse=lambda r: r.text)


_FITS = TypeAdapter(list[Fit])
_CALIBRATORS = TypeAdapter(list[CalibratorRecord])


def _answer(path: str, arguments: Mapping[str, Any]) -> Call[Answer]:
    return Call(
        method="POST",
        path=path,
        arguments=arguments,
        parse=lambda r: Answer.model_validate_json(r.content),
    )


def options_document(options: AnswerOptions) -> dict[str, Any]:
    """Return options in the contract's form, the two bounds under `bounds`."""
    document: dict[str, Any] = {
        k: v for k, v in options.items() if k not in ("lower", "upper") and v is not None
    }
    bounds = {
        side: _bound(value)
        for side in ("lower", "upper")
        if (value := cast(BoundValue | None, options.get(side))) is not None
    }
    return document | ({"bounds": bounds} if bounds else {})


def _bound(value: BoundValue) -> Any:
    if isinstance(value, Mapping):
        return {str(label): float(number) for label, number in value.items()}
    return np.asarray(value, dtype=np.float64).tolist()


def _array(
    values: Floats, options: AnswerOptions, members: Callable[[list[Any]], dict[str, Any]]
) -> dict[str, Any]:
    """Send an array as an `.npy` body and its options in the query string.

    Bounds for many classes exceed the length of query that servers and proxies accept. Then the whole request
    is JSON, with the array in `members`.
    """
    document = options_document(options)
    query = json.dumps(document, separators=(",", ":")) if document else ""
    if len(query) > LONGEST_QUERY:
        exact = values.astype(np.float64).tolist()  # the shortest digits of a float32 name another float64
        return {
            "content": json.dumps(members(exact) | {"options": document}),
            "headers": {"content-type": "application/json"},
        }
    body = io.BytesIO()
    np.save(body, values, allow_pickle=False)
    return {
        "content": body.getvalue(),
        "headers": {"content-type": "application/x-npy"},
        "params": {"options": query} if query else {},
    }


def _floats(array: npt.ArrayLike) -> Floats:
    """Return a C-contiguous float array."""
    values = np.asarray(array)
    return np.ascontiguousarray(values, dtype=values.dtype if values.dtype.kind == "f" else np.float64)


def _read(path: str | Path) -> tuple[str, bytes]:
    return Path(path).name, Path(path).read_bytes()


def _object(response: httpx.Response) -> dict[str, Any]:
    document = response.json()
    if not isinstance(document, dict):
        raise ValueError("expected a JSON object")
    return document


def _items(response: httpx.Response, name: str) -> Any:
    return _object(response)[name]


def _fit(response: httpx.Response) -> Fit:
    return Fit.model_validate_json(response.content)


def _activation(response: httpx.Response) -> Activation:
    return Activation.model_validate_json(response.content)


def _health(response: httpx.Response) -> Health:
    document = _object(response) if response.content else {}
    return Health.model_validate({**document, "ready": response.is_success})
