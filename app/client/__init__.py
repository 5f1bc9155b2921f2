"""A typed client of the service, blocking and for asyncio; the public names of its modules."""

from boxcal.app.client import clients, errors, results
from boxcal.app.client.clients import *  # noqa: F403
from boxcal.app.client.errors import *  # noqa: F403
from boxcal.app.client.exchange import RetryPolicy
from boxcal.app.client.results import *  # noqa: F403

__all__ = ["RetryPolicy"]
__all__ += clients.__all__
__all__ += errors.__all__
__all__ += results.__all__
