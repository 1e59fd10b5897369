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
import time
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

from async_grpo.config.generation import OnWeightUpdate
from async_grpo.engine_api import PauseMode
from async_grpo.errors import GenerationError, RemoteError, WeightSyncError
from async_grpo.generation.engines import Engine
from async_grpo.generation.update_modes import choose_mode, kv_tokens
from async_grpo.interfaces import Clock, GeneratorReplay
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
        on_weight_update: what becomes of requests in flight.
        timeout_s: `weights.timeout_s`.
        clock: seconds between updates, and of recomputing.
    """

    def __init__(
        self,
        replay: GeneratorReplay,
        engines: Callable[[], Iterable[Engine]],
        spawn: Spawn,
        *,
        on_weight_update: OnWeightUpdate,
        timeout_s: float,
        clock: Clock = time.monotonic,
    ) -> None:
        self._on_weight_update = on_weight_update
        self._clock = clock
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
        async with engine.update_lock:
            engine.begin_update()
            try:
                num_tokens = await self._num_kv_tokens(engine)
                mode = self._choose_mode(engine, num_tokens)
                receiver = WeightReceiver(
                    engine.client,
                    engine_id=engine.engine_id,
                    order=order,
                    rank_offset=rank,
                    mode=mode,
                    timeout_s=self._timeout_s,
                )
                await self._before_go(receiver, engine, key)
                checksum = await self._after_go(receiver, engine, order, mode, num_tokens)
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
            engine.updated_s = self._clock()
            engine.commit(order.weights, order.publish_sequence, checksum)
        logger.info("engine %s serves %s (%s)", engine.engine_id, order.weights, mode.value)
        await self._report(key, engine.engine_id, CellPhase.COMMITTED, "")

    async def _num_kv_tokens(self, engine: Engine) -> int | None:
        """KV entries in use; None: not needed, or the engine does not say."""
        if self._on_weight_update is not OnWeightUpdate.auto:
            return None
        try:
            return kv_tokens(await engine.client.load())
        except GenerationError as error:
            logger.info("engine %s does not tell its load: %s", engine.engine_id, error)
            return None

    def _choose_mode(self, engine: Engine, num_kv_tokens: int | None) -> PauseMode:
        return choose_mode(
            self._on_weight_update,
            info=engine.info,
            cost=engine.recompute_cost,
            num_kv_tokens=num_kv_tokens,
            interval_s=None if engine.updated_s is None else self._clock() - engine.updated_s,
        )

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

    async def _after_go(
        self,
        receiver: WeightReceiver,
        engine: Engine,
        order: UpdateOrder,
        mode: PauseMode,
        num_kv_tokens: int | None,
    ) -> str:
        """Until the probe has passed; returns the engine's checksum."""
        key = (order.publish_sequence, order.cell_id)
        rendezvous = self._orders[key].rendezvous
        assert rendezvous is not None, "an order that says go has a rendezvous"
        previous_group, engine.update_group = engine.update_group, rendezvous.group_name
        await self._unless_aborted(key, engine, receiver.receive(rendezvous, previous_group))
        received = await receiver.finish()
        engine.start_probation(order.weights, kv_kept=received.kv_kept)
        await receiver.resume()
        resumed_s = self._clock()
        await receiver.probe()
        if mode is PauseMode.RETRACT and num_kv_tokens is not None:
            # the probe queues behind the requests that are read again
            engine.recompute_cost.measured(num_kv_tokens, self._clock() - resumed_s)
        # last, with nothing awaited until the commit: of two that differ one must see the other
        self._compare_checksums(key, engine, received.checksum)
        return received.checksum

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
