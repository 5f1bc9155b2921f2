"""The routes of predictions, as functions that give a `Call`, like those of `calls.py`."""

import json
from collections.abc import Mapping
from typing import Any, Unpack

import httpx
import numpy.typing as npt

from boxcal.app.client.bodies import (
    AnswerOptions,
    FeatureRows,
    ImageSource,
    array_body,
    features_body,
    image_part,
    inputs_body,
    options_document,
    tensors_body,
)
from boxcal.app.client.exchange import Call
from boxcal.app.schemas.predictions import Answer


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
    return Call("POST", "/predict", _answer, form)


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
    return Call("POST", "/predict", _answer, tensors_body(tensors, options))


def predict_features(rows: FeatureRows, /, **options: Unpack[AnswerOptions]) -> Call[Answer]:
    """Classify rows of features (`POST /predict`).

    Parameters
    ----------
    rows
        An array (N, D); a list of rows, each a list of values or an object of values by name; N values for
        each name; or a DataFrame, whose columns are the features by name. None and NaN are missing values.
    """
    return Call("POST", "/predict", _answer, features_body(rows, options))


def predict_texts(*texts: str, **options: Unpack[AnswerOptions]) -> Call[Answer]:
    """Classify texts (`POST /predict`) in one request."""
    return Call("POST", "/predict", _answer, inputs_body([{"text": text} for text in texts], options))


def calibrate(logits: npt.ArrayLike, /, **options: Unpack[AnswerOptions]) -> Call[Answer]:
    """Turn logits of a model that runs elsewhere, shape (N, K), into probabilities (`POST /calibrate`)."""
    return Call("POST", "/calibrate", _answer, array_body(logits, options, lambda rows: {"logits": rows}))


def calibrate_probabilities(
    probabilities: npt.ArrayLike, /, **options: Unpack[AnswerOptions]
) -> Call[Answer]:
    """Calibrate probabilities of a model that runs elsewhere, shape (N, K) (`POST /calibrate`)."""
    sent = array_body(probabilities, options, lambda rows: {"probabilities": rows})
    if "params" in sent:
        sent["params"] = {**sent["params"], "scores": "probabilities"}
    return Call("POST", "/calibrate", _answer, sent)


def _answer(response: httpx.Response) -> Answer:
    return Answer.model_validate_json(response.content)
