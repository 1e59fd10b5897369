"""A replay server for the trainer alone: hands out recorded groups, plays the engines' part."""

import asyncio
import queue
from collections.abc import Sequence

from async_grpo.errors import RemoteError
from async_grpo.replay_api.base import ErrorCode
from async_grpo.replay_api.publishing import AnnounceReply, WaitCellReply
from async_grpo.replay_api.trainer import DrawReply, StartTrainerReply
from async_grpo.replay_parts import (
    BucketSpec,
    Cell,
    CellEngine,
    CellPhase,
    EvalResult,
    GeneratedStats,
    LeasedGroup,
    Probe,
    Rendezvous,
    RoleStatus,
    WeightFiles,
)
from async_grpo.types import RolloutGroup, WeightsName


def generated_of(groups: Sequence[RolloutGroup]) -> GeneratedStats:
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    return GeneratedStats(
        num_groups=len(groups),
        num_completions=len(rollouts),
        num_tokens=sum(group.num_tokens for group in groups),
        reward_sum=sum(rollout.reward for rollout in rollouts),
    )


class FakeTrainerReplay:
    """One draw per step, in order. With `version_live_first`, version v must be announced first."""

    def __init__(
        self,
        draws: Sequence[Sequence[RolloutGroup]] = (),
        *,
        engines: Sequence[str] = (),
        incarnation: int = 1,
    ) -> None:
        self.draws = [list(groups) for groups in draws]
        self.engines = list(engines)
        self.incarnation = incarnation
        self.wishing: list[str] = []
        self.results: list[EvalResult] = []
        self.lost: set[tuple[int, int]] = set()
        self.swapped: dict[tuple[int, int], RolloutGroup] = {}
        """(group_id, attempt) -> what a fetch of it returns instead"""
        self.calls: list[tuple] = []
        self.heartbeats: list[tuple[list[int], RoleStatus]] = []
        self.beats: queue.SimpleQueue[list[int]] = queue.SimpleQueue()
        """draws of each heartbeat, to wait on"""
        self.cells_of_sequence: dict[int, list[Cell]] = {}
        self.phases: dict[int, dict[str, CellPhase]] = {}
        self.rendezvous: dict[int, Rendezvous] = {}
        self.sequence = 0
        self.pipeline_depth = 2
        self.fail_engines: dict[str, CellPhase] = {}
        self.on_open = None
        """called with (publish_sequence, cell_id, rendezvous) when a cell is opened"""
        self.undrawn = GeneratedStats()
        """what draws without groups tell"""
        self.drawn_in_vain: queue.SimpleQueue[int] = queue.SimpleQueue()
        """numbers of such draws, to wait on"""
        self.draw_gate = asyncio.Event()
        self.draw_gate.set()

    async def start(
        self, restored_version: int, restored_incarnation: int = 0
    ) -> StartTrainerReply:
        self.calls.append(("start", restored_version, restored_incarnation))
        return StartTrainerReply(
            incarnation=self.incarnation, next_draw_number=1, pipeline_depth=self.pipeline_depth
        )

    async def draw(self, draw_number: int, train_version: int) -> DrawReply:
        self.calls.append(("draw", draw_number, train_version))
        await self.draw_gate.wait()
        if not self.draws:
            self.drawn_in_vain.put(draw_number)
            if not self.wishing:
                await asyncio.sleep(0.01)
            return DrawReply(wishes=list(self.wishing), generated=self.undrawn)
        groups = self.draws.pop(0)
        self.leased = {(group.group_id, group.attempt): group for group in groups}
        return DrawReply(
            groups=[
                LeasedGroup(
                    group_id=group.group_id,
                    attempt=group.attempt,
                    prompt_index=group.prompt_index,
                    num_bytes=8 * group.num_tokens,
                    num_tokens=group.num_tokens,
                    oldest=group.oldest_weights(),
                    in_queue_s=1.5,
                )
                for group in groups
            ],
            generated=generated_of(groups),
        )

    async def fetch(self, group_id: int, attempt: int) -> RolloutGroup:
        if (group_id, attempt) in self.lost:
            raise RemoteError("replay server", "fetch", ErrorCode.NOT_FOUND, "no such payload")
        key = group_id, attempt
        return self.swapped.get(key) or self.leased[key]

    async def ack(self, step: int, draw_number: int, groups: list[tuple[int, int]]) -> None:
        self.calls.append(("ack", step, draw_number, groups))

    async def settle(self, policy_version: int) -> None:
        self.calls.append(("settle", policy_version))

    async def set_depth(self, depth: int, reason: str) -> None:
        self.calls.append(("set_depth", depth, reason))
        self.pipeline_depth = depth

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
        self.calls.append(("announce", number, str(weights), wished_only))
        self.sequence += 1
        chosen = [name for name in self.engines if not wished_only or name in self.wishing]
        cells = [
            Cell(
                cell_id=index,
                engines=[
                    CellEngine(engine_id=name, generator="g", tp_size=1, rank_offset=1),
                ],
            )
            for index, name in enumerate(chosen)
        ]
        self.cells_of_sequence[self.sequence] = cells
        self.buckets, self.probe, self.files = buckets, probe, files
        return AnnounceReply(publish_sequence=self.sequence, cells=cells)

    async def open_cell(self, publish_sequence: int, cell_id: int, rendezvous: Rendezvous) -> None:
        self.calls.append(("open", publish_sequence, cell_id, rendezvous.fresh))
        if self.on_open is not None:
            self.on_open(publish_sequence, cell_id, rendezvous)

    async def wait_cell(
        self, publish_sequence: int, cell_id: int, phase: CellPhase, *, timeout_s: float
    ) -> WaitCellReply:
        cell = self.cells_of_sequence[publish_sequence][cell_id]
        if not timeout_s:  # a look, before there is anything to commit
            phase = CellPhase.BEGUN
        phases = {}
        for engine in cell.engines:
            failed = self.fail_engines.get(engine.engine_id) is phase
            phases[engine.engine_id] = CellPhase.FAILED if failed else phase
        if phase is CellPhase.COMMITTED:
            done = {name for name, reached in phases.items() if reached is phase}
            self.wishing = [name for name in self.wishing if name not in done]
        return WaitCellReply(phases=phases, details=dict.fromkeys(self.fail_engines, "told to"))

    async def evaluations(self, seen: int) -> list[EvalResult]:
        await asyncio.sleep(0.01 if len(self.results) <= seen else 0)  # a short long poll
        return self.results[seen:]

    async def abort_cell(self, publish_sequence: int, cell_id: int, reason: str) -> None:
        self.calls.append(("abort", publish_sequence, cell_id))

    async def heartbeat(self, draws: list[int], status: RoleStatus) -> None:
        self.heartbeats.append((list(draws), status))
        self.beats.put(list(draws))

    async def finish(self, reason: str) -> None:
        self.calls.append(("finish", reason))

    async def leave(self, reason: str) -> None:
        self.calls.append(("leave", reason))

    async def close(self) -> None:
        self.calls.append(("close",))

    async def connect(self) -> None:
        self.calls.append(("connect",))
