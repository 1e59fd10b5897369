"""Weight updates of this generator's engines: from the order to the commit.

The replay server shows unfinished orders as state, again and again. Each (order, engine) runs once,
in a task of its own, so that one stuck engine holds up nobody else. Waits:

    for `go` (the trainer listens and every engine of the cell has begun): ended by the order, by
        its abort or disappearance, at the latest after weights.timeout_s
    for the engine: every call of the receiver has its deadline

An update that ends before `go` leaves the engine as it was. One that fails later leaves weights
that nobody knows: the engine is condemned, and its slot kills or quarantines it.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

from async_grpo.errors import RemoteError, WeightSyncError
from async_grpo.generation.engines import Engine
from async_grpo.interfaces import GeneratorReplay
from async_grpo.replay_parts import CellPhase, UpdateOrder
from async_grpo.weights.receiver import WeightReceiver

logger = logging.getLogger(__name__)

Key = tuple[int, int]
"""(publish_sequence, cell_id)"""
Spawn = Callable[[Coroutine[Any, Any, None]], object]


class _NotSent(Exception):  # noqa: N818 -- an outcome: the engine keeps its weights
    """The update ended before anything was sent."""


class WeightDriver:
    """Carries out update orders. One event loop owns it.

    Args:
        replay: takes reports.
        engines: the engines that exist at the moment.
        spawn: starts a task whose failure ends the generator.
        timeout_s: `weights.timeout_s`.
    """

    def __init__(
        self,
        replay: GeneratorReplay,
        engines: Callable[[], Iterable[Engine]],
        spawn: Spawn,
        *,
        timeout_s: float,
    ) -> None:
        self._replay = replay
        self._engines = engines
        self._spawn = spawn
        self._timeout_s = timeout_s
        self._orders: dict[Key, UpdateOrder] = {}
        self._seen: set[tuple[Key, str]] = set()
        self._news = asyncio.Event()
        self.last_error = ""

    def on_orders(self, orders: list[UpdateOrder]) -> None:
        """The unfinished orders as the server sees them now."""
        self._orders = {(order.publish_sequence, order.cell_id): order for order in orders}
        self._seen = {(key, engine_id) for key, engine_id in self._seen if key in self._orders}
        self._news.set()
        self._news = asyncio.Event()
        engines = {engine.engine_id: engine for engine in self._engines()}
        for key, order in self._orders.items():
            for engine_id, rank in zip(order.engine_ids, order.ranks, strict=True):
                if (key, engine_id) in self._seen:
                    continue
                self._seen.add((key, engine_id))
                engine = engines.get(engine_id)
                if engine is None:
                    self._spawn(self._report(key, engine_id, CellPhase.FAILED, "engine has ended"))
                else:
                    self._spawn(self._update(engine, key, order, rank))

    async def _update(self, engine: Engine, key: Key, order: UpdateOrder, rank: int) -> None:
        receiver = WeightReceiver(
            engine.client,
            engine_id=engine.engine_id,
            order=order,
            rank_offset=rank,
            timeout_s=self._timeout_s,
        )
        async with engine.update_lock:
            engine.begin_update()
            try:
                await self._before_go(receiver, engine, key)
                checksum = await self._after_go(receiver, engine, key)
            except _NotSent as end:
                engine.keep_weights()
                await self._report(key, engine.engine_id, CellPhase.FAILED, str(end))
                return
            except WeightSyncError as error:
                self.last_error = str(error)
                logger.warning("%s", error)
                engine.condemn(str(error))
                await self._report(key, engine.engine_id, CellPhase.FAILED, str(error))
                return
            except asyncio.CancelledError:
                engine.condemn("the generator stops in the middle of an update")
                raise
            engine.commit(order.weights, order.publish_sequence, checksum)
        logger.info("engine %s serves %s", engine.engine_id, order.weights)
        await self._report(key, engine.engine_id, CellPhase.COMMITTED, "")

    async def _before_go(self, receiver: WeightReceiver, engine: Engine, key: Key) -> None:
        """Until the buckets may be posted.

        Raises:
            _NotSent: they will not come.
            WeightSyncError: the engine cannot go on.
        """
        await receiver.begin()
        await self._report(key, engine.engine_id, CellPhase.BEGUN, "")
        problem = await self._wait_go(engine, key)
        if problem:
            await receiver.abandon()
            raise _NotSent(problem)

    async def _after_go(self, receiver: WeightReceiver, engine: Engine, key: Key) -> str:
        """Until the probe has passed; returns the engine's checksum."""
        rendezvous = self._orders[key].rendezvous
        assert rendezvous is not None, "an order that says go has a rendezvous"
        previous_group, engine.update_group = engine.update_group, rendezvous.group_name
        await self._unless_aborted(key, engine, receiver.receive(rendezvous, previous_group))
        checksum = await receiver.finish()
        engine.start_probation()
        await receiver.resume()
        await receiver.probe()
        # last, with nothing awaited until the commit: of two that differ one must see the other
        self._compare_checksums(key, engine, checksum)
        return checksum

    async def _wait_go(self, engine: Engine, key: Key) -> str:
        """Wait for the order to say go; returns why it never will, or an empty string."""
        ended = asyncio.create_task(engine.condemned())
        try:
            async with asyncio.timeout(self._timeout_s):
                while True:
                    order = self._orders.get(key)
                    if order is None:
                        return "the order disappeared"
                    if order.aborted:
                        return order.aborted
                    if order.go and order.rendezvous is not None:
                        return ""
                    await self._news_or(ended)
                    if ended.done():
                        return f"the engine ended: {ended.result()}"
        except TimeoutError:
            return f"the trainer did not say go within {self._timeout_s:g} s"
        finally:
            ended.cancel()

    async def _unless_aborted(
        self, key: Key, engine: Engine, work: Coroutine[Any, Any, None]
    ) -> None:
        """`work`, given up when the trainer says that it will send nothing more."""
        receiving = asyncio.create_task(work)
        try:
            while not receiving.done():
                order = self._orders.get(key)
                if order is not None and order.aborted:
                    raise WeightSyncError(
                        engine.engine_id, str(order.weights), "receive", order.aborted
                    )
                await self._news_or(receiving)
        finally:
            receiving.cancel()
        await receiving

    async def _news_or(self, other: asyncio.Task[Any]) -> None:
        """Wait until the orders change or `other` is done."""
        news = asyncio.create_task(self._news.wait())
        try:
            await asyncio.wait([news, other], return_when=asyncio.FIRST_COMPLETED)
        finally:
            news.cancel()

    def _compare_checksums(self, key: Key, engine: Engine, checksum: str) -> None:
        """Engines that committed the same publish must hold the same bytes."""
        publish_sequence = key[0]
        for other in self._engines():
            if (
                other is not engine
                and other.status.publish_sequence == publish_sequence
                and other.info.tp_size == engine.info.tp_size
                and other.checksum != checksum
            ):
                raise WeightSyncError(
                    engine.engine_id,
                    str(other.weights),
                    "checksum",
                    f"differs from that of engine {other.engine_id}, whose probe passed",
                )

    async def _report(self, key: Key, engine_id: str, phase: CellPhase, detail: str) -> None:
        """Tell the server; it may have forgotten the order, and that is its business."""
        try:
            await self._replay.report_phase(*key, engine_id, phase, detail)
        except RemoteError as error:
            logger.warning("report %s of engine %s: %s", phase.value, engine_id, error)
