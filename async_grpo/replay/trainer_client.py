"""The trainer's client of the replay server: leases groups, acks steps, publishes weights."""

import asyncio

from async_grpo.config.schema import Config
from async_grpo.errors import PeerLost, RemoteError
from async_grpo.replay.role_client import RoleClient
from async_grpo.replay_api.base import ErrorCode, Ok
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
    EvalResult,
    Probe,
    Rendezvous,
    Role,
    RoleStatus,
    WeightFiles,
)
from async_grpo.transport.codec import decode_group
from async_grpo.transport.group_header import Frame
from async_grpo.types import RolloutGroup, WeightsName

_TRAINER_ALIVE_PAUSE_S = 0.25
_MOST_FETCHES = 16
"""Payloads on their way to one trainer at a time."""


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
        digests: dict[str, int],
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
            digests=digests,
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
            if reply.has_reached(phase) or loop.time() >= deadline:
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
