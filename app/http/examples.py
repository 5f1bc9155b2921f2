"""Examples of bodies, responses and parameters for `/docs` and `/openapi.json`; the tests send them."""

from __future__ import annotations

from typing import Any

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
