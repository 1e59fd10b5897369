"""Drawn groups for the training thread, one draw ahead of it.

An event loop in a background thread owns the connection to the replay server: it draws, fetches
and decodes the next step's groups while the training thread works, sends heartbeats, and passes
on wishes for weights. Knows neither models nor weights.
"""

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

from async_grpo.errors import PeerError, PeerLost, RemoteError
from async_grpo.interfaces import Clock, TrainerReplay
from async_grpo.replay_api.base import ErrorCode
from async_grpo.replay_api.trainer import DrawReply
from async_grpo.replay_parts import GeneratedStats, LeasedGroup, RoleStatus
from async_grpo.transport.waiting import saying
from async_grpo.types import DropReason, RolloutGroup

logger = logging.getLogger(__name__)

T = TypeVar("T")
_Reason = TypeVar("_Reason")
_Number = TypeVar("_Number", int, float)

_WISH_PAUSE_S = 0.05
"""Between draws that return only wishes: those answer at once, and groups must not be missed."""
_CLOSE_TIMEOUT_S = 10.0


class LoopThread:
    """An event loop in a daemon thread, for blocking callers in others."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()
        self._calls: set[Future[Any]] = set()
        self._calls_lock = threading.Lock()

    def call(self, coroutine: Coroutine[Any, Any, T], /) -> T:
        """Run `coroutine` and block; its own deadlines bound the wait.

        Raises:
            concurrent.futures.CancelledError: `cancel_calls` ended the wait.
        """
        with self._calls_lock:  # or one that has begun could miss `cancel_calls`
            future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
            self._calls.add(future)
        try:
            return future.result()
        finally:
            self._calls.discard(future)

    def cancel_calls(self) -> None:
        """End every `call` that other threads are in."""
        with self._calls_lock:
            calls = tuple(self._calls)
        for future in calls:
            future.cancel()

    def post(self, callback: Callable[[], object]) -> None:
        """Run `callback` on the loop, soon."""
        self._loop.call_soon_threadsafe(callback)

    def close(self) -> None:
        """Cancel what runs, stop the loop and join the thread."""
        if self._loop.is_closed():
            return
        asyncio.run_coroutine_threadsafe(_cancel_all(), self._loop).result(_CLOSE_TIMEOUT_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_CLOSE_TIMEOUT_S)
        self._loop.close()


async def _cancel_all() -> None:
    tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@dataclass(slots=True)
class Batch:
    """The groups of one train step."""

    draw_number: int
    train_version: int
    leased: list[LeasedGroup]
    groups: list[RolloutGroup]
    generated: GeneratedStats
    drawn_s: float
    """clock when the draw was answered"""
    taken_s: float = 0.0
    """clock when the training thread took it"""

    def in_queue_s(self) -> list[float]:
        """Seconds of each group from insert to when the training thread took it."""
        return [group.in_queue_s + self.taken_s - self.drawn_s for group in self.leased]


@dataclass(frozen=True, slots=True)
class _Failed:
    error: Exception


@dataclass(frozen=True, slots=True)
class _Stop:
    pass


@dataclass(slots=True)
class FeedSettings:
    """What the feed draws, and how it lives."""

    first_draw_number: int
    first_version: int
    num_train_steps: int
    heartbeat_s: float


class GroupFeed:
    """Draws one batch ahead. `start`, `take`, `acked` and `request_stop` are for other threads."""

    def __init__(
        self,
        replay: TrainerReplay,
        loop: LoopThread,
        settings: FeedSettings,
        *,
        status: Callable[[], RoleStatus],
        on_wishes: Callable[[], object],
        clock: Clock = time.monotonic,
    ) -> None:
        """Make a feed.

        Args:
            replay: used on `loop` only.
            loop: where everything but `take` runs.
            settings: what to draw.
            status: called on the loop for each heartbeat.
            on_wishes: called on the loop whenever engines want the current weights; must not block.
            clock: monotonic seconds.
        """
        self._replay, self._loop, self._settings, self._clock = replay, loop, settings, clock
        self._status, self._on_wishes = status, on_wishes
        self._inbox: queue.SimpleQueue[Batch | _Failed | _Stop] = queue.SimpleQueue()
        self._held: set[int] = set()
        self._ahead = asyncio.Semaphore(1)
        self._heartbeat_lock = asyncio.Lock()
        self._wishes: list[str] = []
        self._carried = GeneratedStats()
        """of draws that were given up, so that no average forgets them"""
        self._undrawn = GeneratedStats()
        """since the newest draw, as the server last told"""
        self._tasks: list[asyncio.Future[None]] = []
        self._stopping = False

    def start(self) -> None:
        """Begin to draw and to send heartbeats."""
        self._loop.post(self._spawn)

    def _spawn(self) -> None:
        self._tasks = [
            asyncio.ensure_future(self._guard(self._heartbeats())),
            asyncio.ensure_future(self._guard(self._prefetch())),
        ]

    def take(self, timeout_s: float) -> Batch | None:
        """The next batch, or None after `request_stop`.

        Raises:
            PeerError: no groups within `timeout_s`, or the replay server failed.
        """
        if self._stopping:
            return None
        try:
            with saying("groups from generators", timeout_s, "run.no_progress_timeout_s"):
                item = self._inbox.get(timeout=timeout_s)
        except queue.Empty:
            raise PeerLost(
                f"the replay server handed out no groups within {timeout_s:.0f} s; "
                f"{self._why_none()}"
            ) from None
        if isinstance(item, _Failed):
            raise item.error
        if isinstance(item, _Stop) or self._stopping:
            return None
        self._loop.post(self._ahead.release)
        item.taken_s = self._clock()
        return item

    def _why_none(self) -> str:
        known = [dropped_text(add_stats(self._carried, self._undrawn))]
        if self._wishes:
            known.append(f"engines {', '.join(self._wishes)} still wish for weights")
        return "; ".join(filter(None, known)) or (
            "no engine wishes for weights: do generators run, and do groups finish?"
        )

    def acked(self, draw_number: int) -> None:
        """The draw is trained and acknowledged: it is held no longer."""
        self._loop.post(lambda: self._held.discard(draw_number))

    def request_stop(self) -> None:
        """`take` returns None from now on. Safe in a signal handler."""
        self._stopping = True
        self._inbox.put(_Stop())

    def close(self) -> None:
        """End drawing and heartbeats."""
        self._loop.call(self._cancel())

    async def _cancel(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _guard(self, work: Coroutine[Any, Any, None]) -> None:
        """Run `work`; the training thread raises what it raises."""
        try:
            await work
        except Exception as error:  # noqa: BLE001 -- handed to the training thread as it is
            self._inbox.put(_Failed(error))

    async def _heartbeats(self) -> None:
        while True:
            async with self._heartbeat_lock:
                await self._replay.heartbeat(sorted(self._held), self._status())
            await asyncio.sleep(self._settings.heartbeat_s)

    async def _prefetch(self) -> None:
        number = self._settings.first_draw_number
        for version in range(self._settings.first_version, self._settings.num_train_steps):
            await self._ahead.acquire()
            batch: Batch | None = None
            while batch is None:
                # No heartbeat may be under way that does not list this draw: sent again late, it
                # would release the lease.
                async with self._heartbeat_lock:
                    self._held.add(number)
                batch = await self._draw(number, version)
                number += 1
            self._inbox.put(batch)

    async def _draw(self, number: int, version: int) -> Batch | None:
        """One leased batch; None if its payload is lost and the draw was given up."""
        while True:
            reply = await self._replay.draw(number, version)
            self._wishes = reply.wishes
            if reply.groups:
                self._undrawn = GeneratedStats()
                break
            self._undrawn = reply.generated
            if reply.wishes:
                self._on_wishes()
                await asyncio.sleep(_WISH_PAUSE_S)
        drawn_s = self._clock()
        try:
            groups = await self._fetch_all(reply)
        except RemoteError as error:
            if error.code != ErrorCode.NOT_FOUND:
                raise
            logger.warning("draw %d is given up: %s", number, error)
            self._carried = add_stats(self._carried, reply.generated)
            self._held.discard(number)
            async with self._heartbeat_lock:  # releases the lease at once
                await self._replay.heartbeat(sorted(self._held), self._status())
            return None
        generated = add_stats(self._carried, reply.generated)
        self._carried = GeneratedStats()
        return Batch(number, version, reply.groups, groups, generated, drawn_s)

    async def _fetch_all(self, reply: DrawReply) -> list[RolloutGroup]:
        jobs = [self._replay.fetch(group.group_id, group.attempt) for group in reply.groups]
        results = await asyncio.gather(*jobs, return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result
        groups = [result for result in results if isinstance(result, RolloutGroup)]
        for leased, group in zip(reply.groups, groups, strict=True):
            if (leased.group_id, leased.attempt) != (group.group_id, group.attempt):
                raise PeerError(
                    f"asked for group {leased.group_id}/{leased.attempt}, "
                    f"got {group.group_id}/{group.attempt}"
                )
        return groups


_ADVICE = {
    DropReason.NO_SIGNAL: "every completion of such a group got the same reward: look at "
    "task.reward, task.unparseable_reward and generation.max_new_tokens",
    DropReason.REWARD_FAILED: "completions got no reward: look at the last error of the "
    "generators, task.reward and task.unparseable_reward",
    DropReason.GENERATION_FAILED: "requests failed too often: look at the last error of the "
    "generators",
    DropReason.STALE: "look at staleness.max_staleness, and at the length of completions",
    DropReason.INVALID: "the replay server refused them: look at the logs of the generators",
}


def dropped_text(stats: GeneratedStats) -> str:
    """What became of groups that ended untrained, and where to look; empty if none did.

    Example: `412 of 412 groups ended as no_signal, mean reward 0.000: every completion of ...`
    """
    if not stats.dropped:
        return ""
    # a group that ends without figures (its reward failed) is in no total but `dropped`
    counted = sum(n for reason, n in stats.dropped.items() if stats.dropped_completions.get(reason))
    num_ended = sum(stats.dropped.values()) + max(0, stats.num_groups - counted)
    parts = []
    for reason, num_groups in sorted(stats.dropped.items(), key=lambda item: -item[1]):
        part = f"{num_groups} of {num_ended} groups ended as {reason.value}"
        if num_completions := stats.dropped_completions.get(reason):
            mean = stats.dropped_rewards.get(reason, 0.0) / num_completions
            part += f", mean reward {mean:.3f}"
        parts.append(f"{part}: {_ADVICE[reason]}")
    return "; ".join(parts)


def add_stats(first: GeneratedStats, second: GeneratedStats) -> GeneratedStats:
    """Both together."""

    def total(one: dict[_Reason, _Number], other: dict[_Reason, _Number]) -> dict[_Reason, _Number]:
        return {reason: one.get(reason, 0) + other.get(reason, 0) for reason in {*one, *other}}

    return GeneratedStats(
        num_groups=first.num_groups + second.num_groups,
        num_completions=first.num_completions + second.num_completions,
        num_tokens=first.num_tokens + second.num_tokens,
        reward_sum=first.reward_sum + second.reward_sum,
        dropped=total(first.dropped, second.dropped),
        dropped_completions=total(first.dropped_completions, second.dropped_completions),
        dropped_tokens=total(first.dropped_tokens, second.dropped_tokens),
        dropped_rewards=total(first.dropped_rewards, second.dropped_rewards),
        reissued_tokens=total(first.reissued_tokens, second.reissued_tokens),
    )
