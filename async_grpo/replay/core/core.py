"""The replay core: `apply(event, now) -> Effects`. No I/O, no clock of its own, no threads.

`now` is monotonic seconds. What the server does with the effects, in this order: write the records
to the ledger, then reply, then forget freed payloads, then try parked requests again.
"""

from collections.abc import Callable, Iterable
from typing import Any, ClassVar

from async_grpo.replay.core import eval_requests, generator_requests, trainer_requests
from async_grpo.replay.core.events import Effects, Event, Joined, Received, Tick
from async_grpo.replay.core.invariants import check_invariants
from async_grpo.replay.core.kernel import Kernel, refuse
from async_grpo.replay.core.members import Member
from async_grpo.replay.core.records import DatasetAgreed, Record, Released, RunNamed
from async_grpo.replay.core.settings import CoreSettings
from async_grpo.replay.core.state import State
from async_grpo.replay.core.tickets import Phase
from async_grpo.replay_api.base import ErrorCode, Ok
from async_grpo.replay_api.generator import (
    Claim,
    ClaimReply,
    Credit,
    CreditReply,
    End,
    EnginePhase,
    Evaluated,
    GeneratorHeartbeat,
    Insert,
    Watch,
)
from async_grpo.replay_api.peers import HelloReply, Leave, PeerView, Stats, StatsReply
from async_grpo.replay_api.protocol import Reply, Request
from async_grpo.replay_api.publishing import AbortCell, Announce, OpenCell, WaitCell
from async_grpo.replay_api.trainer import (
    Ack,
    Draw,
    Fetch,
    Finish,
    SetDepth,
    Settle,
    StartTrainer,
    TrainerHeartbeat,
    WaitEvaluations,
)
from async_grpo.replay_parts import Role
from async_grpo.types import ReissueReason, WeightsName

Handler = Callable[[Kernel, Member, Any, float], Reply | None]


