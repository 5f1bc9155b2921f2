"""Bodies and query parameters of the predict path, for the OpenAPI document."""

from __future__ import annotations

from typing import Any

from boxcal.app.predict.bodies import CSV, FORM, IMAGES, JSON, NPY, SCORES, TEXT
from boxcal.app.predict.options import Options
from boxcal.app.schemas.predictions import Answer
from boxcal.calibrators.scores import LOGITS

BINARY = {"type": "string", "format": "binary"}
INTEGER = {"type": "integer", "minimum": 0}


ANSWER: dict[int | str, dict[str, Any]] = {
    200: {
        "model": Answer,
        "description": "The predictions; with `Accept: application/x-npy` the (N, K) probabilities, float64.",
        "content": {NPY: {"schema": BINARY}},
    }
}

QUERY_DESCRIPTIONS = {
    "options": "All options as one JSON document, instead of the other parameters.",
    "bounds": "JSON object with `lower` and `upper`.",
    "lower": "JSON: the lower bounds.",
    "upper": "JSON: the upper bounds.",
    "top_k": "How many classes `top` lists.",
    "probabilities": "Whether each prediction carries all K probabilities.",
    "logits": "Whether each prediction carries the K logits.",
    "explain": "Whether each prediction carries its mapped logits and fitted bounds.",
    "feedback": "Whether each prediction gets an `id` for `POST /feedback`.",
    "prior_adjustment": "Whether to adjust to the class frequencies of recent predictions.",
    "calibrator": "`active`, or a version; 0 is `uncalibrated`.",
    "timeout_ms": "Timeout in milliseconds.",
}


def options_schema() -> dict[str, Any]:
    """Return the schema of the options without references, so that it can be part of any body."""
    schema = Options.model_json_schema()
    schema["properties"]["bounds"] = {"anyOf": [schema.pop("$defs")["BoundsOption"], {"type": "null"}]}
    return schema


MODEL = {
    "name": "model",
    "in": "query",
    "required": False,
    "description": "Name of the model. Default: the first one.",
    "schema": {"type": "string"},
}


def query_parameters() -> list[dict[str, Any]]:
    """Describe the options of bodies that contain data alone."""
    properties = options_schema()["properties"]
    schemas = {
        name: properties[name]
        for name in (
            "top_k",
            "probabilities",
            "logits",
            "explain",
            "feedback",
            "prior_adjustment",
            "calibrator",
        )
    }
    schemas["timeout_ms"] = {"type": "number", "exclusiveMinimum": 0}
    return [
        {
            "name": name,
            "in": "query",
            "required": False,
            "description": description,
            **({"schema": schemas[name]} if name in schemas else {"content": {JSON: {"schema": {}}}}),
        }
        for name, description in QUERY_DESCRIPTIONS.items()
    ]


def predict_body() -> dict[str, Any]:
    """Describe `/predict`'s bodies and query string."""
    options = options_schema()
    image = {"type": "object", "required": ["image"], "additionalProperties": False}
    tensor = {"type": "object", "required": ["tensor"], "additionalProperties": False}
    item = {
        "anyOf": [
            {**image, "properties": {"image": {"type": "string", "format": "byte"}}},
            {**tensor, "properties": {"tensor": {"type": "array", "items": {}}}},
            _object_of("features", {"anyOf": [{"type": "array", "items": {}}, {"type": "object"}]}),
            _object_of("text", {"type": "string"}),
            _object_of(
                "tokens", {"type": "object", "additionalProperties": {"type": "array", "items": INTEGER}}
            ),
        ]
    }
    form = {
        "type": "object",
        "required": ["file"],
        "properties": {"file": {"type": "array", "items": BINARY, "minItems": 1}, "options": options},
    }
    return _body(
        {
            JSON: {"schema": _object("inputs", {"type": "array", "items": item, "minItems": 1}, options)},
            FORM: {"schema": form, "encoding": {"options": {"contentType": JSON}}},
            NPY: {"schema": BINARY},
            CSV: {"schema": {"type": "string"}},
            TEXT: {"schema": {"type": "string"}},
            **{kind: {"schema": BINARY} for kind in IMAGES},
        }
    )


def calibrate_body() -> dict[str, Any]:
    """Describe `/calibrate`'s bodies and query string."""
    row = {"type": "array", "items": {"type": "number"}, "minItems": 1}
    second = {"type": "number", "description": "The score of the second of two classes."}
    rows = {"type": "array", "items": {"anyOf": [row, second]}, "minItems": 1}
    either = {"anyOf": [_object(name, rows, options_schema()) for name in SCORES]}
    scores = {
        "name": "scores",
        "in": "query",
        "required": False,
        "description": "What an array in the body holds.",
        "schema": {"type": "string", "enum": list(SCORES), "default": LOGITS},
    }
    body = _body({JSON: {"schema": either}, NPY: {"schema": BINARY}})
    return {**body, "parameters": [scores, *body["parameters"]]}


def _object_of(name: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "required": [name], "additionalProperties": False, "properties": {name: schema}}


def _object(name: str, schema: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "required": [name],
        "additionalProperties": False,
        "properties": {name: schema, "options": {"anyOf": [options, {"type": "null"}]}},
    }


def _body(content: dict[str, Any]) -> dict[str, Any]:
    return {"requestBody": {"required": True, "content": content}, "parameters": [MODEL, *query_parameters()]}
