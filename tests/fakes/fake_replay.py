"""A replay server as a generator sees it, without a wire: tickets from a list, everything recorded.

replay = FakeReplay()
replay.add_tickets(3)
...                                       # a generator runs against it
order = await replay.publish("1.1", engine_ids)      # a whole update, as the trainer does it
await replay.until(lambda: len(replay.inserted) == 3)
"""

import asyncio
import contextlib
import zlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from async_grpo.replay_api.generator import WatchReply
from async_grpo.replay_parts import (
    BucketSpec,
    CellPhase,
    EndStats,
    EngineStatus,
    Probe,
    Rendezvous,
    RoleStatus,
    UpdateOrder,
    UpdateReport,
)
from async_grpo.types import DropReason, InsertOutcome, RolloutGroup, Ticket, WeightsName
from tests.fakes.fake_engine import fake_probe

POLL_S = 0.2


@dataclass
class Ended:
    ticket: Ticket
    reason: DropReason
    detail: str
    stats: EndStats


class FakeReplay:
    """`interfaces.GeneratorReplay`; event-loop thread only."""

    def __init__(self) -> None:
        self.tickets: deque[Ticket] = deque()
        self.claimed: list[Ticket] = []
        self.inserted: list[RolloutGroup] = []
        self.ended: list[Ended] = []
        self.evaluated_tickets: list[tuple[Ticket, EndStats, list[tuple[WeightsName, int]]]] = []
        self.phases: list[tuple[int, str, CellPhase, str]] = []
        self.reports: dict[tuple[int, str], UpdateReport] = {}
        self.engines: list[EngineStatus] = []
        self.claims: list[tuple[int, int]] = []
        self.status: RoleStatus | None = None
        self.insert_outcome = InsertOutcome.STORED
        self.room = asyncio.Event()
        self.room.set()
        self._orders: dict[int, UpdateOrder] = {}
        self._cancel: list[tuple[int, int]] = []
        self._stop = ""
        self._revision = 1
        self._publish_sequence = 0
        self._next_group_id = 0
        self._changed = asyncio.Condition()

    # ---- control by the test

    def add_tickets(self, count: int) -> None:
        for _ in range(count):
            self.tickets.append(Ticket(self._next_group_id, 1, prompt_index=self._next_group_id))
            self._next_group_id += 1

    async def until(self, condition: Callable[[], bool], *, timeout_s: float = 20.0) -> None:
        """Wait for something that a call to this fake brings about."""
        async with asyncio.timeout(timeout_s), self._changed:
            await self._changed.wait_for(condition)

    async def wanting(self, count: int = 1) -> list[str]:
        """Wait until so many engines want a sync; their ids."""

        def ids() -> list[str]:
            return [engine.engine_id for engine in self.engines if engine.wants_sync]

        await self.until(lambda: len(ids()) >= count)
        return ids()

    async def order(
        self,
        weights: str,
        engine_ids: list[str],
        *,
        probe: Probe | None = None,
        fresh: bool = True,
        num_buckets: int = 2,
    ) -> int:
        """Announce an update of one cell; its publish_sequence."""
        name = WeightsName.parse(weights)
        assert name is not None
        self._publish_sequence += 1
        bucket = BucketSpec(names=["w"], dtypes=["float32"], shapes=[[2]])
        self._orders[self._publish_sequence] = UpdateOrder(
            publish_sequence=self._publish_sequence,
            weights=name,
            cell_id=0,
            engine_ids=engine_ids,
            ranks=list(range(1, len(engine_ids) + 1)),
            buckets=[bucket] * num_buckets,
            probe=probe or fake_probe(weights),
            digests={"w": zlib.crc32(weights.encode())},
            rendezvous=Rendezvous(
                group_name=f"group-{self._publish_sequence}" if fresh else "group-1",
                host="127.0.0.1",
                port=1,
                world_size=1 + len(engine_ids),
                backend="gloo",
                fresh=fresh,
            ),
        )
        await self.changed()
        return self._publish_sequence

    async def phase_of(self, sequence: int, engine_id: str, *phases: CellPhase) -> CellPhase:
        """Wait until the engine has reported one of `phases`."""

        def reported() -> list[CellPhase]:
            return [
                phase
                for number, engine, phase, _ in self.phases
                if (number, engine) == (sequence, engine_id) and phase in phases
            ]

        await self.until(lambda: bool(reported()))
        return reported()[-1]

    async def go(self, sequence: int) -> None:
        """The trainer listens."""
        order = self._orders[sequence]
        self._orders[sequence] = msgspec.structs.replace(order, go=True)
        await self.changed()

    async def abort(self, sequence: int, reason: str) -> None:
        """The trainer gives the cell up."""
        order = self._orders[sequence]
        self._orders[sequence] = msgspec.structs.replace(order, aborted=reason)
        await self.changed()

    async def publish(
        self, weights: str, engine_ids: list[str], *, probe: Probe | None = None, fresh: bool = True
    ) -> list[CellPhase]:
        """A whole update; how it ended for each engine."""
        sequence = await self.order(weights, engine_ids, probe=probe, fresh=fresh)
        for engine_id in engine_ids:
            await self.phase_of(sequence, engine_id, CellPhase.BEGUN)
        await self.go(sequence)
        ends = [
            await self.phase_of(sequence, engine_id, CellPhase.COMMITTED, CellPhase.FAILED)
            for engine_id in engine_ids
        ]
        del self._orders[sequence]
        await self.changed()
        return ends

    async def cancel(self, *keys: tuple[int, int]) -> None:
        self._cancel = list(keys)
        await self.changed()

    async def stop(self, reason: str) -> None:
        self._stop = reason
        await self.changed()

    async def changed(self) -> None:
        async with self._changed:
            self._revision += 1
            self._changed.notify_all()

    # ---- GeneratorReplay

    async def claim(self) -> Ticket | None:
        try:
            await self.until(lambda: bool(self.tickets), timeout_s=POLL_S)
        except TimeoutError:
            return None
        ticket = self.tickets.popleft()
        self.claimed.append(ticket)
        await self.changed()
        return ticket

    async def insert(self, group: RolloutGroup) -> InsertOutcome:
        await self.room.wait()
        self.inserted.append(group)
        await self.changed()
        return self.insert_outcome

    async def end(self, ticket: Ticket, reason: DropReason, detail: str, stats: EndStats) -> None:
        self.ended.append(Ended(ticket, reason, detail, stats))
        await self.changed()

    async def evaluated(
        self, ticket: Ticket, stats: EndStats, weights_tokens: list[tuple[WeightsName, int]]
    ) -> None:
        self.evaluated_tickets.append((ticket, stats, weights_tokens))
        await self.changed()

    async def watch(self, seen: int) -> WatchReply:
        with contextlib.suppress(TimeoutError):
            await self.until(lambda: self._revision > seen, timeout_s=POLL_S)
        return WatchReply(
            revision=self._revision,
            orders=list(self._orders.values()),
            cancel=self._cancel,
            stop=self._stop,
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
        if report is not None:
            self.reports[publish_sequence, engine_id] = report
        self.phases.append((publish_sequence, engine_id, phase, detail))
        await self.changed()

    async def heartbeat(
        self,
        engines: list[EngineStatus],
        claims: list[tuple[int, int]],
        status: RoleStatus,
    ) -> None:
        self.engines, self.claims, self.status = engines, claims, status
        await self.changed()
