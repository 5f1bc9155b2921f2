"""Descriptions and examples of every body, response and error in `/docs` and `/openapi.json`.

The last step of generating the OpenAPI document. The tests send the examples to a running service.
"""

from __future__ import annotations

from typing import Any

from boxcal.app.http.problem_documents import PROBLEM_MEDIA_TYPE
from boxcal.app.http.problems import PROBLEMS, ProblemType

IMAGE = (
    "iVBORw0KGgoAAAANSUhEUgAAAAgAAAAICAAAAADhZOFXAAAAQ0lEQVR4nAXBARVAMBQAwOMJ8CNMk0UQgQYirIEIi0ATERZha8AdbO9X"
    "oPT9bEhfxF0tkhYOE1nUdYCrAKkHM/Iz+AGCDw/PWp6jHgAAAABJRU5ErkJggg=="
)
"""A handwritten digit, 8 x 8 pixels, as PNG."""

OPTIONS = {"bounds": {"upper": 0.75, "lower": {"8": 0.02}}, "top_k": 2}
PREDICTED: dict[str, Any] = {
    "model": "digits",
    "calibrator": {"version": 0, "method": "uncalibrated"},
    "bounds_relaxed": False,
    "predictions": [
        {
            "label": "9",
            "index": 9,
            "probability": 0.75,
            "top": [
                {"label": "9", "index": 9, "probability": 0.75, "bound": "upper"},
                {"label": "5", "index": 5, "probability": 0.2289831851848, "bound": None},
            ],
        }
    ],
    "timing_ms": {"decode": 0.7, "queue": 0.1, "backbone": 1.4, "calibrate": 0.4, "total": 2.6},
}
LOGITS_ROW = [9.1, 0.3, 0.2, 0.1, 0, 0, 0.4, 0.2, 6.5, 0.1]
LOGITS = {
    "logits": [LOGITS_ROW],
    "options": {"bounds": {"upper": 0.8}, "top_k": 1},
}
CALIBRATED: dict[str, Any] = PREDICTED | {
    "predictions": [
        {
            "label": "0",
            "index": 0,
            "probability": 0.8,
            "top": [{"label": "0", "index": 0, "probability": 0.8, "bound": "upper"}],
        }
    ],
    "timing_ms": {"decode": 0.1, "queue": 0.0, "backbone": 0.0, "calibrate": 0.3, "total": 0.4},
}
QUEUED: dict[str, Any] = {
    "id": "fc6636e3d795a8bb",
    "state": "queued",
    "progress": 0.0,
    "stage": "waiting",
    "method": "auto",
    "activate": "if_better",
    "samples": 539,
    "warnings": [],
    "created_at": "2026-11-21T02:51:59.353524Z",
}
RUNNING = QUEUED | {
    "state": "running",
    "progress": 0.4,
    "stage": "judging fold 3 of 5",
    "started_at": "2026-11-21T02:51:59.357789Z",
}
SUCCEEDED = RUNNING | {
    "state": "succeeded",
    "progress": 1.0,
    "stage": "done",
    "calibrator": 1,
    "activated": True,
    "decision": (
        "Activated: compared with version 0, on unseen folds NLL (-0.0967, interval [-0.173, -0.045]) is "
        "significantly lower than with `uncalibrated`, and neither Brier score nor smooth ECE is "
        "significantly higher."
    ),
    "finished_at": "2026-11-21T02:52:11.334803Z",
}
CANCELLED = RUNNING | {
    "state": "cancelled",
    "error": "Cancelled on request.",
    "finished_at": "2026-11-21T02:52:03.334803Z",
}
UNCALIBRATED = {"version": 0, "method": "uncalibrated", "active": False}
CALIBRATOR: dict[str, Any] = {
    "version": 1,
    "method": "ts",
    "active": True,
    "backbone": {
        "name": "digits",
        "num_classes": 10,
        "fingerprint": "21f0771c6297c8363aa66a0fd272ab321014c841a345c4a65b3db0c89e44113d",
    },
    "spec": {
        "method": "ts",
        "num_classes": 10,
        "reads": "logits",
        "parameters": {"temperature": 1.79, "lower": 0.0, "upper": 1.0},
    },
    "samples": 539,
    "sha256": "e133ed4b5084436090cc6262107a8e0f02668f711029ad2de3c84484b652ca73",
    "size": 472,
    "created_at": "2026-11-21T02:52:11.334803Z",
}
ACTIVATED = {"version": 1, "method": "ts", "reason": "request", "activated_at": "2026-11-21T03:00:00Z"}
ROLLED_BACK = ACTIVATED | {"version": 0, "method": "uncalibrated", "reason": "rollback"}
FEEDBACK_ID = "01936d8f2b7c4d0e9a5f6b1c2d3e4f50"
FEEDBACK: dict[str, Any] = {
    "seq": 1,
    "accepted": 1,
    "duplicates": 0,
    "conflicts": 0,
    "unknown": 1,
    "expired": 0,
    "malformed": 0,
    "problems": [
        {
            "index": 0,
            "id": FEEDBACK_ID,
            "reason": "unknown",
            "detail": f"No prediction has the id '{FEEDBACK_ID}'.",
        }
    ],
}
ALARM = {
    "alarm": True,
    "log_evidence": 12.8,
    "largest_log_evidence": 13.1,
    "threshold": 4.605170185988091,
    "alpha": 0.01,
}
MONITOR: dict[str, Any] = {
    "sentence": "Version 1 is no longer calibrated: the answers are too confident for about 640 labels "
    "(evidence 489,942 : 1).",
    "seq": 4200,
    "calibrator": {"version": 1, "method": "ts"},
    "labels": 2100,
    "skipped": 0,
    "alarms": {"strict": ALARM, "material": ALARM | {"alpha": 0.05, "threshold": 2.995732273553991}},
    "evidence": {"labels": [50, 100], "strict": [-0.21, 0.35], "material": [-0.4, -0.32]},
    "diagnosis": {
        "kind": "overconfident",
        "classes": [],
        "since": 640,
        "began_at": 1795316400.0,
        "recoverable_nll": 0.031,
        "recoverable_nll_lower": 0.008,
    },
    "metrics": {"count": 2100, "nll": 0.31, "nll_low": 0.22, "nll_high": 0.41},
    "expected_accuracy": {"value": 0.914, "basis": "labels", "low": 0.9, "high": 0.927},
    "drift": {"alarm": False, "log_evidence": -1.2},
    "phase": "watching",
    "log": {"seq": 4200, "rows": 2100, "sources": {"audit": 12}},
}
DECISION = {
    "id": 3,
    "kind": "alarm",
    "created_at": "2026-11-22T03:00:00Z",
    "sentence": "Version 1 is not calibrated any more.",
    "version": 1,
    "labels": 2100,
    "evidence": {"log_evidence": 4.7, "diagnosis": "overconfident"},
}
SCORE = {
    "value": 0.257,
    "standard_error": 0.03,
    "change": {"value": -0.097, "low": -0.157, "high": -0.052},
    "improves": True,
    "clear": True,
}
COMPARISON = {
    "sentences": [
        "Version 2 (pb), compared with version 1 (ts): NLL (-0.0970, 95 % interval -0.1570 to -0.0520) is "
        "clearly lower; Brier score and smooth ECE are not clearly different."
    ],
    "warnings": [],
    "fit_samples": 539,
    "classes": 10,
    "folds": 5,
    "methods": [
        {
            "method": "version 2 (pb)",
            "base": "version 1 (ts)",
            "metrics": {"nll": SCORE},
            "changed_labels": 0,
            "fit_seconds": 0.1,
        }
    ],
    "left_out": {},
}
REPORT = {
    "method": "ts",
    "samples": 539,
    "classes": 10,
    "folds": 5,
    "metrics": {
        "nll": {
            "before": {"value": 0.354, "low": 0.247, "high": 0.5},
            "after": {"value": 0.257, "low": 0.193, "high": 0.341},
            "difference": {"value": -0.097, "low": -0.157, "high": -0.052},
        }
    },
    "changed_labels": 0,
    "ties": 0,
    "is_better": True,
    "warnings": [],
}

RELIABILITY = {
    "before": {
        "samples": 539,
        "accuracy": 0.924,
        "mean_confidence": 0.981,
        "bins": [{"low": 0.867, "high": 0.933, "count": 8, "confidence": 0.9, "accuracy": 0.5}],
    }
}


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
            "example": None,
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
