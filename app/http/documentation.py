"""Descriptions and examples of every body, response and error in `/docs` and `/openapi.json`.

The last step of generating the OpenAPI document. The tests send the examples to a running service.
"""

from __future__ import annotations

from typing import Any

from boxcal.app.http.examples import (
    ACTIVATED,
    CALIBRATED,
    CALIBRATOR,
    CANCELLED,
    COMPARISON,
    DECISION,
    FEEDBACK,
    FEEDBACK_ID,
    IMAGE,
    LOGITS,
    LOGITS_ROW,
    MONITOR,
    OPTIONS,
    PREDICTED,
    QUEUED,
    RELIABILITY,
    REPORT,
    ROLLED_BACK,
    SUCCEEDED,
    UNCALIBRATED,
)
from boxcal.app.http.problem_documents import PROBLEM_MEDIA_TYPE
from boxcal.app.http.problems import PROBLEMS, ProblemType

JSON = "application/json"

BODIES: dict[tuple[str, str], dict[str, Any]] = {
    ("post", "/predict"): {
        JSON: {"inputs": [{"image": IMAGE}], "options": OPTIONS},
        "multipart/form-data": {"file": ["image.png"], "options": OPTIONS},
    },
    ("post", "/calibrate"): {JSON: LOGITS},
    ("post", "/feedback"): {
        JSON: {
            "items": [
                {"id": FEEDBACK_ID, "label": "9"},
                {"logits": LOGITS_ROW, "key": "order-1", "label": 0},
            ]
        },
        "text/csv": f"id,label\n{FEEDBACK_ID},9\n",
    },
    ("post", "/monitor/acknowledge"): {JSON: {"note": "A camera was replaced."}},
    ("post", "/compare"): {
        "multipart/form-data": {},
        JSON: {"logits": [LOGITS_ROW, LOGITS_ROW], "labels": ["9", "8"]},
    },
    ("post", "/fit"): {
        "multipart/form-data": {"method": "auto", "activate": "if_better"},
        JSON: {"logits": [LOGITS_ROW, LOGITS_ROW], "labels": ["9", "8"], "method": "ts"},
    },
}
ANSWERS: dict[tuple[str, str, str], tuple[str, Any]] = {
    ("post", "/predict", "200"): ("", PREDICTED),
    ("post", "/calibrate", "200"): ("", CALIBRATED),
    ("post", "/feedback", "200"): ("What became of the items.", FEEDBACK),
    ("get", "/monitor", "200"): ("How the active calibrator does.", MONITOR),
    ("post", "/monitor/acknowledge", "200"): ("How it stands after that.", MONITOR),
    ("get", "/monitor/events", "200"): (
        "Server-sent events; the `data` of each event is a decision as in `GET /refits`.",
        None,
    ),
    ("get", "/refits", "200"): ("Decisions, newest first.", {"decisions": [DECISION]}),
    ("post", "/fit", "202"): ("The fit is queued. The `Location` header is its URL.", QUEUED),
    ("post", "/fit", "200"): ("", SUCCEEDED),
    ("post", "/compare", "200"): ("The comparison.", COMPARISON),
    ("get", "/fits", "200"): ("Recent fits, newest first.", {"fits": [SUCCEEDED]}),
    ("get", "/fits/{fit_id}", "200"): ("The current state of the fit.", SUCCEEDED),
    ("delete", "/fits/{fit_id}", "200"): ("The final state of the fit.", CANCELLED),
    ("get", "/fits/{fit_id}/events", "200"): ("Server-sent events; the `data` of each event is a fit.", None),
    ("get", "/calibrators", "200"): ("All calibrators.", {"calibrators": [CALIBRATOR, UNCALIBRATED]}),
    ("get", "/calibrators/{version}", "200"): ("The calibrator.", CALIBRATOR),
    ("get", "/calibrators/{version}/report", "200"): ("", REPORT),
    ("get", "/calibrators/{version}/reliability.json", "200"): ("", RELIABILITY),
    ("post", "/calibrators/rollback", "200"): ("The active calibrator.", ROLLED_BACK),
    ("post", "/calibrators/{version}/activate", "200"): ("The active calibrator.", ACTIVATED),
    ("get", "/activations", "200"): (
        "The newest activations.",
        {"activations": [ROLLED_BACK, ACTIVATED], "rollback_to": None},
    ),
    ("get", "/model", "200"): (
        "The model.",
        {
            "name": "digits",
            "num_classes": 10,
            "labels": list("0123456789"),
            "inputs": "images",
            "input_shape": [1, 8, 8],
            "models": ["digits"],
            "formats": ["image/jpeg", "image/png", "image/webp"],
            "device": "cpu",
            "limits": {
                "body_bytes": 33554432,
                "upload_bytes": 1073741824,
                "pixels": 50000000,
                "queue_samples": 1024,
                "timeout_ms": 30000.0,
            },
            "examples": [{"name": "digit 9", "png": IMAGE}],
        },
    ),
    ("get", "/version", "200"): (
        "The release.",
        {"version": "0.3.0", "registry": "0012", "python": "3.11.9"},
    ),
    ("get", "/whoami", "200"): (
        "Who sends the request.",
        {
            "key_required": True,
            "key": "6c1f0e5ab2d94c77",
            "name": "ci",
            "scopes": ["predict", "read"],
            "expires_at": None,
        },
    ),
    ("get", "/audit", "200"): (
        "Changes, newest first.",
        {
            "entries": [
                {
                    "id": 17,
                    "at": "2026-11-21T03:00:00Z",
                    "action": "activate",
                    "subject": "calibrator 1",
                    "name": "ci",
                    "key": "6c1f0e5ab2d94c77",
                    "address": "10.0.0.7",
                    "details": {"method": "ts"},
                }
            ]
        },
    ),
    ("get", "/methods", "200"): ("The methods.", {"methods": [{"name": "ts", "reads": "logits"}]}),
    ("get", "/stats", "200"): (
        "",
        {
            "every_seconds": 5.0,
            "requests_per_second": 12.4,
            "p50_ms": 2.9,
            "p99_ms": 8.1,
            "history": {"requests_per_second": [11.8, 12.4], "p99_ms": [7.9, 8.1]},
        },
    ),
    ("get", "/health/live", "200"): ("The process is alive.", {"status": "live"}),
    ("get", "/health/ready", "200"): (
        "The service is ready for predictions.",
        {"status": "ready", "model": "digits", "calibrator": 1, "models": {"digits": 1}},
    ),
}
PARAMETERS: dict[str, tuple[str, Any]] = {
    "model": ("", "digits"),
    "scores": ("What an array in the body holds: `logits` or `probabilities`.", "logits"),
    "options": ("", OPTIONS),
    "bounds": ("", OPTIONS["bounds"]),
    "lower": ("", {"8": 0.02}),
    "upper": ("", 0.75),
    "top_k": ("", 3),
    "probabilities": ("", True),
    "logits": ("", True),
    "explain": ("", True),
    "feedback": ("", True),
    "prior_adjustment": ("", False),
    "calibrator": ("", "active"),
    "timeout_ms": ("", 500),
    "wait": ("", 60),
    "limit": ("Maximum number of entries to return.", 10),
    "before_version": ("", 10),
    "before_event": ("", DECISION["id"]),
    "last-event-id": ("", "3"),
    "before_entry": ("", 100),
    "before_fit": ("", QUEUED["id"]),
    "versions": ("", [1, 2]),
    "methods": ("", ["ts", "ts+pb"]),
    "fit_id": ("The fit's `id`.", QUEUED["id"]),
    "version": ("", 1),
    "expected": ("", 1),
}
EVENTS = "text/event-stream"
TAGS = {
    "predict": "Calibrated probabilities within the bounds of each request.",
    "feedback": "True labels of earlier predictions, alarms and refits.",
    "fits": "Fit a calibrator to validation data and get a report.",
    "calibrators": "List, activate and roll back calibrators.",
    "model": "The model that is served, and the calibration methods.",
    "access": "The API key of a request, and the audit log.",
    "monitoring": "Liveness, readiness and metrics.",
}


