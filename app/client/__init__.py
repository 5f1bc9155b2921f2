"""A typed client of the service, blocking and for asyncio; the public names of its modules."""

from boxcal.app.client import clients, errors
from boxcal.app.client.clients import *  # noqa: F403
from boxcal.app.client.errors import *  # noqa: F403
from boxcal.app.client.exchange import RetryPolicy
from boxcal.app.schemas.calibrators import Activated, BackboneName, CalibratorDocument
from boxcal.app.schemas.fits import Fit, FitWarning
from boxcal.app.schemas.monitoring import Feedback, FeedbackProblem
from boxcal.app.schemas.predictions import Answer, CalibratorName, LabelProbability, Prediction
from boxcal.app.schemas.service import Health

__all__ = [
    "Activated",
    "Answer",
    "BackboneName",
    "CalibratorDocument",
    "CalibratorName",
    "Feedback",
    "FeedbackProblem",
    "Fit",
    "FitWarning",
    "Health",
    "LabelProbability",
    "Prediction",
    "RetryPolicy",
]
__all__ += clients.__all__
__all__ += errors.__all__
