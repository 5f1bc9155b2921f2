"""The state of the service has what each package of routes says that it uses."""

import inspect
from typing import get_type_hints

import pytest

from boxcal.app.access.routes import AuditedModel, AuditedState
from boxcal.app.fitting.server.routes import FittedModel
from boxcal.app.http.health import ObservedModel, ObservedState
from boxcal.app.monitoring.routes import MonitoredModel
from boxcal.app.predict.description import DescribedModel, DescribedState
from boxcal.app.protocols.v2.served import ProtocolModel, ProtocolState
from boxcal.app.registry.routes import RegisteredModel
from boxcal.app.state import ServedModel, State


def checked_by_mypy(model: ServedModel, state: State) -> None:
    """Fail in the type checker where a part is missing or has another type."""
    _: tuple[RegisteredModel, FittedModel, MonitoredModel, DescribedModel] = (model, model, model, model)
    __: tuple[AuditedModel, ObservedModel, ProtocolModel] = (model, model, model)
    ___: tuple[AuditedState, ObservedState, DescribedState, ProtocolState] = (state, state, state, state)


@pytest.mark.parametrize(
    ("used", "built"),
    [
        *((one, ServedModel) for one in (RegisteredModel, FittedModel, MonitoredModel, DescribedModel)),
        *((one, ServedModel) for one in (AuditedModel, ObservedModel, ProtocolModel)),
        *((one, State) for one in (AuditedState, ObservedState, DescribedState, ProtocolState)),
    ],
)
def test_routes_find_what_they_use(used: type, built: type) -> None:
    parts = {name for name, _ in inspect.getmembers(used) if not name.startswith("_")}
    assert parts
    assert parts <= {*dir(built), *get_type_hints(built)}
