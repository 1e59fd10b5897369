"""The replay server's part in weight updates, for one engine with both its ends in this process.

    publisher: announce -> open_cell -> wait_cell(begun) ... wait_cell(committed)
    driver:                orders    -> report_phase(begun) -> orders that say go -> committed

Every wait ends with a report of the driver, at the latest at the publisher's deadline. Knows no
weights, no transport and no check.
"""

import asyncio
from collections.abc import Callable

import msgspec

from async_grpo.generation.engines import Engine
from async_grpo.replay_api.publishing import AnnounceReply, WaitCellReply
from async_grpo.replay_parts import (
    BucketSpec,
    Cell,
    CellEngine,
    CellPhase,
    Probe,
    Rendezvous,
    UpdateOrder,
    UpdateReport,
    WeightFiles,
)
from async_grpo.types import WeightsName

_RANK = 1
"""The engine's first, behind the trainer's."""


class Matchmaker:
    """`interfaces.PublishReplay` for a publisher and `UpdateReports` for a driver.

    Args:
        engine: that gets the weights.

    Attributes:
        on_orders: where orders go; set it before an announcement.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.on_orders: Callable[[list[UpdateOrder]], None] = lambda _: None
        self._sequence = 0
        self._order: UpdateOrder | None = None
        self._phase, self._detail = CellPhase.ANNOUNCED, ""
        self._report: UpdateReport | None = None
        self._changed = asyncio.Condition()

    async def announce(
        self,
        number: int,
        weights: WeightsName,
        *,
        wished_only: bool,
        plan_hash: str,
        buckets: list[BucketSpec],
        probe: Probe,
        digests: dict[str, int],
        files: WeightFiles | None = None,
    ) -> AnnounceReply:
        """One cell, of the one engine."""
        self._sequence += 1
        self._phase, self._detail, self._report = CellPhase.ANNOUNCED, "", None
        self._order = UpdateOrder(
            publish_sequence=self._sequence,
            weights=weights,
            cell_id=0,
            engine_ids=[self._engine.engine_id],
            ranks=[_RANK],
            buckets=buckets,
            probe=probe,
            digests=digests,
            files=files,
        )
        self._show()
        member = CellEngine(
            engine_id=self._engine.engine_id,
            generator="doctor",
            tp_size=self._engine.info.tp_size,
            rank_offset=_RANK,
        )
        cell = Cell(cell_id=0, engines=[member])
        return AnnounceReply(publish_sequence=self._sequence, cells=[cell])

    async def open_cell(self, publish_sequence: int, cell_id: int, rendezvous: Rendezvous) -> None:
        """The publisher listens."""
        self._change(rendezvous=rendezvous, go=self._phase is CellPhase.BEGUN)

    async def abort_cell(self, publish_sequence: int, cell_id: int, reason: str) -> None:
        """It will send nothing."""
        self._change(aborted=reason)

    async def wait_cell(
        self, publish_sequence: int, cell_id: int, phase: CellPhase, *, timeout_s: float
    ) -> WaitCellReply:
        """How far the engine is, once it is at `phase` or has failed, or at the deadline."""
        try:
            async with asyncio.timeout(timeout_s), self._changed:
                await self._changed.wait_for(lambda: self._phase.has_reached(phase))
        except TimeoutError:
            self._detail = self._detail or f"no word of it for {timeout_s:g} s"
        engine_id = self._engine.engine_id
        return WaitCellReply(
            phases={engine_id: self._phase},
            details={engine_id: self._detail},
            reports={} if self._report is None else {engine_id: self._report},
        )

    async def report_phase(
        self,
        publish_sequence: int,
        cell_id: int,
        engine_id: str,
        phase: CellPhase,
        detail: str,
        report: UpdateReport | None = None,
    ) -> None:
        """The driver says how far it is."""
        self._phase, self._detail, self._report = phase, detail, report
        if phase is CellPhase.BEGUN and self._order is not None and self._order.rendezvous:
            self._change(go=True)
        async with self._changed:
            self._changed.notify_all()

    def end(self) -> None:
        """The update is over, whatever came of it."""
        self._order = None
        self._show()

    def _change(self, **changes: object) -> None:
        assert self._order is not None, "an order is changed after it was announced"
        self._order = msgspec.structs.replace(self._order, **changes)
        self._show()

    def _show(self) -> None:
        self.on_orders([] if self._order is None else [self._order])
