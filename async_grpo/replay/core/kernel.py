"""What all requests decide by: durable state, volatile state, and the questions put to both.

`emit` is the only way to change durable state. Policies that a mutation test replaces (admission,
staleness, fencing, repeated acks) are methods here.
"""

from collections.abc import Collection
from dataclasses import dataclass, field

from async_grpo.algorithms.staleness import capacity
from async_grpo.config.staleness import OnStale, OverAge
from async_grpo.replay.core.ages import why_not_forced, why_stale
from async_grpo.replay.core.evaluation import EvalTicket
from async_grpo.replay.core.leases import Lease
from async_grpo.replay.core.members import Member, Members, needs_sync
from async_grpo.replay.core.publishing import PublishingDesk
from async_grpo.replay.core.records import (
    Dropped,
    EvalEnded,
    EvalReissued,
    Record,
    Reissued,
    Released,
    Trained,
    TrainerStarted,
    WentLive,
)
from async_grpo.replay.core.settings import CoreSettings
from async_grpo.replay.core.state import State
from async_grpo.replay.core.tickets import HELD, Phase, TicketBook, TicketState
from async_grpo.replay_api.base import Error, ErrorCode
from async_grpo.replay_parts import EndStats, EngineStatus, GroupSummary
from async_grpo.types import DropReason, ReissueReason, WeightsName


