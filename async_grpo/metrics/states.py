"""Time accounting: a role is in exactly one state at any instant, so the sum is its wall time."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from async_grpo.interfaces import Clock


class StateClock:
    """Adds up the seconds spent in each state.

    One thread owns it; `seconds()` may be read from another.
    """

    def __init__(self, initial: str, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._since = clock()
        self._state = initial
        self._seconds: dict[str, float] = {}

    @property
    def state(self) -> str:
        """The state now."""
        return self._state

    def enter(self, state: str) -> str:
        """Leave the present state for `state`; returns the one that was left."""
        now = self._clock()
        left = self._state
        self._seconds[left] = self._seconds.get(left, 0.0) + now - self._since
        self._since = now
        self._state = state
        return left

    @contextmanager
    def during(self, state: str) -> Iterator[None]:
        """Be in `state` inside the block, then again in the one before it."""
        before = self.enter(state)
        try:
            yield
        finally:
            self.enter(before)

    def seconds(self) -> dict[str, float]:
        """State -> seconds so far, the present state included; the sum is the wall time."""
        totals = dict(self._seconds)
        totals[self._state] = totals.get(self._state, 0.0) + self._clock() - self._since
        return totals
