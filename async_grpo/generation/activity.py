"""What a generator is doing at this instant, for the time accounting; never used to decide."""

import time
from collections.abc import Callable, Iterable

from async_grpo.generation.engines import Engine
from async_grpo.interfaces import Clock
from async_grpo.metrics.states import StateClock

GENERATING = "generating"
"""an engine is sampling at least one request"""
SYNCING = "syncing"
"""no engine is sampling: they receive weights, or wait for their first"""
BLOCKED = "blocked"
"""nothing but finished groups that wait for the replay server"""
WAITING = "waiting"
"""engines serve, but there is no ticket"""
STARTING = "starting"
"""no engine answers yet"""


class Activity:
    """Keeps a StateClock in the state that the engines and inserts show.

    Args:
        engines: the engines that exist at the moment.
        num_inserting: groups whose insert is under way.
        clock: seconds.
    """

    def __init__(
        self,
        engines: Callable[[], Iterable[Engine]],
        num_inserting: Callable[[], int],
        clock: Clock = time.monotonic,
    ) -> None:
        self._engines = engines
        self._num_inserting = num_inserting
        self._states = StateClock(STARTING, clock)

    @property
    def state(self) -> str:
        """The state now."""
        return self._states.state

    def update(self) -> None:
        """Something changed."""
        state = self._observe()
        if state != self._states.state:
            self._states.enter(state)

    def seconds(self) -> dict[str, float]:
        """State -> seconds so far."""
        return self._states.seconds()

    def _observe(self) -> str:
        engines = list(self._engines())
        if any(engine.serving and engine.num_running for engine in engines):
            return GENERATING
        if any(engine.updating for engine in engines):
            return SYNCING
        if self._num_inserting():
            return BLOCKED
        if any(engine.serving for engine in engines):
            return WAITING
        return SYNCING if engines else STARTING
