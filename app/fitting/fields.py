"""The fields of an upload to `/fit` beside its file; the service names them, and the worker checks them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from boxcal.app.fitting.messages import BUDGET_SECONDS
from boxcal.app.http.problems import InvalidParameter
from boxcal.app.registry.records import ActivatePolicy
from boxcal.app.tables.labels import Declared
from boxcal.calibrators.errors import hint

DECLARED = ("scores", "label", "group", "ignore", "labels_as", "class_mix")
"""Fields that say what the file holds."""
FILES = ("file", "logits", "probabilities", "labels", "features", "groups", "sample_weight")
"""Parts with a file name: one file of everything, or `.npy` arrays."""


class FitFields(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    method: str = "auto"
    activate: ActivatePolicy = ActivatePolicy.IF_BETTER
    budget_seconds: float = Field(BUDGET_SECONDS, gt=0, le=3600, allow_inf_nan=False)
    scores: Literal["logits", "probabilities", "percent"] | None = None
    label: str | None = None
    group: str | None = None
    ignore: tuple[str, ...] = ()
    labels_as: Literal["index", "name"] | None = None
    class_mix: Literal["as_traffic", "resampled"] | None = None

    @field_validator("ignore", mode="before")
    @classmethod
    def _listed(cls, value: Any) -> Any:
        return value.split(",") if isinstance(value, str) else value

    @property
    def declared(self) -> Declared:
        """What they say of the file."""
        return Declared(**{name: getattr(self, name) for name in DECLARED})

    @classmethod
    def of(cls, fields: Mapping[str, Any], accepted: Sequence[str]) -> FitFields:
        """Check the fields of a form, or the members of a JSON document that are no arrays."""
        known = (*accepted, *FILES)
        for name in fields:
            if name not in accepted:
                fields_are = f"the fields are {', '.join(f'`{each}`' for each in accepted)}."
                raise InvalidParameter(f"There is no field `{name:.200}`{hint(name, known, fields_are)}")
        try:
            return cls.model_validate(dict(fields))
        except ValidationError as error:
            first = error.errors()[0]
            name = ".".join(str(part) for part in first["loc"])
            raise InvalidParameter(
                f"The field `{name}` = {first['input']!r:.200}: {first['msg']}."
            ) from error