def complete(document: dict[str, Any]) -> None:
    """Add descriptions and examples to an OpenAPI document."""
    document["tags"] = [{"name": name, "description": text} for name, text in TAGS.items()]
    titles = {(one.status, one.title): one for one in PROBLEMS}
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            for parameter in operation.get("parameters", []):
                description, example = PARAMETERS[parameter["name"]]
                parameter.setdefault("description", description)
                if "content" in parameter:
                    parameter["content"][JSON]["example"] = example
                else:
                    parameter["example"] = example
            for kind, example in BODIES.get((method, path), {}).items():
                operation["requestBody"]["content"][kind]["example"] = example
            for status, answer in operation["responses"].items():
                description, example = ANSWERS.get((method, path, status), ("", None))
                answer["description"] = description or answer["description"]
                content = answer.get("content", {})
                if EVENTS in content:  # a schema of each event exists in OpenAPI 3.2 only
                    content[EVENTS] = {}
                if example is not None:
                    content[JSON]["example"] = example
                if PROBLEM_MEDIA_TYPE in content:
                    content[PROBLEM_MEDIA_TYPE]["examples"] = {
                        one.type: {"summary": title, "value": example_of(one)}
                        for title in answer["description"].split("; ")
                        if (one := titles.get((int(status), title)))
                    }


def example_of(problem: ProblemType) -> dict[str, Any]:
    """Return an example of a problem; its meaning is the detail."""
    text = {
        "type": f"urn:boxcal:problem:{problem.type}",
        "title": problem.title,
        "status": problem.status,
        "detail": problem.meaning,
        "error": problem.meaning,
    }
    return text | {"request_id": "5b0c1f6e00000017"}
