"""Sends the events that a person should see to a URL: signed, retried, and each at least once.

The signature is HMAC-SHA256 over `<Boxcal-Timestamp>.<body>` with `BOXCAL_ALARM_SECRET`, in hexadecimal.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import time
from contextlib import suppress
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import httpx
import orjson
import stamina

from boxcal.app.http.problems import RegistryUnavailable
from boxcal.app.monitoring.events import EventLog, StoredEvent
from boxcal.app.registry.store import Registry
from boxcal.calibrators.monitoring.decisions import DecisionKind

if TYPE_CHECKING:
    from boxcal.app.observability.telemetry import Telemetry

logger = logging.getLogger("boxcal")

SENT = (
    DecisionKind.ALARM.value,
    DecisionKind.MATERIAL_ALARM.value,
    DecisionKind.DUEL_WON.value,
    DecisionKind.ROLLBACK.value,
    DecisionKind.ACTIVATED.value,
)
ATTEMPTS = 5
RETRY_SECONDS = 30.0
ANSWER_SECONDS = 5.0
POLL_SECONDS = 5.0


class Webhook:
    """Delivers events to one URL."""

    def __init__(
        self,
        url: str,
        secret: str,
        registry: Registry,
        events: EventLog,
        telemetry: Telemetry,
        *,
        model: str,
    ) -> None:
        self._url = url
        self._secret = secret.encode()
        self._registry = registry
        self._events = events
        self._model = model
        self._telemetry = telemetry
        self._wake = asyncio.Event()

    def wake(self) -> None:
        """Deliver soon: there may be an event."""
        self._wake.set()

    async def run(self) -> None:
        """Deliver what is due, until cancelled; an event that cannot be delivered is tried again later."""
        async with httpx.AsyncClient(timeout=ANSWER_SECONDS) as client:
            while True:
                self._wake.clear()
                with suppress(RegistryUnavailable):
                    while event := await self._registry.run(self._events.claim, SENT):
                        if await self._deliver(client, event):
                            await self._registry.run(self._events.delivered, event)
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._wake.wait(), POLL_SECONDS)

    async def _deliver(self, client: httpx.AsyncClient, event: StoredEvent) -> bool:
        body = orjson.dumps(
            {
                "id": event.id,
                "kind": event.kind,
                "model": self._model,
                "created_at": event.created_at,
                **event.document,
            }
        )
        try:
            async for attempt in stamina.retry_context(
                httpx.HTTPError, attempts=ATTEMPTS, timeout=RETRY_SECONDS, wait_initial=0.2
            ):
                with attempt:
                    now = str(int(time.time()))
                    signature = sign(self._secret, now, body)
                    headers = {
                        "content-type": "application/json",
                        "boxcal-timestamp": now,
                        "boxcal-signature": f"sha256={signature}",
                    }
                    answer = await client.post(self._url, content=body, headers=headers)
                    answer.raise_for_status()
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            # The message of an HTTPStatusError has the whole URL, whose path may be a secret.
            reason = f"{type(error).__name__}: {error}"
            if isinstance(error, httpx.HTTPStatusError):
                reason = f"it answers {error.response.status_code}"
            host = urlsplit(self._url).hostname
            logger.warning("Event %d could not be sent to %s: %s", event.id, host, reason)
            self._telemetry.delivered("failed")
            return False
        self._telemetry.delivered("delivered")
        return True


def sign(secret: bytes, timestamp: str, body: bytes) -> str:
    """Return the signature of a delivery."""
    return hmac.new(secret, timestamp.encode() + b"." + body, hashlib.sha256).hexdigest()
