"""Documents of `/health`, `/model`, `/methods` and `/version`, and of problems."""

from typing import Any, Literal

from pydantic import BaseModel, Field

from boxcal.app.schemas import Document


class Live(Document):
    """The process is alive."""

    status: Literal["live"] = "live"


class Ready(Document):
    """The service is ready for predictions."""

    status: Literal["ready"] = "ready"
    model: str = Field(description="The default model.", examples=["digits"])
    calibrator: int = Field(description="The version of its active calibrator.", examples=[1])
    models: dict[str, int] = Field(
        description="The version of the active calibrator of every model.", examples=[{"digits": 1}]
    )


class Health(Document):
    """The answer of a health route to the client; `ready` is False while the service starts or stops."""

    ready: bool
    status: str = ""
    model: str | None = None
    calibrator: int | None = None


class Limits(BaseModel):
    """Limits of one request."""

    body_bytes: int = Field(description="Maximum request body, except `/fit`.", examples=[33554432])
    upload_bytes: int = Field(description="Maximum request body of `/fit`.", examples=[1073741824])
    pixels: int = Field(description="Maximum pixels of an image.", examples=[50000000])
    queue_samples: int = Field(description="Maximum samples in the queue and in progress.", examples=[1024])
    timeout_ms: float = Field(description="Timeout of requests that set none.", examples=[30000.0])


class Example(BaseModel):
    """An example image."""

    name: str = Field(examples=["digit 9"])
    png: str = Field(description="The PNG in base64.", examples=["iVBORw0KGgo="])


class ModelDescription(BaseModel):
    """The model that is served."""

    name: str = Field(examples=["digits"])
    models: list[str] = Field(
        description="Names of all models of the service; the first is the default.", examples=[["digits"]]
    )
    num_classes: int = Field(examples=[10])
    labels: list[str] = Field(examples=[["0", "1"]])
    inputs: Literal["images", "tensors", "rows", "texts", "none"] = Field(
        description="What `/predict` takes; `none` if there is no model."
    )
    input_shape: list[int] = Field(description="Shape of one preprocessed input.", examples=[[1, 8, 8]])
    bounds: dict[Literal["lower", "upper"], Any] = Field(
        description="Bounds of requests that set none, in the form of `options.bounds`.",
        examples=[{"lower": 0, "upper": 1}],
    )
    formats: list[str] = Field(
        description="Image media types; empty if the model takes no images.", examples=[["image/png"]]
    )
    device: str = Field(examples=["cpu"])
    limits: Limits
    example: dict[str, Any] | None = Field(
        description="One input of a JSON body of `/predict`; null for images and for large tensors.",
        examples=[{"features": [5.1, 3.5]}],
    )
    examples: list[Example] = Field(description="Example images, for models that come with some.")


class MethodDescription(BaseModel):
    """A calibration method."""

    name: str = Field(examples=["ts"])
    reads: Literal["logits", "features", "inputs"] = Field(description="What it needs besides labels.")


class Methods(BaseModel):
    """The calibration methods."""

    methods: list[MethodDescription] = Field(description="From the simplest to the most complex.")


class Release(BaseModel):
    """The release that answers."""

    version: str = Field(description="Version of boxcal.", examples=["0.3.0"])
    registry: str = Field(description="Revision of the tables of the registry.", examples=["0012"])
    python: str = Field(description="Version of Python.", examples=["3.11.9"])


class Problem(BaseModel):
    """Problem details of a failed request (RFC 9457). `error` has the same text as `detail`."""

    type: str = Field(description="Identifies the kind of problem.")
    title: str
    status: int
    detail: str = Field(description="What was wrong, with the offending value and the limit.")
    error: str = Field(description="The same as `detail`.")
    request_id: str = Field(description="The same as the header `X-Request-Id`.")
