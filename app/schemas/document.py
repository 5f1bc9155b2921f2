"""The base of all documents: how a response is read."""

from pydantic import BaseModel, ConfigDict


class Document(BaseModel):
    """A frozen response; members that a newer service adds are kept in `model_extra`."""

    model_config = ConfigDict(frozen=True, extra="allow", from_attributes=True)
