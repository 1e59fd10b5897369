"""Planted bugs: cores that are wrong in one way, to prove that the simulation would notice."""

from typing import ClassVar

import msgspec

from async_grpo.replay.core import generator_requests, trainer_requests
from async_grpo.replay.core.core import Handler, ReplayCore
from async_grpo.replay.core.kernel import Kernel
from async_grpo.replay.core.members import Member
from async_grpo.replay.core.records import Claimed, Dropped, Record, Reissued, Stored, Trained
from async_grpo.replay.core.tickets import Phase
from async_grpo.replay_api.generator import Insert, InsertReply
from async_grpo.replay_api.protocol import Reply
from async_grpo.replay_api.trainer import Ack, Settle
from async_grpo.replay_parts import GroupSummary, Role
from async_grpo.types import InsertOutcome, WeightsName


class _CountingKernel(Kernel):
    num_handed_out = 0

    def emit(self, record: Record) -> None:
        super().emit(record)
        if isinstance(record, Claimed):
            self.num_handed_out += 1
        elif isinstance(record, Dropped | Reissued):
            self.num_handed_out -= 1
        elif isinstance(record, Trained):
            self.num_handed_out -= len(record.groups)

    def admits(self) -> bool:
        versions = self.state.versions
        return versions.live is not None and self.num_handed_out < self.settings.window


class AdmissionCountedByEvents(ReplayCore):
    """Counts up and down instead of looking: a restart starts from zero."""

    kernel_class = _CountingKernel


def _insert_late(kernel: Kernel, member: Member, request: Insert, now: float) -> Reply:
    ticket = kernel.state.book.get(request.group_id)
    late = ticket and ticket.phase is Phase.CLAIMED and request.attempt < ticket.attempt
    if late and request.summary is not None:
        kernel.emit(Stored(summary=request.summary))
        return InsertReply(outcome=InsertOutcome.STORED)
    return generator_requests.insert(kernel, member, request, now)


class LateInsertAccepted(ReplayCore):
    """Takes the group of an attempt that is over."""

    handlers: ClassVar[dict[type, tuple[Role, Handler]]] = {
        **ReplayCore.handlers,
        Insert: (Role.GENERATOR, _insert_late),
    }


def _ack_again(kernel: Kernel, member: Member, request: Ack, now: float) -> Reply:
    trained = kernel.acked(request.step)
    reply = trainer_requests.ack(kernel, member, request, now)
    if trained is not None and trained.incarnation == request.incarnation:
        kernel.emit(trained)
    return reply


class RepeatedAckTrained(ReplayCore):
    """Counts a step again when its ack is repeated."""

    handlers: ClassVar[dict[type, tuple[Role, Handler]]] = {
        **ReplayCore.handlers,
        Ack: (Role.TRAINER, _ack_again),
    }


class _AgelessKernel(Kernel):
    def why_stale(self, summary: GroupSummary, train_version: int) -> str:
        return ""


class StalenessUnchecked(ReplayCore):
    """Hands out groups of any age."""

    kernel_class = _AgelessKernel


class _HastyKernel(Kernel):
    def may_begin(self, train_version: int) -> bool:
        return True


class ForcedStepWaitsForNobody(ReplayCore):
    """Begins a step of forced staleness while its version's groups are still in flight."""

    kernel_class = _HastyKernel


class _DeepestKernel(Kernel):
    def admits(self) -> bool:
        in_force, self.state.pipeline_depth = self.state.pipeline_depth, self.settings.deepest
        admitted = super().admits()
        self.state.pipeline_depth = in_force
        return admitted


class DepthIgnored(ReplayCore):
    """Admits by the largest pipeline_depth, whatever the trainer has set."""

    kernel_class = _DeepestKernel


class _LineagelessKernel(Kernel):
    def on_lineage(self, summary: GroupSummary) -> bool:
        return True


class LineageUnchecked(ReplayCore):
    """Hands out groups sampled by weights that a fallen-back trainer has undone."""

    kernel_class = _LineagelessKernel


class _ForgivingKernel(Kernel):
    def end_member(self, member: Member, detail: str) -> None:
        self.changed = True


class LostClaimsKept(ReplayCore):
    """Leaves the claims of a dead generator as they are."""

    kernel_class = _ForgivingKernel


class _UnpublishedKernel(Kernel):
    def check_live(self) -> None:
        versions = self.state.versions
        if versions.live is None:
            super().check_live()


class NeverLiveAgain(ReplayCore):
    """Only the first weights of a trainer go live: the run wedges without any broken count."""

    kernel_class = _UnpublishedKernel


class _RestoringKernel(Kernel):
    def may_restore(self, weights: WeightsName) -> bool:
        return True


class CheckpointLineageUnchecked(ReplayCore):
    """Lets a trainer go on from weights that a later one has undone."""

    kernel_class = _RestoringKernel


def _settle_all(kernel: Kernel, member: Member, request: Settle, now: float) -> Reply:
    version = kernel.state.versions.policy_version
    request = msgspec.structs.replace(request, policy_version=version)
    return trainer_requests.settle(kernel, member, request, now)


class SettledTooEarly(ReplayCore):
    """Forgets steps that a kept checkpoint could still undo."""

    handlers: ClassVar[dict[type, tuple[Role, Handler]]] = {
        **ReplayCore.handlers,
        Settle: (Role.TRAINER, _settle_all),
    }


MUTANTS: list[type[ReplayCore]] = [
    AdmissionCountedByEvents,
    LateInsertAccepted,
    RepeatedAckTrained,
    StalenessUnchecked,
    ForcedStepWaitsForNobody,
    DepthIgnored,
    LineageUnchecked,
    LostClaimsKept,
    NeverLiveAgain,
    CheckpointLineageUnchecked,
    SettledTooEarly,
]
