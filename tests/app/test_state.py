"""The state of the service has what the routes say that they use."""

import inspect
from collections.abc import Iterator
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import pytest
from fastapi.params import Depends

from boxcal.app.access import routes as access
from boxcal.app.fitting.server import routes as fitting
from boxcal.app.http import health
from boxcal.app.http.dependencies import ServiceState, part_of_model
from boxcal.app.monitoring import routes as monitoring
from boxcal.app.predict import description
from boxcal.app.registry import routes as registry
from boxcal.app.state import ServedModel, State


def checked_by_mypy(state: State) -> None:
    """Fail in the type checker where a part is missing or has another type."""
    _: ServiceState = state


def parts_of_models(module: Any) -> Iterator[tuple[str, Any]]:
    """Yield each argument of a route that is a part of the model: the name and the declared type."""
    made = part_of_model("name").dependency.__code__
    for route in module.router.routes:
        for annotation in get_type_hints(route.endpoint, include_extras=True).values():
            if get_origin(annotation) is Annotated:
                declared, *others = get_args(annotation)
                for one in others:
                    if isinstance(one, Depends) and one.dependency and one.dependency.__code__ is made:
                        (name,) = inspect.getclosurevars(one.dependency).nonlocals.values()
                        yield name, declared


@pytest.mark.parametrize(
    ("module", "count"),
    [(access, 0), (fitting, 6), (health, 1), (monitoring, 11), (description, 3), (registry, 14)],
)
def test_a_part_of_the_model_has_the_type_that_the_route_declares(module: Any, count: int) -> None:
    built = get_type_hints(ServedModel)
    built |= {
        name: get_type_hints(member.fget)["return"]
        for name, member in inspect.getmembers(ServedModel)
        if isinstance(member, property)
    }
    found = list(parts_of_models(module))
    assert len(found) == count
    assert [declared for _, declared in found] == [built[name] for name, _ in found]
