"""What the trainer asks: start, draw, fetch, ack, depth, announce, cells, heartbeat, finish.

Each function returns the reply, or None for a long poll that has nothing to say yet. Applied again
after a lost reply, it answers the same and changes nothing.
"""

from async_grpo.replay.core.ages import oldest_name
from async_grpo.replay.core.kernel import Kernel, refuse
from async_grpo.replay.core.leases import choose
from async_grpo.replay.core.members import Member
from async_grpo.replay.core.publishing import freeze_cells
from async_grpo.replay.core.records import (
    Announced,
    DepthSet,
    Drawn,
    Finished,
    Released,
    Settled,
    Trained,
    TrainerStarted,
)
from async_grpo.replay.core.tickets import Phase, TicketState
from async_grpo.replay_api.base import Error, ErrorCode, Ok
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
    Fetch,
    FetchReply,
    Finish,
    SetDepth,
    Settle,
    StartTrainer,
    StartTrainerReply,
    TrainerHeartbeat,
)
from async_grpo.replay_parts import LeasedGroup
from async_grpo.types import WeightsName


def start(
    kernel: Kernel, member: Member, request: StartTrainer, now: float
) -> StartTrainerReply | Error:
    """Make this process the run's trainer, unless another one lives."""
    versions = kernel.state.versions
    if versions.incarnation == 0 or versions.instance != member.instance:
        if kernel.members.is_alive(versions.instance, now):
            return refuse("another trainer's heartbeat lives", ErrorCode.TRAINER_ALIVE)
        if refused := _not_restorable(kernel, request):
            return refused
        kernel.emit(
            TrainerStarted(
                incarnation=versions.incarnation + 1,
                restored_version=request.restored_version,
                restored_incarnation=request.restored_incarnation,
                instance=member.instance,
            )
        )
        kernel.desk.abort_all(f"trainer incarnation {versions.incarnation} took over")
        kernel.notify()
    next_number = kernel.state.leases.last_draw_number + 1
    return StartTrainerReply(
        incarnation=versions.incarnation,
        next_draw_number=next_number,
        pipeline_depth=kernel.state.pipeline_depth,
    )


def _not_restorable(kernel: Kernel, request: StartTrainer) -> Error | None:
    """Why no trainer can go on from there."""
    versions, version = kernel.state.versions, request.restored_version
    problem = ""
    if version > versions.policy_version:
        problem = f"only {versions.policy_version} steps were acked"
    elif version < versions.settled:
        problem = f"steps before {versions.settled} are final"
    elif request.restored_incarnation:
        weights = WeightsName(request.restored_incarnation, version)
        if not kernel.may_restore(weights):
            problem = "a later trainer has fallen back behind it"
    elif version:
        problem = "restored_incarnation is missing"
    if not problem:
        return None
    name = f"{request.restored_incarnation}.{version}"
    return refuse(f"cannot go on from {name}: {problem}", ErrorCode.NOT_FOUND)


def draw(kernel: Kernel, member: Member, request: Draw, now: float) -> DrawReply | Error | None:
    """Lease the groups of one step; engines that wish weights are the second-best answer."""
    if fenced := kernel.fence(member, request.incarnation):
        return fenced
    leases, versions = kernel.state.leases, kernel.state.versions
    known = leases.draws.get(request.draw_number)
    if known is not None and known.drawn.train_version != request.train_version:
        return refuse(f"draw {request.draw_number} was for another train_version")
    if known is not None and not known.released:
        return DrawReply(groups=known.drawn.groups, generated=known.drawn.generated)
    if known is None and request.draw_number <= leases.last_draw_number:
        return refuse(f"draw {request.draw_number} is over")
    ahead = request.train_version - versions.policy_version
    if ahead not in (0, 1):
        return refuse(
            f"train_version {request.train_version} is neither the acked version "
            f"{versions.policy_version} nor the next one"
        )
    if any(lease.drawn.train_version == request.train_version for lease in leases.held()):
        return refuse(f"another draw holds the groups of step {request.train_version}")
    if request.train_version >= kernel.settings.num_train_steps:
        return None
    return _lease(kernel, request, now)


