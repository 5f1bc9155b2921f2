"""Log records as text or JSON lines on stderr, and an id for every request."""

from __future__ import annotations

import json
import logging
import os
import re
import time
from contextvars import ContextVar
from datetime import UTC, datetime
from itertools import count
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from boxcal.app.settings.service import Settings

HEADER = b"x-request-id"
VALID_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")
REQUEST_MEMBERS = ("method", "path", "status", "milliseconds")

logger = logging.getLogger("boxcal.request")
_PROCESS = os.urandom(4).hex().encode()
_numbers = count(int.from_bytes(os.urandom(4)))
_request_id: ContextVar[str] = ContextVar("request_id", default="")


def current_request_id() -> str:
    """Return the id of the request that the current task answers; empty outside of requests."""
    return _request_id.get()


class RequestLog:
    """Gives every request an id, returns it as `X-Request-Id`, and logs one line per request at level debug.

    A valid id of the client (up to 128 letters, digits and `._:-`) is kept; otherwise a new one is drawn.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began, status = time.perf_counter(), 0
        header = (HEADER, id_of(scope))
        _request_id.set(header[1].decode())  # for the records of this request's task

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], header]
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        finally:
            if logger.isEnabledFor(logging.DEBUG):
                path = scope["path"] if scope["path"].isprintable() else ascii(scope["path"])
                milliseconds = round((time.perf_counter() - began) * 1e3, 3)
                values = (scope["method"], path, status, milliseconds)
                extra = dict(zip(REQUEST_MEMBERS, values, strict=True))
                logger.debug("%s %s %d %.3f ms", *values, extra=extra)


def id_of(scope: Scope) -> bytes:
    """Return the request's own id if it is valid, else a new one."""
    for name, value in scope["headers"]:
        if name == HEADER and VALID_ID.fullmatch(value):
            given: bytes = value
            return given
    return b"%s%08x" % (_PROCESS, next(_numbers) & 0xFFFFFFFF)


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
        if request_id := _request_id.get():
            document["request_id"] = request_id
        document |= {name: getattr(record, name) for name in REQUEST_MEMBERS if hasattr(record, name)}
        if record.exc_info:
            document["exception"] = self.formatException(record.exc_info)
        return json.dumps(document)


class TextFormatter(logging.Formatter):
    """The level, the request id if there is one, and the message."""

    def format(self, record: logging.LogRecord) -> str:
        """Write the record; an exception follows on further lines."""
        request_id = _request_id.get()
        return (
            f"{record.levelname + ':':<9} {f'[{request_id}] ' if request_id else ''}{super().format(record)}"
        )


def log_config(settings: Settings) -> dict[str, Any]:
    """Configure Python's logging as `BOXCAL_LOG_FORMAT` and `BOXCAL_LOG_LEVEL` say."""
    formatter = JsonFormatter if settings.log_format == "json" else TextFormatter
    level = settings.log_level.upper()
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"line": {"()": formatter}},
        "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "line"}},
        "loggers": {name: {"handlers": ["stderr"], "level": level} for name in ("boxcal", "uvicorn")},
    }