class ReplayCore:
    """Decides everything about tickets, leases, versions and publishes."""

    kernel_class: ClassVar[type[Kernel]] = Kernel
    handlers: ClassVar[dict[type, tuple[Role, Handler]]] = {
        Claim: (Role.GENERATOR, generator_requests.claim),
        Credit: (Role.GENERATOR, generator_requests.credit),
        Insert: (Role.GENERATOR, generator_requests.insert),
        End: (Role.GENERATOR, generator_requests.end),
        Evaluated: (Role.GENERATOR, eval_requests.evaluated),
        Watch: (Role.GENERATOR, generator_requests.watch),
        EnginePhase: (Role.GENERATOR, generator_requests.engine_phase),
        GeneratorHeartbeat: (Role.GENERATOR, generator_requests.heartbeat),
        StartTrainer: (Role.TRAINER, trainer_requests.start),
        Draw: (Role.TRAINER, trainer_requests.draw),
        Fetch: (Role.TRAINER, trainer_requests.fetch),
        TrainerHeartbeat: (Role.TRAINER, trainer_requests.heartbeat),
        Ack: (Role.TRAINER, trainer_requests.ack),
        Settle: (Role.TRAINER, trainer_requests.settle),
        SetDepth: (Role.TRAINER, trainer_requests.set_depth),
        Announce: (Role.TRAINER, trainer_requests.announce),
        OpenCell: (Role.TRAINER, trainer_requests.open_cell),
        WaitCell: (Role.TRAINER, trainer_requests.wait_cell),
        AbortCell: (Role.TRAINER, trainer_requests.abort_cell),
        WaitEvaluations: (Role.TRAINER, eval_requests.wait_evaluations),
        Finish: (Role.TRAINER, trainer_requests.finish),
    }

    def __init__(self, settings: CoreSettings) -> None:
        self._kernel = self.kernel_class.create(settings)

    @classmethod
    def restore(
        cls,
        settings: CoreSettings,
        records: Iterable[Record],
        now: float,
        *,
        state: State | None = None,
    ) -> "ReplayCore":
        """The core that wrote `records`, after a restart that lost the stored payloads.

        `state` is what the records before these have made; None: there are none before.
        Stored groups are reissued as `lost`; the records of that are in the effects of the first
        `apply`. Leased groups stay leased. Owners of claims and the trainer count as seen `now`.
        """
        core = cls(settings)
        kernel = core._kernel
        if state is not None:
            kernel.state = state
        for record in records:
            kernel.state.evolve(record)
        book, versions = kernel.state.book, kernel.state.versions
        kernel.unheld = {ticket.key for ticket in book.by_phase[Phase.LEASED].values()}
        for ticket in book.by_phase[Phase.CLAIMED].values():
            kernel.members.join(ticket.instance, Role.GENERATOR, ticket.generator, now)
            kernel.deadlines[ticket.group_id] = now + settings.group_timeout_s
        for evaluation in kernel.state.evals.claimed():
            kernel.members.join(evaluation.instance, Role.GENERATOR, evaluation.generator, now)
            kernel.eval_deadlines[evaluation.group_id] = now + settings.group_timeout_s
        if versions.instance:
            kernel.members.join(versions.instance, Role.TRAINER, "trainer", now)
        if versions.announced is not None:
            kernel.desk.restore(versions.announced)
        steps_left = settings.num_train_steps - versions.policy_version
        kernel.reopened = bool(versions.finished) and steps_left > 0
        kernel.revision = int(now * 1000)  # above what was told before, or an equal one misleads
        kernel.notify()
        for ticket in list(book.by_phase[Phase.STORED].values()):
            kernel.reissue(ticket, ReissueReason.LOST)
        return core

    def apply(self, event: Event, now: float) -> Effects:
        """Decide one event. Times never go back."""
        kernel = self._kernel
        reply = None
        silent: list[str] = []
        if isinstance(event, Received):
            reply = self._receive(event.peer, event.request, now)
        elif isinstance(event, Joined):
            reply = self._join(event, now)
        else:
            assert isinstance(event, Tick), f"unknown event {event!r}"
            silent = self._tick(now)
        effects = Effects(reply, list(kernel.records), list(kernel.freed), kernel.changed, silent)
        kernel.records.clear()
        kernel.freed.clear()
        kernel.changed = False
        return effects

    def empty_reply(self, request: Request, peer: str) -> Reply:
        """What a long poll is told at its deadline; `peer` is the instance that asked."""
        if isinstance(request, Claim):
            return ClaimReply()
        if isinstance(request, Credit):
            return CreditReply(granted=False)
        if isinstance(request, Draw):
            return trainer_requests.no_groups_now(self._kernel)
        if isinstance(request, WaitCell):
            return trainer_requests.cell_now(self._kernel, request)
        if isinstance(request, WaitEvaluations):
            return eval_requests.evaluations_now(self._kernel, request)
        member = self._kernel.members.get(peer)
        if isinstance(request, Watch) and member is not None:
            return generator_requests.watch_now(self._kernel, member)
        return _hello_required(peer)

    def check_invariants(self) -> None:
        """Raise AssertionError naming the first rule that does not hold."""
        check_invariants(self._kernel)

    @property
    def state(self) -> State:
        """Durable state, to look at."""
        return self._kernel.state

    @property
    def incarnation(self) -> int:
        """Of the newest trainer; 0 before the first."""
        return self.state.versions.incarnation

    @property
    def policy_version(self) -> int:
        """Train steps acked."""
        return self.state.versions.policy_version

    @property
    def live(self) -> WeightsName | None:
        """Weights that new groups are sampled by."""
        return self.state.versions.live

    @property
    def over(self) -> str:
        """Why the run is over; empty while it goes on."""
        return self._kernel.over

    def stats(self, now: float) -> StatsReply:
        """Counters and peers."""
        kernel, state = self._kernel, self.state
        book = state.book
        return StatsReply(
            tickets=state.accounting.tickets,
            waiting=book.count(Phase.WAITING),
            claimed=book.count(Phase.CLAIMED),
            stored=book.count(Phase.STORED),
            leased=book.count(Phase.LEASED),
            trained=state.accounting.trained,
            dropped=dict(state.accounting.dropped),
            reissued={reason.value: n for reason, n in state.accounting.reissued.items()},
            policy_version=self.policy_version,
            live=self.live,
            publish_sequence=state.versions.publish_sequence,
            stored_bytes=book.held_bytes(),
            max_bytes=kernel.settings.max_bytes,
            pipeline_depth=state.pipeline_depth,
            peers=[
                PeerView(
                    role=member.role,
                    name=member.name,
                    heartbeat_age_s=now - member.last_seen,
                    status=member.status,
                    engines=member.engines,
                )
                for member in kernel.members.by_instance.values()
                if member.role is not Role.MONITOR
            ],
            finished=kernel.over,
            eval_tickets=state.evals.num_tickets,
            eval_evaluated=state.evals.num_evaluated,
            eval_failed=state.evals.num_failed,
            eval_open=state.evals.num_open,
        )

    # -- events ---------------------------------------------------------------------------------

    def _receive(self, peer: str, request: Request, now: float) -> Reply | None:
        if isinstance(request, Stats):
            return self.stats(now)
        member = self._kernel.members.get(peer)
        if member is None:
            return _hello_required(peer)
        if isinstance(request, Leave):
            return self._leave(member, request)
        role, handler = self.handlers.get(type(request), (None, None))
        if handler is None:
            return refuse(f"{type(request).__name__} is no request to the core")
        if role is not member.role:
            return refuse(f"{type(request).__name__} is not for a {member.role.value}")
        return handler(self._kernel, member, request, now)

    def _join(self, event: Joined, now: float) -> Reply:
        kernel = self._kernel
        if not kernel.state.run_token and event.new_token:
            kernel.emit(RunNamed(token=event.new_token))
        if event.dataset is not None:
            agreed = kernel.state.dataset
            if agreed is None:
                kernel.emit(
                    DatasetAgreed(
                        fingerprint=event.dataset.fingerprint,
                        num_prompts=event.dataset.num_prompts,
                    )
                )
            elif agreed != event.dataset:
                return refuse(
                    f"{event.name} has dataset {event.dataset.fingerprint} of "
                    f"{event.dataset.num_prompts} prompts, the run has {agreed.fingerprint} of "
                    f"{agreed.num_prompts}",
                    ErrorCode.CONFIG_MISMATCH,
                )
        is_new = kernel.members.get(event.peer) is None
        for ended in kernel.members.join(event.peer, event.role, event.name, now):
            kernel.end_member(ended, f"{ended.name} was restarted")
        if is_new:
            kernel.notify([event.name])
        settings = kernel.settings
        return HelloReply(
            incarnation=self.incarnation,
            policy_version=self.policy_version,
            run_token=kernel.state.run_token,
            credit_bytes=settings.credit_bytes,
            max_group_bytes=settings.max_group_bytes,
        )

    def _leave(self, member: Member, request: Leave) -> Ok:
        kernel = self._kernel
        kernel.members.remove(member.instance)
        if member.role is Role.GENERATOR:
            kernel.end_member(member, request.reason or f"{member.name} left")
        elif member.instance == kernel.state.versions.instance:
            for lease in kernel.state.leases.held():
                number = lease.drawn.draw_number
                kernel.emit(Released(incarnation=self.incarnation, draw_number=number))
            kernel.changed = True
        return Ok()

    def _tick(self, now: float) -> list[str]:
        """Names of peers that fell silent."""
        kernel = self._kernel
        silent = kernel.members.silent(now)
        for member in silent:
            kernel.members.remove(member.instance)
            kernel.changed = True
            if member.role is Role.GENERATOR:
                kernel.end_member(member, f"{member.name} fell silent")
        for group_id, deadline in list(kernel.deadlines.items()):
            if now > deadline:
                ticket = kernel.state.book.tickets[group_id]
                generator = ticket.generator
                kernel.lose_claim(ticket, f"{generator} missed the group deadline")
                kernel.notify([generator])
        for evaluation in kernel.state.evals.claimed():
            generator = evaluation.generator
            if now > kernel.eval_deadlines[evaluation.group_id]:
                kernel.lose_eval_claim(evaluation, f"{generator} missed the group deadline")
                kernel.notify([generator])
        return [member.name for member in silent]


def _hello_required(peer: str) -> Reply:
    return refuse(f"{peer or 'this peer'} has not said hello", ErrorCode.HELLO_REQUIRED)
