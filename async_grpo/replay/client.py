"""The replay server as each role sees it: `interfaces.GeneratorReplay` and `TrainerReplay`.

Every call may be slow, none may hang: a server that restarts costs a delay, a server that stays
away costs an RpcTimeout after `run.no_progress_timeout_s`. One event loop per client.
"""

import asyncio
import logging
import math
import uuid
from collections.abc import Sequence

from async_grpo.config.schema import Config
from async_grpo.errors import CodecError, PeerLost, RemoteError, RpcTimeout
from async_grpo.replay.role_client import ByteBudget, RoleClient
from async_grpo.replay_api.base import ErrorCode, Ok
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
from async_grpo.replay_api.peers import HelloReply, Stats, StatsReply
from async_grpo.replay_api.publishing import (
    AbortCell,
    Announce,
    AnnounceReply,
    OpenCell,
    WaitCell,
    WaitCellReply,
)
from async_grpo.replay_api.trainer import (
    Ack,
    Draw,
    DrawReply,
    EvaluationsReply,
    Fetch,
    FetchReply,
    Finish,
    SetDepth,
    Settle,
    StartTrainer,
    StartTrainerReply,
    TrainerHeartbeat,
    WaitEvaluations,
)
from async_grpo.replay_parts import (
    BucketSpec,
    CellPhase,
    Dataset,
    EndStats,
    EngineStatus,
    EvalResult,
    Probe,
    Rendezvous,
    Role,
    RoleStatus,
    UpdateReport,
    WeightFiles,
)
from async_grpo.transport.codec import (
    GroupLimits,
    decode_group,
    encode_group,
    inspect_group,
    num_bytes,
)
from async_grpo.transport.group_header import Frame
from async_grpo.types import (
    DropReason,
    InsertOutcome,
    RolloutGroup,
    Ticket,
    WeightsName,
)

logger = logging.getLogger(__name__)

_TRAINER_ALIVE_PAUSE_S = 0.25
_MOST_FETCHES = 16
"""Payloads on their way to one trainer at a time."""


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


