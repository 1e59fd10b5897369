"""How often a child process may be started again: at most so often in any hour of its service.

A budget for a whole run would end a month of work after a handful of unrelated deaths. A budget by
the clock would never end a child that takes an hour to fail. So the hour is one of service: a child
that never serves uses its budget up, however long each of its starts takes.
"""

from collections import deque

SERVICE_S = 3600.0
"""Service after which a restart no longer counts."""


class RestartBudget:
    """The restarts of one child. Its owner tells how long each life has served.

    Args:
        limit: restarts within `SERVICE_S` of service.

    Example:
        budget = RestartBudget(3)
        budget.serve(7200.0)  # a life has ended after two hours
        may_start_again = budget.take()
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._served_s = 0.0
        self._taken: deque[float] = deque()

    @property
    def num_used(self) -> int:
        """Restarts that count at the moment."""
        while self._taken and self._served_s - self._taken[0] >= SERVICE_S:
            self._taken.popleft()
        return len(self._taken)

    def serve(self, seconds: float) -> None:
        """A life has ended that served so long."""
        self._served_s += seconds

    def take(self) -> bool:
        """Use one restart; False: none is left."""
        if self.num_used >= self.limit:
            return False
        self._taken.append(self._served_s)
        return True