@dataclass
class Kernel:
    """State of the core and its policies."""

    settings: CoreSettings
    state: State
    members: Members
    desk: PublishingDesk = field(default_factory=PublishingDesk)
    deadlines: dict[int, float] = field(default_factory=dict)
    """group deadline of claimed tickets whose insert has not been tried"""
    eval_deadlines: dict[int, float] = field(default_factory=dict)
    """the same of claimed eval tickets"""
    reserved: dict[tuple[int, int], int] = field(default_factory=dict)
    """bytes promised to claimed attempts"""
    stored_at: dict[int, float] = field(default_factory=dict)
    unheld: set[tuple[int, int]] = field(default_factory=set)
    """attempts that were leased before a restart: only the trainer has their payload"""
    reopened: bool = False
    """the run was finished, but it was given more steps: it goes on once a trainer starts"""
    revision: int = 0
    """the newest of any member"""
    records: list[Record] = field(default_factory=list)
    freed: list[tuple[int, int]] = field(default_factory=list)
    changed: bool = False

    @classmethod
    def create(cls, settings: CoreSettings) -> "Kernel":
        """An empty one."""
        book = TicketBook(settings.remembered_tickets)
        state = State(settings.seed, book, settings.pipeline_depth)
        return cls(settings, state, Members(settings.peer_timeout_s))

    # -- changes ------------------------------------------------------------------------------

    def emit(self, record: Record) -> None:
        """Let a fact take effect and note what volatile state it ends."""
        if isinstance(record, Dropped | Reissued):
            self._end_attempt(record.group_id)
        elif isinstance(record, Trained):
            for group_id, _ in record.groups:
                self._end_attempt(group_id)
        elif isinstance(record, EvalEnded | EvalReissued):
            self.eval_deadlines.pop(record.group_id, None)
        elif isinstance(record, TrainerStarted):
            self.eval_deadlines.clear()
            self.reopened = False
        self.state.evolve(record)
        self.records.append(record)
        self.changed = True
        if isinstance(record, Released | TrainerStarted):
            self._reissue_unheld()

    def _end_attempt(self, group_id: int) -> None:
        ticket = self.state.book.tickets[group_id]
        if ticket.phase in HELD:
            self.freed.append(ticket.key)
        self.deadlines.pop(group_id, None)
        self.stored_at.pop(group_id, None)
        self.reserved.pop(ticket.key, None)
        self.unheld.discard(ticket.key)

    def _reissue_unheld(self) -> None:
        """A released group whose payload a restart has lost cannot be drawn again."""
        for ticket in list(self.state.book.by_phase[Phase.STORED].values()):
            if ticket.key in self.unheld:
                self.reissue(ticket, ReissueReason.LOST)

    def notify(self, generators: Collection[str] | None = None) -> None:
        """Something that these generators watch has changed; None: all of them."""
        self.revision += 1
        self.changed = True
        for member in self.members.by_instance.values():
            if generators is None or member.name in generators:
                member.revision = self.revision

    def drop(
        self, ticket: TicketState, reason: DropReason, detail: str, stats: EndStats | None = None
    ) -> None:
        """End the ticket untrained."""
        group_id, attempt = ticket.key
        self.emit(
            Dropped(
                group_id=group_id,
                attempt=attempt,
                reason=reason,
                detail=detail,
                stats=stats or EndStats(),
            )
        )

    def reissue(
        self, ticket: TicketState, reason: ReissueReason, stats: EndStats | None = None
    ) -> None:
        """End the attempt; its ticket goes on."""
        group_id, attempt = ticket.key
        self.emit(
            Reissued(group_id=group_id, attempt=attempt, reason=reason, stats=stats or EndStats())
        )

    def lose_claim(self, ticket: TicketState, detail: str) -> None:
        """A claim ended without its generator's doing; too many end the ticket."""
        if ticket.num_lost_claims + 1 >= self.settings.max_lost_claims:
            reason = DropReason.GENERATION_FAILED
            self.drop(ticket, reason, f"{ticket.num_lost_claims + 1} claims lost, last: {detail}")
        else:
            self.reissue(ticket, ReissueReason.CLAIM_LOST)

    def lose_eval_claim(self, ticket: EvalTicket, detail: str) -> None:
        """The same of an eval ticket."""
        group_id, attempt = ticket.key
        if ticket.num_lost_claims + 1 >= self.settings.max_lost_claims:
            why = f"{ticket.num_lost_claims + 1} claims lost, last: {detail}"
            self.end_evaluation(
                EvalEnded(group_id=group_id, attempt=attempt, failed=True, detail=why)
            )
        else:
            self.emit(EvalReissued(group_id=group_id, attempt=attempt))

    def end_evaluation(self, record: EvalEnded) -> None:
        """An eval ticket is over; a round that became due meanwhile may begin."""
        self.emit(record)
        self.open_evaluation()

    def open_evaluation(self) -> None:
        """Begin an evaluation round if the live version is due for one."""
        settings = self.settings
        record = self.state.evals.due(
            self.state.versions.live,
            every=settings.eval_every,
            num_prompts=settings.eval_num_prompts,
            last_version=settings.num_train_steps,
        )
        if record is not None:
            self.emit(record)

    def end_member(self, member: Member, detail: str) -> None:
        """A generator is gone: its claims are lost and its engines fail their updates."""
        claimed = self.state.book.by_phase[Phase.CLAIMED].values()
        for ticket in [ticket for ticket in claimed if ticket.instance == member.instance]:
            self.lose_claim(ticket, detail)
        for evaluation in self.state.evals.claimed():
            if evaluation.instance == member.instance:
                self.lose_eval_claim(evaluation, detail)
        for engine in member.engines:
            self.notify(self.desk.fail(engine.engine_id, detail))
        self.check_live()
        self.changed = True

    def check_live(self) -> None:
        """A publish goes live once nothing is expected of any cell and one engine has its weights.

        By their name: an earlier publish of the same weights may have brought them.
        """
        versions = self.state.versions
        for publish in self.desk.publishes:
            weights = publish.record.weights
            if (
                publish.settled
                and (publish.committed or self.serves(weights))
                and weights.incarnation == versions.incarnation
                and (versions.live is None or weights > versions.live)
            ):
                self.emit(
                    WentLive(weights=weights, publish_sequence=publish.record.publish_sequence)
                )
                self.notify()
                self.open_evaluation()

    # -- questions ----------------------------------------------------------------------------

    def serves(self, weights: WeightsName) -> bool:
        """Whether an engine says that it serves these weights, or later ones."""
        return any(member.has_weights(weights) for member, _ in self.members.engines())

    @property
    def over(self) -> str:
        """Why the run is over; empty while it goes on."""
        return "" if self.reopened else self.state.versions.finished

    def admits(self) -> bool:
        """Admission by state: whether one more group may be under way."""
        settings, versions = self.settings, self.state.versions
        if versions.live is None or self.over:
            return False
        under_way = self.state.book.count(Phase.CLAIMED, Phase.STORED, Phase.LEASED)
        room = capacity(
            versions.live.policy_version,
            versions.policy_version,
            depth=self.state.pipeline_depth,
            groups_per_step=settings.groups_per_step,
        )
        steps_left = settings.num_train_steps - versions.policy_version
        return under_way < min(room, settings.groups_per_step * steps_left)

    def may_begin(self, train_version: int) -> bool:
        """Whether groups for a step from `train_version` may be handed out at all.

        Forced staleness: not before all that this version is to sample is stored. Then nothing is
        in flight when the next version comes, and the step of k versions later finds its groups.
        """
        if not self.settings.forced:
            return True
        live = self.state.versions.live
        return (
            live is not None
            and live.policy_version == train_version
            and not self.state.book.count(Phase.CLAIMED)
            and not self.admits()
        )

    def live_claim(self, group_id: int, attempt: int) -> TicketState | None:
        """The claimed ticket, if this attempt of it is the current one."""
        ticket = self.state.book.get(group_id)
        if ticket and ticket.phase is Phase.CLAIMED and ticket.attempt == attempt:
            return ticket
        return None

    def fits(self, key: tuple[int, int], num_bytes: int) -> bool:
        """Whether the buffer has room for a group, its own reservation set aside."""
        others = [size for other, size in self.reserved.items() if other != key]
        num_held = self.state.book.count(*HELD)
        if not num_held and not others:
            return True
        used = self.state.book.held_bytes() + sum(others)
        return (
            used + num_bytes <= self.settings.max_bytes
            and num_held + len(others) < self.settings.max_groups
        )

    def on_lineage(self, summary: GroupSummary) -> bool:
        """Whether no token was sampled by weights that a fallen-back trainer has undone."""
        return all(self.state.versions.on_lineage(name) for name, _ in summary.weights_tokens)

    def why_impossible(self, summary: GroupSummary) -> str:
        """Why no engine of this run can have sampled the group; empty if one can."""
        versions = self.state.versions
        for name, _ in summary.weights_tokens:
            if not versions.is_announced(name):
                newest = versions.newest_announced() or "none"
                return (
                    f"it names weights {name}, which do not exist yet (newest announced: {newest})"
                )
        return ""

    def may_restore(self, weights: WeightsName) -> bool:
        """Whether a trainer may go on from a checkpoint of these weights."""
        return self.state.versions.restorable(weights)

    def why_stale(self, summary: GroupSummary, train_version: int) -> str:
        """Why a step from `train_version` must not use the group; empty if it may."""
        return why_stale(summary, train_version, self.settings)

    def why_refused(self, summary: GroupSummary) -> str:
        """Why a finished group is not even stored; empty if it is.

        Under `over_age: mask_tokens` age is looked at when a step is known, by `retire`.
        """
        version = self.state.versions.policy_version
        if self.settings.over_age is OverAge.reject and (why := self.why_stale(summary, version)):
            return why
        return why_not_forced(summary, version, self.settings)

    def retire(self, train_version: int) -> None:
        """End every stored group that a step from `train_version` must not use."""
        for ticket in list(self.state.book.by_phase[Phase.STORED].values()):
            assert ticket.summary is not None, f"stored group {ticket.key} has no summary"
            if not self.on_lineage(ticket.summary):
                self.reissue(ticket, ReissueReason.SUPERSEDED)
            elif why := self.why_stale(ticket.summary, train_version):
                self.end_stale(ticket, why)

    def end_stale(self, ticket: TicketState, why: str, stats: EndStats | None = None) -> None:
        """The group is too old: its ticket ends, or goes on under `on_stale: requeue`."""
        if self.settings.on_stale is OnStale.requeue:
            self.reissue(ticket, ReissueReason.REQUEUED, stats)
        else:
            self.drop(ticket, DropReason.STALE, why, stats)

    def acked(self, step: int) -> Trained | None:
        """The surviving record of a step."""
        return self.state.versions.steps.get(step)

    def may_be_trained(self, lease: Lease) -> bool:
        """Whether the groups of a draw are still the trainer's, or were released untouched."""
        phase = Phase.STORED if lease.released else Phase.LEASED
        number = 0 if lease.released else lease.drawn.draw_number
        for group_id, attempt in lease.keys:
            ticket = self.state.book.get(group_id)
            if ticket is None or (ticket.attempt, ticket.phase) != (attempt, phase):
                return False
            if ticket.draw_number != number:
                return False
        return True

    def wishes(self) -> list[tuple[str, EngineStatus]]:
        """(generator, engine) that need the current weights and are in no unfinished publish."""
        busy = self.desk.busy_engines()
        announced = self.state.versions.newest_announced()
        return [
            (member.name, engine)
            for member, engine in self.members.engines()
            if engine.engine_id not in busy and needs_sync(engine, announced)
        ]

    def fence(self, member: Member, incarnation: int) -> Error | None:
        """Refuse a trainer that is not the run's trainer."""
        versions = self.state.versions
        if incarnation > versions.incarnation:
            return refuse(f"incarnation {incarnation} never started")
        if incarnation < versions.incarnation or member.instance != versions.instance:
            return Error(
                code=ErrorCode.FENCED,
                message=f"incarnation {versions.incarnation} has taken over from {incarnation}",
            )
        return None


def refuse(message: str, code: ErrorCode = ErrorCode.BAD_REQUEST) -> Error:
    """An error reply."""
    return Error(code=code, message=message)