class TrainerClient(RoleClient):
    """`interfaces.TrainerReplay` over the wire. `start` comes before all else."""

    def __init__(self, config: Config, *, name: str = "trainer") -> None:
        super().__init__(config, Role.TRAINER, name, None)
        self._incarnation = 0
        self._fetching = asyncio.Semaphore(_MOST_FETCHES)

    async def start(
        self, restored_version: int, restored_incarnation: int = 0
    ) -> StartTrainerReply:
        """Become the run's trainer; waits for a silent predecessor.

        Raises:
            RemoteError: `not_found`: the run cannot go on from that checkpoint.
            PeerLost: another trainer still lives after 1.5 x `replay.peer_timeout_s`.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + 1.5 * self._config.replay.peer_timeout_s
        request = StartTrainer(
            restored_version=restored_version, restored_incarnation=restored_incarnation
        )
        while True:
            try:
                reply = await self._control.ask(request, StartTrainerReply)
            except RemoteError as error:
                if error.code != ErrorCode.TRAINER_ALIVE:
                    raise
                if loop.time() >= deadline:
                    raise PeerLost(f"this run has a trainer already: {error}") from error
                await asyncio.sleep(_TRAINER_ALIVE_PAUSE_S)
            else:
                self._incarnation = reply.incarnation
                return reply

    async def draw(self, draw_number: int, train_version: int) -> DrawReply:
        """Groups, wishes, or neither after one long poll."""
        draw = Draw(
            incarnation=self._incarnation,
            draw_number=draw_number,
            train_version=train_version,
            wait_s=self._poll_s,
        )
        return await self._control.ask(draw, DrawReply)

    async def fetch(self, group_id: int, attempt: int) -> RolloutGroup:
        """Payload of a leased group.

        Raises:
            RemoteError: `not_found`: the server lost it in a restart before it was fetched. Leave
                the draw out of the heartbeat and draw again.
        """
        return decode_group(await self.fetch_frames(group_id, attempt))

    async def fetch_frames(self, group_id: int, attempt: int) -> list[Frame]:
        """Payload of a leased group, not decoded; see `fetch`."""
        request = Fetch(incarnation=self._incarnation, group_id=group_id, attempt=attempt)
        async with self._fetching:
            return await self._bulk().ask_payload(request, FetchReply)

    async def ack(self, step: int, draw_number: int, groups: list[tuple[int, int]]) -> None:
        """The step was applied."""
        ack = Ack(incarnation=self._incarnation, step=step, draw_number=draw_number, groups=groups)
        await self._control.ask(ack, Ok)

    async def settle(self, policy_version: int) -> None:
        """The oldest kept checkpoint holds this version: no earlier step will be undone."""
        settle = Settle(incarnation=self._incarnation, policy_version=policy_version)
        await self._control.ask(settle, Ok)

    async def set_depth(self, depth: int, reason: str) -> None:
        """Admission goes by this pipeline_depth from now on."""
        request = SetDepth(incarnation=self._incarnation, depth=depth, reason=reason[:500])
        await self._control.ask(request, Ok)

    async def announce(
        self,
        number: int,
        weights: WeightsName,
        *,
        wished_only: bool,
        plan_hash: str,
        buckets: list[BucketSpec],
        probe: Probe,
        files: WeightFiles | None = None,
    ) -> AnnounceReply:
        """Start a publish; freezes the cells."""
        announce = Announce(
            incarnation=self._incarnation,
            number=number,
            weights=weights,
            wished_only=wished_only,
            plan_hash=plan_hash,
            buckets=buckets,
            probe=probe,
            files=files,
        )
        return await self._control.ask(announce, AnnounceReply)

    async def open_cell(self, publish_sequence: int, cell_id: int, rendezvous: Rendezvous) -> None:
        """Rank 0 listens for this cell."""
        request = OpenCell(
            incarnation=self._incarnation,
            publish_sequence=publish_sequence,
            cell_id=cell_id,
            rendezvous=rendezvous,
        )
        await self._control.ask(request, Ok)

    async def wait_cell(
        self, publish_sequence: int, cell_id: int, phase: CellPhase, *, timeout_s: float
    ) -> WaitCellReply:
        """Phases once every engine is at `phase` or failed, or at the deadline."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while True:
            request = WaitCell(
                incarnation=self._incarnation,
                publish_sequence=publish_sequence,
                cell_id=cell_id,
                phase=phase,
                wait_s=max(0.0, min(self._poll_s, deadline - loop.time())),
            )
            reply = await self._control.ask(request, WaitCellReply)
            if _all_reached(reply, phase) or loop.time() >= deadline:
                return reply

    async def evaluations(self, seen: int) -> list[EvalResult]:
        """Results of evaluation rounds beyond the first `seen`; maybe none after one long poll."""
        request = WaitEvaluations(incarnation=self._incarnation, seen=seen, wait_s=self._poll_s)
        return (await self._control.ask(request, EvaluationsReply)).results

    async def abort_cell(self, publish_sequence: int, cell_id: int, reason: str) -> None:
        """Nothing more will be broadcast to this cell."""
        abort = AbortCell(
            incarnation=self._incarnation,
            publish_sequence=publish_sequence,
            cell_id=cell_id,
            reason=reason[:500],
        )
        await self._control.ask(abort, Ok)

    async def heartbeat(self, draws: list[int], status: RoleStatus) -> None:
        """I live; leases of other draws are released."""
        beat = TrainerHeartbeat(incarnation=self._incarnation, draws=draws, status=status)
        await self._control.ask(beat, Ok)

    async def finish(self, reason: str) -> None:
        """The run is over: everyone stops."""
        await self._control.ask(Finish(incarnation=self._incarnation, reason=reason[:500]), Ok)


class MonitorClient(RoleClient):
    """Reads counters, for the supervisor and for people."""

    def __init__(self, config: Config, *, name: str = "") -> None:
        """`name` must differ from other monitors'; empty: one is made up."""
        super().__init__(config, Role.MONITOR, name or f"monitor-{uuid.uuid4().hex[:8]}", None)

    async def stats(self, *, timeout_s: float | None = None) -> StatsReply:
        """Counters and peers. Raises RpcTimeout after `timeout_s`."""
        return await self._control.ask(Stats(), StatsReply, timeout_s=timeout_s)


def _all_reached(reply: WaitCellReply, phase: CellPhase) -> bool:
    order = list(CellPhase)
    wanted = order.index(phase)
    return all(order.index(reached) >= wanted for reached in reply.phases.values())
