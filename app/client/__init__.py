"""A typed client of the service, blocking and for asyncio: the caller's end of both paths."""

from boxcal.app.client.clients import DEFAULT_URL, AsyncBoxcalClient, BoxcalClient
from boxcal.app.client.errors import (
    AnswerTimeoutError,
    ClientError,
    ConflictError,
    ConnectionLostError,
    FitNotSucceededError,
    InvalidRequestError,
    InvalidUrlError,
    NotFoundError,
    ProblemError,
    ServiceFaultError,
    TransportError,
    UnavailableError,
    UnreachableError,
    UnreadableAnswerError,
)
from boxcal.app.client.exchange import RetryPolicy
from boxcal.app.client.results import (
    Activation,
    Answer,
    CalibratorRecord,
    Fit,
    Health,
    LabelProbability,
    Prediction,
)

__all__ = [
    "DEFAULT_URL",
    "Activation",
    "Answer",
    "AnswerTimeoutError",
    "AsyncBoxcalClient",
    "BoxcalClient",
    "CalibratorRecord",
    "ClientError",
    "ConflictError",
    "ConnectionLostError",
    "Fit",
    "FitNotSucceededError",
    "Health",
    "InvalidRequestError",
    "InvalidUrlError",
    "LabelProbability",
    "NotFoundError",
    "Prediction",
    "ProblemError",
    "RetryPolicy",
    "ServiceFaultError",
    "TransportError",
    "UnavailableError",
    "UnreachableError",
    "UnreadableAnswerError",
]
