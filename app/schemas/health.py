"""Documents of `/health`."""

from typing import Literal

from pydantic import Field

from boxcal.app.schemas import Document


class Live(Document):
    """The process is alive."""

    status: Literal["live"] = "live"


class Ready(Document):
    """The service is ready for predictions."""

    status: Literal["ready"] = "ready"
    model: str = Field(description="The default model.")
    calibrator: int = Field(description="The version of its active calibrator.")
    models: dict[str, int] = Field(description="The version of the active calibrator of every model.")


class Health(Document):
    """The answer of a health route to the client; `ready` is False while the service starts or stops."""

    ready: bool
    status: str = ""
    model: str | None = None
    calibrator: int | None = None
