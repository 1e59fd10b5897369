"""A generator's client of the replay server: claims tickets, delivers groups, follows updates."""

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from async_grpo.config.schema import Config
from async_grpo.errors import CodecError, RpcTimeout
from async_grpo.replay.role_client import RoleClient
from async_grpo.replay_api.base import Ok
from async_grpo.replay_api.generator import (
    Claim,
    ClaimReply,
    Credit,
    CreditReply,
    End,
    EndReply,
    EnginePhase,
    Evaluated,
    GeneratorHeartbeat,
    Insert,
    InsertReply,
    Watch,
    WatchReply,
)
from async_grpo.replay_api.peers import HelloReply
from async_grpo.replay_parts import (
    CellPhase,
    Dataset,
    EndStats,
    EngineStatus,
    Role,
    RoleStatus,
    UpdateReport,
)
from async_grpo.transport.codec import GroupLimits, encode_group, inspect_group, num_bytes
from async_grpo.transport.group_header import Frame
from async_grpo.types import DropReason, InsertOutcome, RolloutGroup, Ticket, WeightsName

logger = logging.getLogger(__name__)


class GeneratorClient(RoleClient):
    """`interfaces.GeneratorReplay` over the wire."""

    def __init__(self, config: Config, *, name: str, dataset: Dataset) -> None:
        super().__init__(config, Role.GENERATOR, name, dataset)
        self._claiming = asyncio.Lock()
        self._claim_number = 1
        self._budget = ByteBudget()
        self._limits = GroupLimits(
            max_bytes=config.replay.max_group_bytes,
            max_completions=config.generation.group_size,
            max_tokens=config.generation.max_new_tokens,
        )

    async def connect(self) -> HelloReply:
        """Say hello; waits for a server that is not there yet; see the base class."""
        welcome = await super().connect()
        self._budget.limit = min(welcome.credit_bytes, self._config.replay.credit_bytes)
        return welcome

    async def claim(self) -> Ticket | None:
        """A ticket, or None when none may be handed out within one long poll.

        One claim is under way at a time. A cancelled one is repeated by the next call, under the
        same number, so its ticket is not lost.
        """
        async with self._claiming:
            claim = Claim(number=self._claim_number, wait_s=self._poll_s)
            reply = await self._control.ask(claim, ClaimReply)
            self._claim_number += 1
            return reply.ticket

    async def insert(self, group: RolloutGroup) -> InsertOutcome:
        """Deliver a group: waits for room, sends, returns the acknowledged outcome.

        A group that the server would refuse is not sent: its ticket ends as invalid.
        """
        try:
            frames = encode_group(group)
            inspect_group(frames, self._limits)
        except CodecError as error:
            return await self._end_invalid(group, str(error))
        return await self.insert_frames(group, frames)

    async def insert_frames(self, group: RolloutGroup, frames: Sequence[Frame]) -> InsertOutcome:
        """Deliver a group that is encoded already; see `insert`."""
        size = num_bytes(frames)
        insert = Insert(group_id=group.group_id, attempt=group.attempt)
        while await self._granted(group, size):
            async with self._budget.spend(size):
                reply = await self._bulk().ask(insert, InsertReply, payload=frames)
            if reply.detail:
                logger.warning(
                    "group %d, attempt %d: %s: %s",
                    group.group_id, group.attempt, reply.outcome, reply.detail,
                )  # fmt: skip
            if reply.outcome is not InsertOutcome.FULL:
                return reply.outcome
        return InsertOutcome.FENCED

    async def end(self, ticket: Ticket, reason: DropReason, detail: str, stats: EndStats) -> None:
        """The attempt ends without an insert."""
        end = End(
            group_id=ticket.group_id,
            attempt=ticket.attempt,
            reason=reason,
            detail=detail[:500],
            stats=stats,
        )
        await self._control.ask(end, EndReply)

    async def evaluated(
        self, ticket: Ticket, stats: EndStats, weights_tokens: list[tuple[WeightsName, int]]
    ) -> None:
        """An eval ticket was sampled and scored."""
        evaluated = Evaluated(
            group_id=ticket.group_id,
            attempt=ticket.attempt,
            stats=stats,
            weights_tokens=weights_tokens,
        )
        await self._control.ask(evaluated, EndReply)

    async def watch(self, seen: int) -> WatchReply:
        """What changed since revision `seen`; at the latest after one long poll."""
        return await self._control.ask(Watch(seen=seen, wait_s=self._poll_s), WatchReply)

    async def report_phase(
        self,
        publish_sequence: int,
        cell_id: int,
        engine_id: str,
        phase: CellPhase,
        detail: str,
        report: UpdateReport | None = None,
    ) -> None:
        """An engine reached a phase of an update."""
        reached = EnginePhase(
            publish_sequence=publish_sequence,
            cell_id=cell_id,
            engine_id=engine_id,
            phase=phase,
            detail=detail[:500],
            report=report,
        )
        await self._control.ask(reached, Ok)

    async def heartbeat(
        self, engines: list[EngineStatus], claims: list[tuple[int, int]], status: RoleStatus
    ) -> None:
        """I live."""
        beat = GeneratorHeartbeat(engines=engines, claims=claims, status=status)
        await self._control.ask(beat, Ok)

    async def _granted(self, group: RolloutGroup, size: int) -> bool:
        """Wait for room in the buffer; False: the attempt is over."""
        credit = Credit(
            group_id=group.group_id, attempt=group.attempt, num_bytes=size, wait_s=self._poll_s
        )
        waited_s = self._config.run.no_progress_timeout_s
        deadline = asyncio.get_running_loop().time() + waited_s
        while asyncio.get_running_loop().time() < deadline:
            reply = await self._control.ask(credit, CreditReply)
            if reply.granted or reply.fenced:
                return not reply.fenced
        raise RpcTimeout(self._control.peer, "Credit (room for a group)", waited_s)

    async def _end_invalid(self, group: RolloutGroup, why: str) -> InsertOutcome:
        logger.error("group %d, attempt %d is invalid: %s", group.group_id, group.attempt, why)
        rewards = [rollout.reward for rollout in group.rollouts]
        stats = EndStats(
            num_completions=len(group.rollouts),
            num_tokens=group.num_tokens,
            reward_sum=math.fsum(reward for reward in rewards if math.isfinite(reward)),
        )
        ticket = Ticket(group.group_id, group.attempt, group.prompt_index, group.kind)
        await self.end(ticket, DropReason.INVALID, why, stats)
        return InsertOutcome.INVALID


class ByteBudget:
    """Bytes that may be unanswered at a time; one message alone always may."""

    def __init__(self) -> None:
        self.limit = 0
        self._spent = 0
        self._freed = asyncio.Condition()

    @asynccontextmanager
    async def spend(self, size: int) -> AsyncIterator[None]:
        """Wait for others' messages to be answered; each of them has a deadline."""
        async with self._freed:
            await self._freed.wait_for(lambda: not self._spent or self._spent + size <= self.limit)
            self._spent += size
        try:
            yield
        finally:
            self._spent -= size
            async with self._freed:
                self._freed.notify_all()
