"""What a model of features or texts takes: uploads of labelled rows and texts are compared with it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Self

from boxcal.app.http.problems import InvalidUpload
from boxcal.app.tables.arrays import Array
from boxcal.models import UnusableInput
from boxcal.models.inputs.base import Inputs
from boxcal.models.inputs.rows import Column, RowInputs
from boxcal.models.inputs.texts import TextInputs

if TYPE_CHECKING:
    from boxcal.models.backends.backbone import Backbone

FEATURES: Literal["features"] = "features"
TEXTS: Literal["texts"] = "texts"
TEXT = "text"
"""The column of texts in a table."""


@dataclass(frozen=True, slots=True)
class ModelInputs:
    """The inputs of a model of features or texts; small enough to be sent to another process."""

    model: str
    member: Literal["features", "texts"]  # Name of the samples in an upload: `features` or `texts`
    labels: tuple[str, ...]  # The K class names
    columns: tuple[Column, ...] = ()  # Of `RowInputs`; empty for texts
    names: tuple[str, ...] = ()
    has_missing: bool = False
    has_tokenizer: bool = True  # Whether texts can become tokens

    @classmethod
    def of(cls, backbone: Backbone) -> Self | None:
        """Take them from a backbone; None if it reads neither features nor texts."""
        inputs, labels = backbone.inputs, tuple(backbone.labels)
        if isinstance(inputs, RowInputs):
            return cls(backbone.name, FEATURES, labels, inputs.columns, inputs.names, inputs.has_missing)
        if isinstance(inputs, TextInputs):
            return cls(backbone.name, TEXTS, labels, has_tokenizer="text" in inputs.members)
        return None

    @property
    def table_columns(self) -> tuple[str, ...]:
        """The columns of the samples in a table."""
        return self.names if self.member == FEATURES else (TEXT,)

    @property
    def has_names(self) -> bool:
        """Whether something names the features; without names a table has them in their order."""
        return self.member == TEXTS or self.rows.has_names

    def read_as(self, names: Sequence[str]) -> str:
        """Say how these columns of a table are read."""
        by_name = self.has_names or tuple(names) == self.table_columns
        in_order = "" if by_name else " in the order of the file: the model has no names of them"
        return f"read as {self.member}{in_order}"

    @property
    def rows(self) -> RowInputs:
        """The rows of features that the model reads."""
        return RowInputs(self.columns, self.names, has_missing=self.has_missing)

    def check_member(self, there: Sequence[str]) -> bool:
        """Say whether an upload that has these arrays has samples of this model."""
        if self.member not in there:
            return False
        if scores := next((name for name in ("logits", "probabilities") if name in there), None):
            raise InvalidUpload(
                f"There are both `{scores}` and `{self.member}`: {self.model} makes logits of {self.member}. "
                "Send the one to be fitted."
            )
        self.check_tokenizer()
        return True

    def check_tokenizer(self) -> None:
        """Refuse texts where the model has no tokenizer."""
        if not self.has_tokenizer:
            raise InvalidUpload(
                f"{self.model} takes tokens: no tokenizer.json is declared for it. Send its logits."
            )


def either_of(inputs: ModelInputs | None) -> str:
    """List what an upload may hold beside its labels."""
    scores = "`logits` or `probabilities`"
    return f"either {scores}" if inputs is None else f"`{inputs.member}`, {scores}"


@contextmanager
def naming_samples() -> Iterator[None]:
    """Convert errors of a model's inputs, which name the row and the value, to `InvalidUpload`."""
    try:
        yield
    except UnusableInput as error:
        raise InvalidUpload(str(error)) from error


def tokens_of(texts: list[str], inputs: Inputs, first: int) -> Array:
    """Turn texts into samples of a model."""
    with naming_samples():
        if not isinstance(inputs, TextInputs):
            raise UnusableInput(inputs.refusal("text"))
        return inputs.of_texts(texts, first)
