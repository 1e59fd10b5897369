"""Weight updates of this generator's engines: from the order to the commit.

The replay server shows unfinished orders as state, again and again. Each (order, engine) runs once,
in a task of its own, so that one stuck engine holds up nobody else. Waits:

    for files, where weights travel as such: weights.timeout_s; requests go on meanwhile
    for `go` (the trainer listens and every engine of the cell has begun): ended by the order, by
        its abort or disappearance, at the latest after weights.timeout_s
    for the engine: every call of the receiver has its deadline

An update that ends before anything was sent leaves the engine as it was, also when the cell could
not meet. One that fails later leaves weights that nobody knows: the engine is condemned, and its
slot kills or quarantines it. Each engine is judged by its own answers, whatever became of the rest
of its cell.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Iterable
from pathlib import Path
from typing import Any

from async_grpo.config.generation import OnWeightUpdate
from async_grpo.config.policy import DType
from async_grpo.config.weights import WeightsSection
from async_grpo.engine_api import PauseMode
from async_grpo.errors import GenerationError, RemoteError, WeightSyncError
from async_grpo.generation.engines import Engine, UpdateKind
from async_grpo.generation.update_modes import choose_mode, kv_tokens
from async_grpo.generation.update_under_way import Key, Laps, NotSent, Update
from async_grpo.interfaces import Clock, UpdateReports
from async_grpo.replay_parts import CellPhase, Rendezvous, UpdateOrder, UpdateReport
from async_grpo.weights.arrival import Arrivals
from async_grpo.weights.fetch import WeightFetcher
from async_grpo.weights.receiver import WeightReceiver, was_refused

logger = logging.getLogger(__name__)

_PROBE_MARGIN = 6
"""Positions of its context that SGLang wants besides a prompt."""

Spawn = Callable[[Coroutine[Any, Any, None]], object]

ABORT_GRACE_S = 5.0
"""After an abort, for an engine that waits in a collective to notice by itself and answer: then it
is known what it holds. A dead trainer's sockets tell it at once; nccl tells it nothing."""


