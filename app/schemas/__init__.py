"""Documents of every route, which the server, the client and the command line share; pydantic alone."""

from pydantic import BaseModel, ConfigDict, WrapValidator

MayGrow = WrapValidator(lambda value, known: value if isinstance(value, str) else known(value))
"""Of an enumeration in a response: a value that a newer service adds is read as it is."""


class Document(BaseModel):
    """A frozen response; members that a newer service adds are kept in `model_extra`."""

    model_config = ConfigDict(frozen=True, extra="allow", from_attributes=True)