def _lease(kernel: Kernel, request: Draw, now: float) -> DrawReply | None:
    """Retire what is too old, then take groups if there are enough."""
    settings = kernel.settings
    kernel.retire(request.train_version)
    chosen = []
    if kernel.may_begin(request.train_version):
        chosen = choose(kernel.state.book, settings.draw_order, settings.groups_per_step)
    if not chosen:
        reply = no_groups_now(kernel)
        return reply if reply.wishes else None
    groups = [_leased(kernel, ticket, now) for ticket in chosen]
    generated = kernel.state.accounting.recent
    kernel.emit(
        Drawn(
            incarnation=request.incarnation,
            draw_number=request.draw_number,
            train_version=request.train_version,
            groups=groups,
            generated=generated,
        )
    )
    return DrawReply(groups=groups, generated=generated)


def no_groups_now(kernel: Kernel) -> DrawReply:
    """Instead of groups: who wishes for weights, and what became of groups so far."""
    wishes = [engine.engine_id for _, engine in kernel.wishes()]
    return DrawReply(wishes=wishes, generated=kernel.state.accounting.recent)


def _leased(kernel: Kernel, ticket: TicketState, now: float) -> LeasedGroup:
    assert ticket.summary is not None, f"stored group {ticket.key} has no summary"
    cap, kept = kernel.settings.keep_weight_cap, kernel.state.accounting.kept
    return LeasedGroup(
        group_id=ticket.group_id,
        attempt=ticket.attempt,
        prompt_index=ticket.prompt_index,
        num_bytes=ticket.summary.num_bytes,
        num_tokens=ticket.summary.num_tokens,
        oldest=oldest_name(ticket.summary),
        in_queue_s=now - kernel.stored_at[ticket.group_id],
        keep_weight=1.0 if cap is None else kept.weight(ticket.summary, cap),
    )


def fetch(kernel: Kernel, member: Member, request: Fetch, now: float) -> FetchReply | Error:
    """Whether the payload may be sent; the server adds the frames."""
    if fenced := kernel.fence(member, request.incarnation):
        return fenced
    key = (request.group_id, request.attempt)
    ticket = kernel.state.book.get(request.group_id)
    if ticket is None or ticket.key != key or ticket.phase is not Phase.LEASED:
        return refuse(f"group {key} is not leased", ErrorCode.NOT_FOUND)
    if key in kernel.unheld:
        return refuse(f"the payload of {key} went with a restart", ErrorCode.NOT_FOUND)
    return FetchReply()


def heartbeat(kernel: Kernel, member: Member, request: TrainerHeartbeat, now: float) -> Ok | Error:
    """Note that the trainer lives; release the draws that it does not hold."""
    if fenced := kernel.fence(member, request.incarnation):
        return fenced
    member.last_seen, member.status = now, request.status
    for lease in kernel.state.leases.held():
        number = lease.drawn.draw_number
        if number not in request.draws:
            kernel.emit(Released(incarnation=request.incarnation, draw_number=number))
    return Ok()


def ack(kernel: Kernel, member: Member, request: Ack, now: float) -> Ok | Error:
    """Count a step as trained, once."""
    if fenced := kernel.fence(member, request.incarnation):
        return fenced
    version = kernel.state.versions.policy_version
    trained = kernel.acked(request.step)
    if trained is not None:
        same = sorted(trained.groups) == sorted(request.groups)
        if same and trained.incarnation == request.incarnation:
            return Ok()
        return refuse(f"step {request.step} was acked with other groups")
    if request.step != version:
        return refuse(f"step {request.step} is not the next one, {version}")
    lease = kernel.state.leases.draws.get(request.draw_number)
    if lease is None or lease.drawn.train_version != request.step:
        return refuse(f"draw {request.draw_number} does not hold step {request.step}")
    if sorted(lease.keys) != sorted(request.groups):
        return refuse(f"draw {request.draw_number} holds other groups")
    if not kernel.may_be_trained(lease):
        return refuse(f"draw {request.draw_number} was released", ErrorCode.FENCED)
    kernel.emit(
        Trained(
            incarnation=request.incarnation,
            step=request.step,
            draw_number=request.draw_number,
            groups=lease.keys,
        )
    )
    return Ok()


def settle(kernel: Kernel, member: Member, request: Settle, now: float) -> Ok | Error:
    """Steps that no kept checkpoint can undo are final; their memory is freed."""
    if fenced := kernel.fence(member, request.incarnation):
        return fenced
    versions = kernel.state.versions
    if request.policy_version > versions.policy_version:
        return refuse(f"only {versions.policy_version} steps were acked")
    if request.policy_version > versions.settled:
        kernel.emit(Settled(incarnation=request.incarnation, policy_version=request.policy_version))
    return Ok()


