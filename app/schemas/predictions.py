"""Documents of `/predict` and `/calibrate`; a test compares them with what the server writes."""

from typing import Annotated, Literal

from pydantic import Field
from typing_extensions import TypedDict

from boxcal.app.schemas import Document, MayGrow


class CalibratorName(Document):
    """The calibrator that made the probabilities; version 0 is `uncalibrated`."""

    version: int = Field(examples=[1])
    method: str = Field(examples=["ts"])


class LabelProbability(Document):
    """One class of a prediction."""

    label: str = Field(examples=["9"])
    index: int = Field(examples=[9])
    probability: float = Field(examples=[0.75])
    bound: Annotated[Literal["lower", "upper"], MayGrow] | None = Field(
        None, description="The bound that the probability is equal to, if any."
    )


class Explanation(Document):
    """What is needed to apply any bounds to a prediction: BCSoftmax(logits; lower, upper) is the answer."""

    logits: tuple[float | None, ...] = Field(description="The K mapped logits; null for minus infinity.")
    lower: float | tuple[float, ...] = Field(description="Fitted lower bound, one number or K.")
    upper: float | tuple[float, ...] = Field(description="Fitted upper bound, one number or K.")


class Prediction(Document):
    """The classes of one sample, most probable first."""

    label: str = Field(examples=["9"])
    index: int = Field(examples=[9])
    probability: float = Field(examples=[0.75])
    id: str | None = Field(
        None,
        description="Identifies the prediction in `POST /feedback`, on request.",
        examples=["01936d8f2b7c4d0e9a5f6b1c2d3e4f50"],
    )
    top: tuple[LabelProbability, ...] = ()
    probabilities: tuple[float, ...] | None = Field(None, description="All K probabilities, on request.")
    logits: tuple[float, ...] | None = Field(None, description="The backbone's K logits, on request.")
    explain: Explanation | None = Field(None, description="Mapped logits and fitted bounds, on request.")
    truncated: Literal[True] | None = Field(
        None, description="Present if the text has more tokens than the model reads: it was truncated."
    )


class Timing(TypedDict, total=False):
    """Milliseconds spent in each stage; the service sends 0 for a stage that a route does not have."""

    decode: float
    queue: float
    backbone: float
    calibrate: float
    total: float


STAGES: tuple[str, ...] = tuple(Timing.__annotations__)


class Answer(Document):
    """Calibrated predictions of `/predict` and `/calibrate`, one for each sample, in the order sent."""

    model: str = Field(examples=["digits"])
    calibrator: CalibratorName
    bounds_relaxed: bool = Field(description="Whether fitted bounds were relaxed for the request's bounds.")
    predictions: tuple[Prediction, ...]
    timing_ms: Timing
