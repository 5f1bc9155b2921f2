"""Errors of the monitor, as leaves of the service's error tree.

BoxcalError
  + InvalidRequest            422
  |   - NotComparable         422  a duel between these versions is not possible
  + Conflict                  409
      - TooManyDuels          409  all duels are undecided
"""

from boxcal.app.http.problems import InvalidRequest
from boxcal.app.registry.errors import Conflict


class NotComparable(InvalidRequest):
    """A duel between these versions is not possible."""

    type = "not-comparable"
    title = "Versions cannot be compared"


class TooManyDuels(Conflict):
    """All duels are undecided."""

    type = "too-many-duels"
    title = "Too many duels"
