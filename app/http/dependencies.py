"""What routes read of the running service: its state, and the model that a request names.

`state` builds both and passes them with every request. Routes name the parts of a model that they use, so
that no package depends on what builds all of them.
"""

from __future__ import annotations

from ipaddress import ip_address
from typing import Annotated, Any

from fastapi import Depends, Query, Request

STATE = "boxcal"
"""The key of the state of the service in the state that the server passes to every request."""
TELEMETRY = "boxcal.telemetry"
"""The key in the scope of a request of the metrics that count it, if these are not those of the service."""

CLIENT_TIMEOUT = "boxcal.client_timeout"
"""A key in the scope of a request that sets its timeout itself; the metrics count these apart."""


def address_of(request: Request) -> str:
    """Return the address from which a request came; empty where a proxy names something else."""
    host = request.client.host if request.client else ""
    try:
        return str(ip_address(host))
    except ValueError:
        return ""


async def current_state(request: Request) -> Any:
    """Return the state of the service that handles a request."""
    return request.scope["state"][STATE]


def model_of(request: Request) -> Any:
    """Return the model that a request names in its query string, or the default one."""
    state = request.scope["state"][STATE]
    name = request.query_params.get("model") if request.scope["query_string"] else None
    model = state.default if name is None else state.model(name)
    if model.telemetry is not state.telemetry:
        request.scope[TELEMETRY] = model.telemetry
    return model


async def current_model(
    request: Request,
    model: Annotated[str | None, Query(description="Name of the model. Default: the first one.")] = None,
) -> Any:
    return model_of(request)


def part_of_model(name: str) -> Any:
    """Depend on a part of the model that a request names: `Annotated[Monitor, part_of_model("monitor")]`."""

    async def part(model: Annotated[Any, Depends(current_model)]) -> Any:
        return getattr(model, name)

    return Depends(part)