class WeightDriver:
    """Carries out update orders. One event loop owns it.

    Args:
        replay: takes reports.
        engines: the engines that exist at the moment.
        spawn: starts a task whose failure ends the generator.
        settings: section `weights`.
        on_weight_update: what becomes of requests in flight.
        dtype: of the policy.
        clock: seconds between updates, and of recomputing.
    """

    def __init__(
        self,
        replay: UpdateReports,
        engines: Callable[[], Iterable[Engine]],
        spawn: Spawn,
        settings: WeightsSection,
        *,
        on_weight_update: OnWeightUpdate,
        dtype: DType,
        clock: Clock = time.monotonic,
    ) -> None:
        self._on_weight_update = on_weight_update
        self._clock = clock
        self._replay = replay
        self._engines = engines
        self._spawn = spawn
        self._timeout_s = settings.timeout_s
        self._check_names = settings.check_names
        self._arrivals = Arrivals(dtype, fatal=settings.check_arrival)
        self._names_checked: set[str] = set()
        self._fetcher = WeightFetcher(settings.download_directory, settings.timeout_s)
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

    def close(self) -> None:
        """Delete what was fetched."""
        self._fetcher.close()

    async def _update(self, engine: Engine, key: Key, order: UpdateOrder, rank: int) -> None:
        async with engine.update_lock:
            try:
                update = await self._prepare(engine, order, rank)
                if update.directory is not None:
                    await self._load_files(update, update.directory)
                else:
                    await self._take_buckets(update)
                report = await self._prove(update)
            except NotSent as end:
                self.last_error = f"{engine.engine_id} keeps its weights: {end}"
                logger.warning("%s", self.last_error)
                engine.keep_weights()
                await self._report(key, engine.engine_id, CellPhase.FAILED, str(end))
                return
            except WeightSyncError as error:
                self.last_error = str(error)
                logger.warning("%s", error)
                engine.failed_update = _kind(order)
                engine.condemn(str(error))
                await self._report(key, engine.engine_id, CellPhase.FAILED, str(error))
                return
            except asyncio.CancelledError:
                engine.condemn("the generator stops in the middle of an update")
                raise
            engine.updated_s = self._clock()
            engine.commit(order.weights, order.publish_sequence, report.checksum, _kind(order))
        logger.info("engine %s serves %s (%s)", engine.engine_id, order.weights, update.mode.value)
        await self._report(key, engine.engine_id, CellPhase.COMMITTED, "", report)

    async def _prepare(self, engine: Engine, order: UpdateOrder, rank: int) -> Update:
        """What can be done while requests go on; then no more are sent to the engine.

        Raises:
            NotSent: there are no files to load.
            WeightSyncError: the server does not have these tensors.
        """
        directory = None
        if order.files is not None:
            try:
                directory = await self._fetcher.get(order.weights, order.files)
            except WeightSyncError as error:
                logger.warning("%s", error)
                raise NotSent(str(error)) from error
            if problem := self._given_up((order.publish_sequence, order.cell_id)):
                raise NotSent(problem)
        num_tokens = await self._num_kv_tokens(engine)
        mode = self._choose_mode(engine, num_tokens)
        receiver = WeightReceiver(
            engine.client,
            engine_id=engine.engine_id,
            order=order,
            rank_offset=rank,
            mode=mode,
            served_name=engine.names.served(order.weights),
            timeout_s=self._timeout_s,
        )
        await self._check_names_once(engine, order, receiver)
        engine.begin_update(order.weights)
        return Update(engine, order, receiver, mode, num_tokens, directory, Laps(self._clock))

    async def _check_names_once(
        self, engine: Engine, order: UpdateOrder, receiver: WeightReceiver
    ) -> None:
        """Of each life of a server that would ignore what it does not know."""
        known = engine.engine_id in self._names_checked or engine.info.engine == "embedded"
        if order.files is None and self._check_names and not known:
            await receiver.check_names()
            self._names_checked.add(engine.engine_id)

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

    async def _load_files(self, update: Update, directory: Path) -> None:
        """Everything between the pause and the proof, from files."""
        await update.receiver.begin()
        update.laps.lap("begin")
        await update.receiver.load(directory)
        update.laps.lap("receive")

    async def _take_buckets(self, update: Update) -> None:
        """Everything between the pause and the proof, from the update group.

        Raises:
            NotSent: nothing was sent.
            WeightSyncError: the engine cannot go on.
        """
        engine, receiver, key = update.engine, update.receiver, update.key
        await receiver.begin()
        await self._report(key, engine.engine_id, CellPhase.BEGUN, "")
        update.laps.lap("begin")
        if problem := await self._wait_go(engine, key):
            await receiver.abandon()
            raise NotSent(problem)
        update.laps.lap("go")
        rendezvous = self._orders[key].rendezvous
        assert rendezvous is not None, "an order that says go has a rendezvous"
        await self._join(update, rendezvous)
        await self._unless_aborted(update, receiver.receive(rendezvous))
        update.laps.lap("receive")

    async def _join(self, update: Update, rendezvous: Rendezvous) -> None:
        """Meet the cell; when it does not come together, the engine is as it was."""
        engine, receiver = update.engine, update.receiver
        previous_group, engine.update_group = engine.update_group, rendezvous.group_name
        try:
            await self._unless_aborted(update, receiver.join(rendezvous, previous_group))
        except WeightSyncError as error:
            if not was_refused(error):
                raise  # it may still wait in the rendezvous
            engine.update_group = ""
            await receiver.abandon()
            raise NotSent(str(error)) from error

    async def _prove(self, update: Update) -> UpdateReport:
        """Until the probe has passed."""
        engine, receiver, laps = update.engine, update.receiver, update.laps
        received = await receiver.finish()
        laps.lap("verify")
        engine.names.received(update.order.weights, kv_kept=received.kv_kept)
        await receiver.resume()
        resumed_s = self._clock()
        room = engine.info.context_length
        gap = await receiver.probe(None if room is None else room - _PROBE_MARGIN)
        if update.mode is PauseMode.RETRACT and update.num_kv_tokens is not None:
            # the probe queues behind the requests that are read again
            engine.recompute_cost.measured(update.num_kv_tokens, self._clock() - resumed_s)
        laps.lap("probe")
        # last, with nothing awaited until the commit: of two that differ one must see the other
        alarms: list[str] = []
        if received.checksums is not None:
            alarms = self._arrivals.check(
                engine.engine_id, engine.info, update.order, received.checksums
            )
        return UpdateReport(
            checksum="" if received.checksums is None else received.checksums.total,
            alarms=alarms,
            probe_gap=gap.mean,
            probe_gap_max=gap.largest,
            seconds=laps.seconds,
        )

    async def _wait_go(self, engine: Engine, key: Key) -> str:
        """Wait for the order to say go; returns why it never will, or an empty string."""
        ended = asyncio.create_task(engine.condemned())
        try:
            async with asyncio.timeout(self._timeout_s):
                while True:
                    if problem := self._given_up(key):
                        return problem
                    order = self._orders[key]
                    if order.go and order.rendezvous is not None:
                        return ""
                    await self._news_or(ended)
                    if ended.done():
                        return f"the engine ended: {ended.result()}"
        except TimeoutError:
            return f"the trainer did not say go within {self._timeout_s:g} s (weights.timeout_s)"
        finally:
            ended.cancel()

    def _given_up(self, key: Key) -> str:
        """Why nothing will be sent for an order; empty: it stands."""
        order = self._orders.get(key)
        return "the order disappeared" if order is None else order.aborted

    async def _unless_aborted(self, update: Update, work: Coroutine[Any, Any, None]) -> None:
        """`work`; after an abort it has `ABORT_GRACE_S` to end by itself."""
        key = update.key
        receiving = asyncio.create_task(work)
        try:
            while not receiving.done():
                order = self._orders.get(key)
                if order is not None and order.aborted:
                    await asyncio.wait([receiving], timeout=ABORT_GRACE_S)
                    if receiving.done():
                        break
                    raise WeightSyncError(
                        update.engine.engine_id, str(order.weights), "receive", order.aborted
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

    async def _report(
        self,
        key: Key,
        engine_id: str,
        phase: CellPhase,
        detail: str,
        report: UpdateReport | None = None,
    ) -> None:
        """Tell the server; it may have forgotten the order, and that is its business."""
        try:
            await self._replay.report_phase(*key, engine_id, phase, detail, report)
        except RemoteError as error:
            logger.warning("report %s of engine %s: %s", phase.value, engine_id, error)


def _kind(order: UpdateOrder) -> UpdateKind:
    return UpdateKind.BROADCAST if order.files is None else UpdateKind.FILES