def set_depth(kernel: Kernel, member: Member, request: SetDepth, now: float) -> Ok | Error:
    """Admit by another pipeline_depth."""
    if fenced := kernel.fence(member, request.incarnation):
        return fenced
    settings, depth = kernel.settings, request.depth
    if not settings.min_depth <= depth <= settings.deepest:
        allowed = f"{settings.min_depth} to {settings.deepest}"
        return refuse(f"pipeline_depth {depth} is not within {allowed}")
    if depth != kernel.state.pipeline_depth:
        kernel.emit(DepthSet(incarnation=request.incarnation, depth=depth, reason=request.reason))
    return Ok()


def announce(
    kernel: Kernel, member: Member, request: Announce, now: float
) -> AnnounceReply | Error:
    """Take a publish_sequence and freeze the cells."""
    if fenced := kernel.fence(member, request.incarnation):
        return fenced
    versions = kernel.state.versions
    last = versions.announced
    if last is not None and last.incarnation == request.incarnation:
        if last.number == request.number and last.weights == request.weights:
            return AnnounceReply(publish_sequence=last.publish_sequence, cells=last.cells)
        if request.number <= last.number:
            return refuse(f"publish number {request.number} is over, the last is {last.number}")
    if request.weights.incarnation != request.incarnation:
        return refuse(f"weights {request.weights} are not of incarnation {request.incarnation}")
    if request.wished_only:
        cells = freeze_cells(kernel.wishes(), 1)
    else:
        cells = freeze_cells(kernel.members.receivers(), kernel.settings.engines_per_cell)
    record = Announced(
        incarnation=request.incarnation,
        number=request.number,
        publish_sequence=versions.publish_sequence + 1,
        weights=request.weights,
        cells=cells,
    )
    kernel.emit(record)
    known = {engine.engine_id for _, engine in kernel.members.engines()}
    kernel.desk.announce(
        record, request.buckets, request.probe, request.digests, request.files, known
    )
    kernel.check_live()
    kernel.notify()
    return AnnounceReply(publish_sequence=record.publish_sequence, cells=cells)


def open_cell(kernel: Kernel, member: Member, request: OpenCell, now: float) -> Ok | Error:
    """The trainer listens for a cell."""
    if fenced := kernel.fence(member, request.incarnation):
        return fenced
    progress = kernel.desk.cell(request.publish_sequence, request.cell_id)
    if progress is None:
        return _no_cell(request.publish_sequence, request.cell_id)
    if progress.rendezvous != request.rendezvous:
        progress.rendezvous = request.rendezvous
        progress.check_go()
        kernel.notify(progress.generators)
    return Ok()


def wait_cell(
    kernel: Kernel, member: Member, request: WaitCell, now: float
) -> WaitCellReply | Error | None:
    """Answer once every engine of the cell is at the phase or has failed."""
    if fenced := kernel.fence(member, request.incarnation):
        return fenced
    reply = cell_now(kernel, request)
    if isinstance(reply, Error):
        return reply
    return reply if reply.has_reached(request.phase) else None


def cell_now(kernel: Kernel, request: WaitCell) -> WaitCellReply | Error:
    """Where the engines of the cell are."""
    progress = kernel.desk.cell(request.publish_sequence, request.cell_id)
    if progress is None:
        return _no_cell(request.publish_sequence, request.cell_id)
    phases, details = progress.view()
    return WaitCellReply(phases=phases, details=details, reports=dict(progress.reports))


def abort_cell(kernel: Kernel, member: Member, request: AbortCell, now: float) -> Ok | Error:
    """Nothing more will be broadcast to a cell."""
    if fenced := kernel.fence(member, request.incarnation):
        return fenced
    progress = kernel.desk.cell(request.publish_sequence, request.cell_id)
    if progress is not None and not progress.settled:
        progress.aborted = request.reason or "aborted by the trainer"
        kernel.notify(progress.generators)
        kernel.check_live()
    return Ok()


def finish(kernel: Kernel, member: Member, request: Finish, now: float) -> Ok | Error:
    """The run is over."""
    if fenced := kernel.fence(member, request.incarnation):
        return fenced
    if not kernel.state.versions.finished:
        reason = request.reason or "finished"
        kernel.emit(Finished(incarnation=request.incarnation, reason=reason))
        kernel.notify()
    return Ok()


def _no_cell(publish_sequence: int, cell_id: int) -> Error:
    return refuse(f"publish {publish_sequence} has no cell {cell_id}", ErrorCode.NOT_FOUND)
