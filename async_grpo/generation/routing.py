"""Which engine samples which request: the least loaded one, a group on one engine where it fits.

Requests wait here, in order, while no engine has room; nothing polls. Knows nothing of HTTP.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable
from types import TracebackType

from async_grpo.generation.engines import Engine
from async_grpo.interfaces import Clock


class Placement:
    """The engine that a group's requests should share; set by the first that finds room."""

    def __init__(self) -> None:
        self.engine: Engine | None = None


class Place:
    """A request's place in an engine, or in the queue for one. Made by `Router.enqueue`.

    `async with place as engine:` waits for room; leaving the block gives the room back.
    """

    def __init__(self, router: "Router", placement: Placement) -> None:
        self._router = router
        self._placement = placement
        self._engine: Engine | None = None
        self._given = asyncio.Event()
        self._left = False

    @property
    def waiting(self) -> bool:
        """Still in the queue."""
        return self._engine is None and not self._left

    @property
    def preferred(self) -> Engine | None:
        """Where the other requests of the group are."""
        return self._placement.engine

    def give(self, engine: Engine) -> None:
        """There is room on `engine`."""
        self._placement.engine = engine
        self._engine = engine
        self._given.set()

    async def __aenter__(self) -> Engine:
        """Wait for room; the deadline is the group's."""
        try:
            await self._given.wait()
        except asyncio.CancelledError:
            self.leave()
            raise
        assert self._engine is not None
        return self._engine

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Give the room back."""
        self.leave()

    def leave(self) -> None:
        """Give the room back, or leave the queue. May be called again."""
        if not self._left:
            self._left = True
            if self._engine is not None:
                self._router.release(self._engine)


class Router:
    """Hands engine slots to requests. One event loop owns it.

    Args:
        engines: the engines that exist at the moment, in any state.
        on_change: called when a request found room or ended.
        clock: for slot utilization.
    """

    def __init__(
        self,
        engines: Callable[[], Iterable[Engine]],
        *,
        on_change: Callable[[], None],
        clock: Clock = time.monotonic,
    ) -> None:
        self._engines = engines
        self._on_change = on_change
        self._clock = clock
        self._queue: deque[Place] = deque()
        self._room = asyncio.Event()
        self._num_running = 0
        self._since = clock()
        self._running_s = 0.0
        self._slots_s = 0.0
        self._num_slots = 0

    @property
    def num_running(self) -> int:
        """Requests in flight on all engines."""
        return self._num_running

    def enqueue(self, placement: Placement, *, first: bool = False) -> Place:
        """A place for one request; `first`: before all others, for a second try."""
        place = Place(self, placement)
        if first:
            self._queue.appendleft(place)
        else:
            self._queue.append(place)
        self.dispatch()
        return place

    def release(self, engine: Engine) -> None:
        """A request on `engine` has ended."""
        self._account()
        engine.num_running -= 1
        self._num_running -= 1
        self.dispatch()

    def dispatch(self) -> None:
        """Give free slots to waiting requests; call it when an engine begins or stops to serve."""
        self._account()
        serving = [engine for engine in self._engines() if engine.serving]
        self._num_slots = sum(engine.num_slots for engine in serving)
        free = self._num_slots - sum(engine.num_running for engine in serving)
        while self._queue and free > 0:
            place = self._queue.popleft()
            if not place.waiting:
                continue
            engine = self._choose(serving, place.preferred)
            engine.num_running += 1
            self._num_running += 1
            free -= 1
            place.give(engine)
        while self._queue and not self._queue[0].waiting:
            self._queue.popleft()
        if free > 0 and not self._queue:
            self._room.set()
        else:
            self._room.clear()
        self._on_change()

    @staticmethod
    def _choose(serving: list[Engine], preferred: Engine | None) -> Engine:
        if (
            preferred is not None
            and preferred.serving
            and preferred.num_running < preferred.num_slots
        ):
            return preferred
        with_room = [engine for engine in serving if engine.num_running < engine.num_slots]
        return min(with_room, key=lambda engine: engine.num_running / engine.num_slots)

    async def room(self) -> None:
        """Wait until a slot is free and nobody queues for it: time for another group.

        Unblocked by a request that ends or an engine that begins to serve. No deadline: a
        generator without work waits for as long as the run lasts.
        """
        await self._room.wait()

    def utilization(self) -> float:
        """Share of serving engines' slots that held a request since the last call."""
        self._account()
        share = self._running_s / self._slots_s if self._slots_s > 0 else 0.0
        self._running_s = self._slots_s = 0.0
        return share

    def _account(self) -> None:
        now = self._clock()
        elapsed = now - self._since
        self._since = now
        self._running_s += elapsed * min(self._num_running, self._num_slots)
        self._slots_s += elapsed * self._num_slots
