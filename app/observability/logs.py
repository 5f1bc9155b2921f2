"""Log records as text or JSON lines on stderr, with the id of the request that they are about."""

from __future__ import annotations

import json
import logging
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any

from boxcal.app.settings.service import Settings

REQUEST_MEMBERS = ("method", "path", "status", "milliseconds")

request_id: ContextVar[str] = ContextVar("request_id", default="")
"""Of the request that the current task answers; empty outside of requests."""


class JsonFormatter(logging.Formatter):
    """One JSON object per record: time, level, logger, message, and what is known of the request."""

    def format(self, record: logging.LogRecord) -> str:
        """Write the record as one line."""
        document: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if answered := request_id.get():
            document["request_id"] = answered
        document |= {name: getattr(record, name) for name in REQUEST_MEMBERS if hasattr(record, name)}
        if record.exc_info:
            document["exception"] = self.formatException(record.exc_info)
        return json.dumps(document)


class TextFormatter(logging.Formatter):
    """The level, the request id if there is one, and the message."""

    def format(self, record: logging.LogRecord) -> str:
        """Write the record; an exception follows on further lines."""
        answered = request_id.get()
        return f"{record.levelname + ':':<9} {f'[{answered}] ' if answered else ''}{super().format(record)}"


def log_config(settings: Settings) -> dict[str, Any]:
    """Configure Python's logging as `BOXCAL_LOG_FORMAT` and `BOXCAL_LOG_LEVEL` say."""
    formatter = JsonFormatter if settings.log_format == "json" else TextFormatter
    level = settings.log_level.upper()
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"line": {"()": formatter}},
        "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "line"}},
        "loggers": {
            **{name: {"handlers": ["stderr"], "level": level} for name in ("boxcal", "uvicorn")},
            **{name: {"handlers": ["stderr"], "level": "WARNING"} for name in ("asyncio", "py.warnings")},
            # What it warns of, other records tell with its cause.
            "stamina": {"level": "ERROR"},
        },
    }
